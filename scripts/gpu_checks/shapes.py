"""Shapes of public models, for checks with random weights, and the same ones small enough for a CPU."""

from typing import Any

Shapes = dict[str, Any]
"""A config.json."""

LLAMA_8B: Shapes = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN3_0_6B: Shapes = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE: Shapes = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""Smaller than any public mixture of its kind."""
GPT_OSS: Shapes = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 8192,
    "hidden_size": 2880,
    "intermediate_size": 2944,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    },
}
"""Two layers, of whose experts each token chooses all, with few tokens in the vocabulary. Experts are a little wider than gpt-oss's, so
that four devices share no block of 32 values."""
_TINY: Shapes = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


_FLOAT = {"type": "float", "symmetric": True}
_SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}),
    "e4m3": ("float-quantized", {"num_bits": 8, **_FLOAT, "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": 16}),
}
NUMBERS = tuple(_SCHEMES)
"""Kinds of weights that `quantized` makes: 4 and 8 bits, with scales of groups, outputs, and both; int4 with zero points."""
FP8_BLOCKS = "fp8 blocks"
"""Another: a scale for each 128 x 128."""
_SCHEMES[FP8_BLOCKS] = "float-quantized", {"num_bits": 8, **_FLOAT, "strategy": "block", "block_structure": [128, 128]}


def quantized(shapes: Shapes, number: str) -> Shapes:
    """The model with weights of linear layers and experts in one of NUMBERS or FP8_BLOCKS, activations as they are."""
    form, weights = _SCHEMES[number]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return shapes | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }
    }


def tiny(shapes: Shapes) -> Shapes:
    """The model with toy sizes."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "num_experts" in shapes else {}
    return shapes | _TINY | experts
