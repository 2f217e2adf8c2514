"""SigLIP: the encoder of images that several families have, beside a merger of their own. Source: arXiv:2303.15343."""

from typing import Any

from jaxllm.model_parts import MLP, Norm, VisionLayer
from jaxllm.models.config_reader import ConfigReader


def sizes(v: ConfigReader) -> dict[str, Any]:
    """The fields of a `Vision` that say how large the encoder is. v: the reader of vision_config."""
    v.refuse_unless("num_channels", 3)
    hidden_size, num_heads, patch_size = v.integer("hidden_size"), v.integer("num_attention_heads"), v.integer("patch_size")
    if hidden_size % num_heads:
        v.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of its {num_heads} heads")
    return {
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "num_layers": v.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "intermediate_size": v.integer("intermediate_size"),
        "position_grid": v.integer("image_size") // patch_size,
    }


def parts(v: ConfigReader, prefix: str) -> dict[str, Any]:
    """The fields of a `VisionEncoder` whose tensors have names that begin so."""
    eps = v.number("layer_norm_eps", 1e-6)
    mlp = MLP(
        v.integer("intermediate_size"),
        v.activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        bias=True,
        gate_up=("fc1",),
        down="fc2",
    )
    qkv = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
    return {
        "patch": f"{prefix}embeddings.patch_embedding",
        "positions": f"{prefix}embeddings.position_embedding.weight",
        "layer_name": f"{prefix}encoder.layers.{{}}",
        "layer": VisionLayer(_norm("layer_norm1", eps), _norm("layer_norm2", eps), mlp, qkv, "self_attn.out_proj"),
        "last_norm": _norm(f"{prefix}post_layernorm", eps),
    }


def _norm(name: str, eps: float) -> Norm:
    return Norm(name, eps, centred=True, bias=True)
