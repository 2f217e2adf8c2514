"""The mixture of experts of DeepSeek-V3, which several families have. Source: arXiv:2412.19437."""

from typing import Any

from jaxllm.model_parts import MLP, MoE, Routing, Scoring
from jaxllm.models.config_reader import ConfigReader


def sigmoid_moe(c: ConfigReader, router_dtype: str | None = None) -> MoE:
    """Experts chosen by sigmoids with a correction bias within groups, in addition to shared experts."""
    return grouped_moe(c, "sigmoid", "gate.e_score_correction_bias", router_dtype)


def grouped_moe(
    c: ConfigReader, scoring: Scoring, correction_bias: str | None = None, router_dtype: str | None = None, **fields: Any
) -> MoE:
    """Experts chosen within groups, in addition to shared experts. The score of a group is the sum of its two largest.

    fields: of the MoE.
    """
    width = c.integer("moe_intermediate_size")
    num_experts, num_groups = c.integer("num_local_experts", c.integer("n_routed_experts")), c.integer("n_group")
    if num_experts % num_groups:
        c.faults.append(f"n_group is {num_groups}, must divide the {num_experts} experts")
    routing = Routing(
        num_experts,
        c.integer("num_experts_per_tok"),
        scoring,
        renormalize=c.boolean("norm_topk_prob"),
        scale=c.number("routed_scaling_factor"),
        router_dtype=router_dtype,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_groups=c.integer("topk_group"),
        sums_two=True,
    )
    num_shared = c.count("n_shared_experts", 0)
    shared = MLP(width * num_shared, c.activation(), name="mlp.shared_experts") if num_shared else None
    return c.moe(routing, width, shared=shared, **fields)
