"""A saved Mistral 4 in Mistral's own form, as Mistral Large 3 is published: params.json and consolidated.safetensors."""

import json
import re
from pathlib import Path
from typing import Any

from scripts.tiny_configs.unlike import Tensors

OF_MODEL = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
SAME = (
    "vocab_size",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
OF_EXPERTS = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
NAMES = {
    r"model\.embed_tokens": "tok_embeddings",
    r"model\.norm": "norm",
    r"lm_head": "output",
    r"model\.layers": "layers",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.(q|kv)_a_layernorm": r"attention.\1_a_norm",
    r"self_attn\.q_([ab])_proj": r"attention.wq_\1",
    r"self_attn\.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    r"self_attn\.kv_b_proj": "attention.wkv_b",
    r"self_attn\.o_proj": "attention.wo",
    r"mlp\.(gate|shared_experts|experts)": r"\1",
    r"mlp": "feed_forward",
    r"gate_proj": "w1",
    r"down_proj": "w2",
    r"up_proj": "w3",
}


def rewrite(directory: Path) -> None:
    """Put it in the place of the hub's form, whose tensors are called so already."""
    config = directory / "config.json"
    (directory / "params.json").write_text(json.dumps(params(json.loads(config.read_text(encoding="utf-8")))))
    config.unlink()
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")


def params(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        **{ours: config[theirs] for ours, theirs in OF_MODEL.items()},
        **{name: config[name] for name in SAME},
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope_theta": rope["rope_theta"],
        "moe": {"expert_parallel": 1, "route_every_n": 1, **{ours: config[theirs] for ours, theirs in OF_EXPERTS.items()}},
        "yarn": {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "factor": rope["factor"],
            "apply_scale": bool(rope.get("mscale_all_dim")),
            "beta": 32,
            "alpha": 1,
        },
        "llama_4_scaling": {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        },
    }


def tensors(saved: Tensors) -> Tensors:
    """By Mistral's names, with each expert's apart, and one of a vision encoder."""
    text = {named(name): value for name, value in apart(saved).items()}
    return {"vision_encoder.ln_pre.weight": saved["model.norm.weight"], **text}


def apart(saved: Tensors) -> Tensors:
    """With each expert's apart, by the names that other models have for them."""
    found: Tensors = {}
    for name, value in saved.items():
        if name.endswith(".experts.gate_up_proj"):
            for i, both in enumerate(value):
                half = len(both) // 2
                found[name.replace("gate_up_proj", f"{i}.gate_proj.weight")] = both[:half]
                found[name.replace("gate_up_proj", f"{i}.up_proj.weight")] = both[half:]
        elif name.endswith(".experts.down_proj"):
            found |= {name.replace("down_proj", f"{i}.down_proj.weight"): weight for i, weight in enumerate(value)}
        else:
            found[name] = value
    return found


def named(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = re.sub(rf"(?<![^.]){theirs}(?![^.])", ours, name)
    return name
