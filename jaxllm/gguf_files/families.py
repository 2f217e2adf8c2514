"""What GGUF files call the values of a config.json and the weights of each family, and what llama.cpp changed in these.

To add a family: an entry of FAMILIES. Sources: llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.errors import ModelLoadError, joined, shortened
from jaxllm.gguf_files.reading import GgufFile
from jaxllm.log import warn_once
from jaxllm.served_model import GGUF_TYPE


@dataclass(frozen=True)
class Family:
    """How a family's files differ from Llama's."""

    architecture: str
    """transformers' name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer in addition to those of LAYER."""
    norm_offset: float = 0.0
    """Constant that the file adds to the weights of norms."""
    is_permuted: bool = False
    """Whether the values of query and key heads that turn together were made neighbours."""


_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", is_permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "gemma": Family("GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Family("Gemma2ForCausalLM", _SANDWICH, norm_offset=1.0),
    "gemma3": Family("Gemma3ForCausalLM", _SANDWICH, norm_offset=1.0),
    "phi3": Family("Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
}
"""By llama.cpp's name of the architecture."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules by transformers' names."""
CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
"""Values of a file, without their architecture, and of a config.json."""
NUM_PARAMETERS = "num_parameters"
"""The key of a config.json made of a file that says how many values its tensors have."""
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "embedding_scale": 1,
    "expert_count": 0,
    "logit_scale": 1,
    "residual_scale": 1,
}
"""Values that change what a model computes and that no family here reads, with those that change nothing."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Sampling values that a file may recommend, with their names in a generation_config.json."""
_NEUTRAL_SAMPLING = {"mirostat": 0, "xtc_probability": 0}
_WHOLE_HIDDEN_SCALE = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and numbers of layers whose scores are scaled by hidden size / heads: the models with 27 billion parameters."""
CONTROL = 3
"""The type of tokens that are special."""
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
"""Texts of tokens that end turns or documents, of all that llama.cpp's src/llama-vocab.cpp knows those of the families here."""
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MOST_FACTORS = 4096
"""Values of a tensor of factors: one for each pair of values of a head."""
_FILE_TYPES = {0: "float32", 1: "float16"}


def family_of(file: GgufFile) -> Family:
    """Raises ModelLoadError for an architecture that cannot be loaded from GGUF."""
    if file.architecture not in FAMILIES:
        raise ModelLoadError(
            f"{file.file} has the architecture {shortened(file.architecture)!r}; from GGUF files {', '.join(FAMILIES)} can be "
            "loaded, other models from safetensors"
        )
    return FAMILIES[file.architecture]


def transformers_name(name: str, family: Family) -> str | None:
    """A tensor's name in a Hugging Face checkpoint; None for one that belongs into config.json, its own where there is none."""
    if name in _ROPE_FACTORS:
        return None
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    part = {**LAYER, **family.names}.get(found[2]) if found else None
    return name if found is None or part is None else f"model.layers.{found[1]}.{part}.{kind}"


def config_json(file: GgufFile) -> dict[str, Any]:
    """The config.json of a file's model. Raises ModelLoadError naming what is not supported."""
    family = family_of(file)
    try:
        return _config_json(file, family)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{file.file} has values that no {family.architecture} has ({type(error).__name__}: {shortened(str(error))})"
        ) from error


def _config_json(file: GgufFile, family: Family) -> dict[str, Any]:
    value = file.value
    faults = [
        f"{file.architecture}.{name} is {value(name)!r}, supported: {neutral!r}"
        for name, neutral in _NEUTRAL.items()
        if value(name) is not None and value(name) != neutral
    ]
    if value("attention.value_length") not in (None, value("attention.key_length")):
        faults.append("attention.value_length differs from attention.key_length, supported: equal ones")
    if faults:
        raise ModelLoadError(f"{file.file}: {joined(faults)}")
    found = {theirs: value(ours) for ours, theirs in CONFIG.items() if value(ours) not in (None, 0)}
    embedding = file.tensors.get("token_embd.weight")
    heads, width = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length") or (width // heads if width and isinstance(heads, int) and heads else 0)
    if file.architecture in ("gemma2", "gemma3"):
        whole = (file.architecture, value("block_count")) in _WHOLE_HIDDEN_SCALE
        found["query_pre_attn_scalar"] = width // heads if whole else head_dim
    if (rotated := value("rope.dimension_count")) and head_dim and rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    return {
        "architectures": [family.architecture],
        **found,
        "vocab_size": embedding.shape[0] if embedding is not None else None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _rope_scaling(file),
        "quantization_config": _quantization_config(file, family),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(file),
        GGUF_TYPE: _quantization(file),
        NUM_PARAMETERS: sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        "torch_dtype": _FILE_TYPES.get(file.metadata.get("general.file_type", -1), "bfloat16"),
    }


def _quantization_config(file: GgufFile, family: Family) -> dict[str, Any]:
    """The types of the layers' matrices, and of tables of tokens, by module."""

    def types(*prefixes: str) -> dict[str, str]:
        names = {transformers_name(name, family): tensor for name, tensor in file.tensors.items() if name.startswith(prefixes)}
        return {str(name).removesuffix(".weight"): tensor.type for name, tensor in names.items() if len(tensor.shape) == 2}

    return {"quant_method": "gguf", "types": types("blk."), "table_types": types("token_embd.", "output.")}


def _ends(file: GgufFile) -> list[int]:
    """Ids of tokens that end an output: those that the file names, and where it names no end of a turn, those known by their text."""
    known = file.metadata
    ids = [known.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    if ids[1] is None:
        tokens, types = known.get("tokenizer.ggml.tokens") or [], known.get("tokenizer.ggml.token_type") or []
        ids += [
            id for id, (token, type) in enumerate(zip(tokens, types, strict=False)) if type == CONTROL and token in _TURN_ENDS
        ]
    return list(dict.fromkeys(id for id in ids if id is not None))


def generation_json(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json of a file that recommends sampling values, otherwise empty."""
    known, prefix = file.metadata, "general.sampling."
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if known.get(prefix + name, neutral) != neutral:
            told = shortened(str(known[prefix + name]))
            warn_once(f"{file.file} recommends sampling with {name} {told}, which is not supported")
    found = {theirs: known[prefix + ours] for ours, theirs in _SAMPLING.items() if prefix + ours in known}
    if wrong := [name for name, given in found.items() if type(given) not in (int, float)]:
        raise ModelLoadError(f"{file.file} recommends {wrong[0]} {shortened(repr(found[wrong[0]]))}, must be a number")
    return found


def _quantization(file: GgufFile) -> str:
    """llama.cpp's name of the file's mixture of number formats, e.g. Q4_K_M."""
    from gguf import LlamaFileType

    try:
        name = LlamaFileType(file.metadata["general.file_type"]).name
    except (KeyError, TypeError, ValueError):
        return "unknown"
    return name.removeprefix("ALL_").removeprefix("MOSTLY_")


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    value = file.value
    factors = {name: _floats(file, name) for name in _ROPE_FACTORS if name in file.tensors}
    if factors:
        # Llama 3.1's own scaling is stored as what each frequency is divided by.
        only = factors.get("rope_freqs.weight")
        long, short = factors.get("rope_factors_long.weight", only), factors.get("rope_factors_short.weight", only)
        scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        attention_factor = value("rope.scaling.attn_factor") or (1.0 if only else None)
        return scaling if attention_factor is None else {**scaling, "attention_factor": attention_factor}
    kind = value("rope.scaling.type") or "none"
    if kind == "none":
        return None
    given = {"rope_type": kind, "factor": value("rope.scaling.factor")}
    original = value("rope.scaling.original_context_length")
    return {**given, "original_max_position_embeddings": original} if original else given


def _floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type != "F32":
        raise ModelLoadError(f"{file.file}: {name} is of type {tensor.type}, must be F32")
    if math.prod(tensor.shape) > _MOST_FACTORS:
        raise ModelLoadError(f"{file.file}: {name} has the shape {tensor.shape}, must have at most {_MOST_FACTORS} values")
    return [float(x) for x in np.memmap(tensor.file, np.float32, "r", tensor.start, tensor.shape)]
