"""Tiny random checkpoints of models that see images, written without torch: config, tokenizer, chat template, weights.

Every parameter is random, those of norms and biases too: values with which models begin a training hide errors. Text models have two
layers and four heads of 16, encoders two layers and two heads of 16. Equal arguments give equal weights, whatever the version of NumPy.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scripts.saving import write_safetensors

VOCAB_SIZE = 512
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
)
PICTURES = {
    "gemma3": "<start_of_image>",
    "mistral3": "[IMG]",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>",
}
"""Placeholder of an image in a chat template; other families use Qwen's tokens."""
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def chat_template(picture: str) -> str:
    """As Qwen's, with this text for a picture."""
    return (
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
        "{%- if message.content is string -%}{{ message.content }}"
        "{%- else -%}{%- for part in message.content -%}"
        f"{{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}}{picture}"
        "{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>"
        "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

Shapes = dict[str, tuple[int, ...]]


def write(
    directory: Path,
    family: str = "qwen3_vl",
    *,
    variant: str | None = None,
    seed: int = 0,
    dtype: str = "float32",
    gain: float = 2.0,
    tied: bool = True,
) -> Path:
    """A checkpoint of a family of FAMILIES, or of a variant of VARIANTS.

    dtype: of the file. gain: of the text model's products, the larger the wilder its text. tied: whether the head is the embedding.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    config, shapes = (FAMILIES[family] if variant is None else VARIANTS[family, variant])(ids, tied)
    config |= {"dtype": dtype, "tie_word_embeddings": tied, "eos_token_id": ids["<|im_end|>"]}
    _write_json(directory / "config.json", config)
    _write_json(directory / "preprocessor_config.json", PREPROCESSORS[family])
    _write_json(directory / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]})
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = chat_template(PICTURES.get(family, QWEN_PICTURE))
    _write_json(directory / "tokenizer_config.json", {**settings, "chat_template": template})
    generator = np.random.RandomState(seed)  # of which NumPy never changes what it draws
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {name: _values(name, shape, generator, gain, tied).astype(stored) for name, shape in sorted(shapes.items())}
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _values(name: str, shape: tuple[int, ...], generator: np.random.RandomState, gain: float, tied: bool) -> np.ndarray:
    if name.endswith(".bias"):
        return generator.normal(0, 0.2, shape)
    if len(shape) == 1:
        return generator.uniform(0.5, 1.5, shape)
    if name.endswith(("pos_embed.weight", "position_embedding.weight", "position_embeddings", "cls_token")):
        return generator.normal(0, 0.5, shape)
    if "embed_tokens" in name:  # a tied head makes the last token the likeliest next one where its embedding is large
        return generator.normal(0, gain * (0.02 if tied else 0.15), shape)
    inputs = shape[1] if ".experts." in name else math.prod(shape[1:])
    return generator.normal(0, (1.0 if _is_of_encoder(name) else gain) / math.sqrt(inputs), shape)


def _is_of_encoder(name: str) -> bool:
    return any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector.", "vision_model.", "connector."))


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _tokenizer() -> Tokenizer:
    """A token for each byte, then those of the families; VOCAB_SIZE has place for a few more."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def _qwen3_vl(
    ids: dict[str, int], tied: bool, experts: dict[str, Any] | None = None, depth: int = 2, deepstack: Sequence[int] = (0,)
) -> tuple[dict[str, Any], Shapes]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    kind = "qwen3_vl" if experts is None else "qwen3_vl_moe"
    text = {**TEXT, **(experts or {}), "rope_parameters": rope, "model_type": f"{kind}_text", "tie_word_embeddings": tied}
    vision = {**VISION, "depth": depth, "model_type": kind, "num_position_embeddings": 64}
    vision["deepstack_visual_indexes"] = [*deepstack]
    name = "Qwen3VLForConditionalGeneration" if experts is None else "Qwen3VLMoeForConditionalGeneration"
    config = {
        "architectures": [name],
        "model_type": kind,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    D, F, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    tower: Shapes = {
        **_linear("patch_embed.proj", (D, 3, 2, 16, 16)),
        "pos_embed.weight": (vision["num_position_embeddings"], D),
    }
    for i in range(vision["depth"]):
        block = f"blocks.{i}"
        tower |= {**_norm(f"{block}.norm1", D), **_norm(f"{block}.norm2", D)}
        tower |= {**_linear(f"{block}.attn.qkv", (3 * D, D)), **_linear(f"{block}.attn.proj", (D, D))}
        tower |= {**_linear(f"{block}.mlp.linear_fc1", (F, D)), **_linear(f"{block}.mlp.linear_fc2", (D, F))}
    for merger, width in (("merger", D), *((f"deepstack_merger_list.{i}", merged) for i in range(len(deepstack)))):
        tower |= {**_norm(f"{merger}.norm", width), **_linear(f"{merger}.linear_fc1", (merged, merged))}
        tower |= _linear(f"{merger}.linear_fc2", (vision["out_hidden_size"], merged))
    shapes = {f"model.visual.{name}": shape for name, shape in tower.items()}
    return config, shapes | decoder(text, "model.language_model", None if tied else "lm_head", head_norms=True)


def _qwen2_5_vl(ids: dict[str, int], tied: bool) -> tuple[dict[str, Any], Shapes]:
    """As released: the text model's values are not in a part of their own."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    vision = {**VISION, "model_type": "qwen2_5_vl", "hidden_act": "silu", "patch_size": 14, "fullatt_block_indexes": [1]}
    vision |= {"window_size": 56, "tokens_per_second": 2}
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "bos_token_id": ids["<|endoftext|>"],
        "rope_scaling": rope,
        "rope_theta": 10000.0,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    D, F, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    tower: Shapes = {"patch_embed.proj.weight": (D, 3, 2, 14, 14), "merger.ln_q.weight": (D,)}
    tower |= {**_linear("merger.mlp.0", (merged, merged)), **_linear("merger.mlp.2", (vision["out_hidden_size"], merged))}
    for i in range(vision["depth"]):
        block = f"blocks.{i}"
        tower |= {f"{block}.norm1.weight": (D,), f"{block}.norm2.weight": (D,)}
        tower |= {**_linear(f"{block}.attn.qkv", (3 * D, D)), **_linear(f"{block}.attn.proj", (D, D))}
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            tower |= _linear(f"{block}.mlp.{name}_proj", shape)
    shapes = {f"visual.{name}": shape for name, shape in tower.items()}
    return config, shapes | decoder(TEXT, "model", None if tied else "lm_head", bias=True)


def _mistral3(ids: dict[str, int], tied: bool) -> tuple[dict[str, Any], Shapes]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**TEXT, "model_type": "mistral", "rope_parameters": rope, "sliding_window": None, "tie_word_embeddings": tied}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": vision,
        "image_token_index": ids["[IMG]"],
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "vision_feature_layer": -1,
    }
    D, F, L = vision["hidden_size"], vision["intermediate_size"], text["hidden_size"]
    shapes: Shapes = {"vision_tower.patch_conv.weight": (D, 3, 14, 14), "vision_tower.ln_pre.weight": (D,)}
    for i in range(vision["num_hidden_layers"]):
        layer = f"vision_tower.transformer.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (D,) for norm in ("attention_norm", "ffn_norm")}
        shapes |= {f"{layer}.attention.{name}_proj.weight": (D, D) for name in "qkvo"}
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            shapes[f"{layer}.feed_forward.{name}_proj.weight"] = shape
    projector = {
        "norm": (D,),
        "patch_merger.merging_layer": (D, 4 * D),
        "linear_1": (L, D),
        "linear_2": (L, L),
    }
    shapes |= {f"multi_modal_projector.{name}.weight": shape for name, shape in projector.items()}
    return config, shapes | decoder(text, "language_model.model", None if tied else "language_model.lm_head")


def _gemma3(ids: dict[str, int], tied: bool) -> tuple[dict[str, Any], Shapes]:
    """As released: 9 tokens for each picture, one more than a window has."""
    text = {
        **{key: value for key, value in TEXT.items() if key != "hidden_act"},
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 1000.0,
        "tie_word_embeddings": tied,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 84,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 9,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
    }
    D, L = vision["hidden_size"], text["hidden_size"]
    shapes = {f"vision_tower.vision_model.{name}": shape for name, shape in _siglip(vision).items()}
    shapes |= {
        "multi_modal_projector.mm_soft_emb_norm.weight": (D,),
        "multi_modal_projector.mm_input_projection_weight": (D, L),
    }
    head = None if tied else "language_model.lm_head"
    shapes |= decoder(text, "language_model.model", head, head_norms=True)
    for i in range(text["num_hidden_layers"]):
        layer = f"language_model.model.layers.{i}"
        shapes |= {f"{layer}.{name}_feedforward_layernorm.weight": (L,) for name in ("pre", "post")}
    return config, shapes


def _idefics3(ids: dict[str, int], tied: bool, kind: str, name: str) -> tuple[dict[str, Any], Shapes]:
    """4 tokens for each tile."""
    text = {**TEXT, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision = {
        "model_type": f"{kind}_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 58,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = {
        "architectures": [name],
        "model_type": kind,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
    }
    D, L = vision["hidden_size"], text["hidden_size"]
    shapes = {f"model.vision_model.{name}": shape for name, shape in _siglip(vision).items()}
    shapes["model.connector.modality_projection.proj.weight"] = (L, 4 * D)
    return config, shapes | decoder(text, "model.text_model", None if tied else "lm_head")


def _siglip(vision: dict[str, Any]) -> Shapes:
    """The layers of an encoder."""
    D, F, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    shapes: Shapes = {
        **_linear("embeddings.patch_embedding", (D, 3, patch, patch)),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, D),
        **_norm("post_layernorm", D),
    }
    for i in range(vision["num_hidden_layers"]):
        layer = f"encoder.layers.{i}"
        shapes |= {**_norm(f"{layer}.layer_norm1", D), **_norm(f"{layer}.layer_norm2", D)}
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{name}", (D, D))
        shapes |= {**_linear(f"{layer}.mlp.fc1", (F, D)), **_linear(f"{layer}.mlp.fc2", (D, F))}
    return shapes


def _internvl(ids: dict[str, int], tied: bool, is_large: bool = False) -> tuple[dict[str, Any], Shapes]:
    """4 tokens for each tile. is_large: as the larger of the two released encoders, with other norms and biases."""
    text = {**TEXT, "model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    text["tie_word_embeddings"] = tied
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [56, 56],
        "patch_size": [14, 14],
        "hidden_act": "gelu",
        "attention_bias": not is_large,
        "use_qk_norm": is_large,
        "norm_type": "rms_norm" if is_large else "layer_norm",
        "use_mean_pooling": not is_large,
    }
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
    }
    D, F, L = vision["hidden_size"], vision["intermediate_size"], text["hidden_size"]
    tower: Shapes = {
        "embeddings.cls_token": (1, 1, D),
        "embeddings.position_embeddings": (1, 16 + 1, D),
        **_linear("embeddings.patch_embeddings.projection", (D, 3, 14, 14)),
    }
    if is_large:
        tower |= _norm("layernorm", D)
    for i in range(vision["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        tower |= {f"{layer}.lambda_1": (D,), f"{layer}.lambda_2": (D,)}
        for norm in ("layernorm_before", "layernorm_after"):
            tower |= _norm(f"{layer}.{norm}", D, bias=not is_large)
        for part in "qkv":
            tower |= _linear(f"{layer}.attention.{part}_proj", (D, D), bias=not is_large)
            if is_large and part != "v":
                tower[f"{layer}.attention.{part}_norm.weight"] = (D,)
        tower |= _linear(f"{layer}.attention.projection_layer", (D, D))
        tower |= {**_linear(f"{layer}.mlp.fc1", (F, D)), **_linear(f"{layer}.mlp.fc2", (D, F))}
    shapes = {f"vision_tower.{name}": shape for name, shape in tower.items()}
    shapes |= {
        f"multi_modal_projector.{name}": shape
        for name, shape in {
            **_norm("layer_norm", 4 * D),
            **_linear("linear_1", (L, 4 * D)),
            **_linear("linear_2", (L, L)),
        }.items()
    }
    head = None if tied else "language_model.lm_head"
    return config, shapes | decoder(text, "language_model.model", head, head_norms=True)


def decoder(text: dict[str, Any], prefix: str, head: str | None, *, head_norms: bool = False, bias: bool = False) -> Shapes:
    """Names and shapes of a decoder of Llama's form, with experts if the config has them."""
    L, F, H = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    query, key = text["num_attention_heads"] * H, text["num_key_value_heads"] * H
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (VOCAB_SIZE, L), f"{prefix}.norm.weight": (L,)}
    if head is not None:
        shapes[f"{head}.weight"] = (VOCAB_SIZE, L)
    for i in range(text["num_hidden_layers"]):
        layer = f"{prefix}.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (L,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes |= _linear(f"{layer}.self_attn.{name}_proj", (rows, L), bias=bias)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (L, query)
        if head_norms:
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (H,) for name in "qk"}
        if "num_experts" in text:
            E, width = text["num_experts"], text["moe_intermediate_size"]
            shapes[f"{layer}.mlp.gate.weight"] = (E, L)
            shapes[f"{layer}.mlp.experts.gate_up_proj"] = (E, L, 2 * width)
            shapes[f"{layer}.mlp.experts.down_proj"] = (E, width, L)
        else:
            shapes |= {f"{layer}.mlp.{name}_proj.weight": (F, L) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (L, F)
    return shapes


def _linear(name: str, shape: Sequence[int], *, bias: bool = True) -> Shapes:
    weight = {f"{name}.weight": tuple(shape)}
    return {**weight, f"{name}.bias": (shape[0],)} if bias else weight


def _norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    return _linear(name, (width,), bias=bias)


FAMILIES: dict[str, Callable[[dict[str, int], bool], tuple[dict[str, Any], Shapes]]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": lambda ids, tied: _qwen3_vl(ids, tied, EXPERTS),
    "qwen2_5_vl": _qwen2_5_vl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "idefics3": lambda ids, tied: _idefics3(ids, tied, "idefics3", "Idefics3ForConditionalGeneration"),
    "internvl": _internvl,
    "smolvlm": lambda ids, tied: _idefics3(ids, tied, "smolvlm", "SmolVLMForConditionalGeneration"),
}
VARIANTS = {
    ("internvl", "large"): partial(_internvl, is_large=True),
    ("qwen3_vl", "deep"): partial(_qwen3_vl, depth=5, deepstack=(0, 2)),
}
_QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4096, "longest_edge": 262144},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56**2,
    "max_pixels": 448**2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PIXTRAL = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 448},
    "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 84, "width": 84},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_IDEFICS3 = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 2 * 58},
    "max_image_size": {"longest_edge": 58},
    "do_image_splitting": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_INTERNVL = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 56, "width": 56},
    "max_patches": 4,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen2_5_vl": _QWEN2_5,
    "mistral3": _PIXTRAL,
    "gemma3": _GEMMA3,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "internvl": _INTERNVL,
}
"""Areas from 64² to 512² pixels, so that prompts stay short."""
