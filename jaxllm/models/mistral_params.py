"""params.json, the config in Mistral's own form, in the words of config.json. Sources: the Mistral Large 3 and Mistral 4 releases.

Models with attention over latents and experts are read so; of others the hub has config.json too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelLoadError, shortened

ARCHITECTURE = "MistralLarge3ForCausalLM"
OF_MODEL = {
    "activation": "hidden_act",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
OF_EXPERTS = {
    "expert_hidden_dim": "moe_intermediate_size",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "route_every_n": "moe_layer_freq",
}
OF_YARN = {"alpha": "beta_slow", "beta": "beta_fast"}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
"""In all of Mistral's vocabularies."""


def as_config(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The config.json that says the same. Raises ModelLoadError, which names the file, for models of other kinds."""
    experts, yarn = params.get("moe"), params.get("yarn")
    if not isinstance(experts, Mapping) or "kv_lora_rank" not in params:
        raise ModelLoadError(
            f"{file} is of a model without experts (moe) or without attention over latents (kv_lora_rank), which is not read in Mistral's "
            "own form; give a checkpoint that has config.json"
        )
    found = {OF_MODEL.get(name, name): value for name, value in params.items()}
    found |= {OF_EXPERTS.get(str(name), str(name)): value for name, value in experts.items()}
    if "max_position_embeddings" in params:  # rather than max_seq_len
        found["max_position_embeddings"] = params["max_position_embeddings"]
    if yarn is not None:
        found["rope_parameters"] = _rope(yarn, file)
    if quantization := params.get("quantization"):
        found["quantization_config"] = _quantization(quantization, file)
    return {**TOKENS, **found, "architectures": [ARCHITECTURE]}


def _rope(yarn: Any, file: Path) -> dict[str, Any]:
    if not isinstance(yarn, Mapping):
        raise ModelLoadError(f"{file}: yarn is {shortened(repr(yarn))}, must be an object")
    if not isinstance(scales := yarn.get("apply_scale", True), bool):
        raise ModelLoadError(f"{file}: apply_scale is {shortened(repr(scales))}, must be true or false")
    # With apply_scale false, neither cosine and sine nor scores are multiplied for the greater length.
    scaled = {"mscale": 1.0, "mscale_all_dim": 1.0} if scales else {"attention_factor": 1.0}
    return {"rope_type": "yarn", **{OF_YARN.get(str(name), str(name)): value for name, value in yarn.items()}, **scaled}


def _quantization(given: Any, file: Path) -> dict[str, Any]:
    if isinstance(given, Mapping) and given.get("qformat_weight") == "fp8_e4m3":
        if (scheme := given.get("qscheme_act")) in (None, "TENSOR", "NO_SCALES"):
            return {"quant_method": "fp8", "activation_scheme": "dynamic" if scheme == "NO_SCALES" else "static"}
    elif isinstance(given, Mapping) and "quant_method" in given:
        return {**given, "quant_method": str(given["quant_method"]).lower().replace("_", "-")}
    raise ModelLoadError(
        f"{file}: quantization is {shortened(repr(given))}, supported: qformat_weight fp8_e4m3 with the qscheme_act TENSOR or NO_SCALES, "
        "or a quant_method"
    )
