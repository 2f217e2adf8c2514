"""The mixture of experts of DeepSeek-V3, which GLM-4.5 has too. Source: arXiv:2412.19437."""

from jaxllm.model_parts import MLP, MoE, Routing
from jaxllm.models.config_reader import ConfigReader


def sigmoid_moe(c: ConfigReader) -> MoE:
    """Experts chosen by sigmoids with a correction bias within groups, in addition to shared experts."""
    width = c.integer("moe_intermediate_size")
    num_experts, num_groups = c.integer("num_local_experts", c.integer("n_routed_experts")), c.integer("n_group")
    if num_experts % num_groups:
        c.faults.append(f"n_group is {num_groups}, must divide the {num_experts} experts")
    routing = Routing(
        num_experts,
        c.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=c.boolean("norm_topk_prob"),
        scale=c.number("routed_scaling_factor"),
        correction_bias="gate.e_score_correction_bias",
        num_groups=num_groups,
        top_groups=c.integer("topk_group"),
        sums_two=True,
    )
    shared = MLP(width * c.integer("n_shared_experts"), c.activation(), name="mlp.shared_experts")
    return c.moe(routing, width, shared=shared)
