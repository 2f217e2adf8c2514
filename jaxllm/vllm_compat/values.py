"""vLLM's values of options that both have, once: what they are called here, which change nothing, and which are refused, with the reason.

The command line, YAML files, the environment, `LLM(...)`, `EngineArgs(...)` and docs/VLLM_FLAGS.md derive from `VALUES`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.log import info_once
from jaxllm.options.quantization import ONLINE, STORED


@dataclass(frozen=True)
class VllmValue:
    """A value of vLLM that an option here does not have."""

    value: Any = None
    """The value that replaces it."""
    text: str = ""
    """Log message about it, or why it is refused and what to do instead; empty: another name of the same value."""
    refused: bool = False


def _renamed(**names: Any) -> dict[str, VllmValue]:
    return {name: VllmValue(value) for name, value in names.items()}


def _taken(value: Any, text: str, names: str) -> Iterator[tuple[str, VllmValue]]:
    yield from ((name, VllmValue(value, text)) for name in names.split())


def _refused(text: str, names: str, *, but: Collection[str] = ()) -> Iterator[tuple[str, VllmValue]]:
    yield from ((name, VllmValue(None, text, refused=True)) for name in names.split() if name not in but)


_MAPPED = "files are memory-mapped, and each device reads its own slices"
_STORED = "the checkpoint says how its weights are stored"
VALUES: Mapping[str, Mapping[str, VllmValue]] = {
    "max_model_len": _renamed(auto=-1),
    "dtype": _renamed(half="float16", float="float32"),
    "generation_config": _renamed(vllm="none"),
    "load_format": {
        **_renamed(hf="auto", pt="auto", gguf="auto"),
        **dict(_taken("auto", _MAPPED, "fastsafetensors instanttensor npcache")),
        **dict(_taken("auto", f"{_MAPPED}; from object storage, download the model first", "runai_streamer")),
        **dict(_refused("give the whole checkpoint, of which each device reads its part", "runai_streamer_sharded sharded_state")),
        **dict(_refused("weights are not passed between processes; give the checkpoint's directory", "ipc_cache modelexpress")),
        **dict(_refused("give the checkpoint with safetensors, and config.json and tokenizer.json next to them", "tensorizer")),
        **dict(_taken("auto", "files in the hub's form are read (config.json, model*.safetensors, tokenizer.json) where a checkpoint "
                      "has them, else Mistral's own", "mistral")),
        **dict(_taken("auto", f"{_STORED}; weights that it holds in 16 bits stay so", "bitsandbytes")),
    },
    "quantization": {
        **_renamed(fp8_per_channel="fp8", ptpc_fp8="fp8", int8_per_channel_weight_only="int8"),
        **dict(_taken("fp8", "weights have a scale for each output channel", "fp8_per_tensor")),
        **dict(_refused("fp8 here has a scale for each output channel: take fp8, or a checkpoint with scales by block", "fp8_per_block")),
        **dict(_refused(f"name the format: {', '.join(ONLINE)}", "online")),
        **dict(_refused(f"only {', '.join(ONLINE)} is supported, and checkpoints of {', '.join(STORED)} and gguf (docs/MODELS.md)", """
            awq awq_marlin auto_awq gptq gptq_marlin auto_gptq bitsandbytes modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed quark
            torchao fp_quant fbgemm_fp8 experts_int8 deepspeedfp moe_wna16 mxfp8 nvfp4
            nvfp4_per_token humming inc deepseek_v4_fp8""", but={*ONLINE, *STORED})),
        **dict(_taken(None, _STORED, f"{' '.join(STORED)} gguf")),
    },
    "prefix_caching_hash_algo": {
        **dict(_taken("sha256", "blocks are found alike by any hash", "xxhash")),
        **dict(_taken("sha256_cbor", "blocks are found alike by any hash", "xxhash_cbor")),
    },
    "mm_hasher_algorithm": dict(_taken("sha256", "equal images are found alike by any hash, and blake3 needs a package", "blake3")),
    "kv_cache_dtype": dict(_refused("take fp8 (e4m3), or auto", """
        fp8_e5m2 fp8_inc fp8_ds_mla nvfp4_ds_mla turboquant_k8v4 turboquant_4bit_nc turboquant_k3v4_nc turboquant_3bit_nc octave_k3v4
        octave_k3v3 octave_k3v3_compact ultraquant_4bit int4_per_token_head int8_per_token_head fp8_per_token_head nvfp4
        nvfp4_4over6""")),
    "distributed_executor_backend": dict(_refused(
        "start the command on each host with --nnodes, --node-rank and --master-addr, or take ray", "external_launcher")),
    "uvicorn_log_level": dict(_taken("debug", "it is the lowest level", "trace")),
}  # fmt: skip
"""By option and by vLLM's value."""

QUANTIZATIONS = frozenset({*ONLINE, *VALUES["quantization"]})
"""Words after `-q`, which alone is --quiet, that make it vLLM's short form of --quantization."""


def as_here(name: str, value: Any) -> Any:
    """The value of an option: what is taken for vLLM's, or the given one. Raises ValueError for vLLM's values that are refused."""
    found = _known(name, value)
    if found is None:
        return value
    if found.refused:
        raise ValueError(f"{value!r} is refused: {found.text}")
    return found.value


def told_about(name: str, value: Any, how: str | None = None) -> str | None:
    """Log message about a value of vLLM's that is replaced by another. `how` it was written; default: as a keyword."""
    found = _known(name, value)
    if found is None or found.refused or not found.text:
        return None
    taken = "changes nothing here" if found.value is None else f"is taken as {found.value}"
    return f"{how or f'{name}={value!r}'} {taken}: {found.text}"


def tell(name: str, value: Any, how: str | None = None) -> None:
    """Log what `told_about` returns."""
    if (text := told_about(name, value, how)) is not None:
        info_once(text)


def _known(name: str, value: Any) -> VllmValue | None:
    return VALUES.get(name, {}).get(value) if isinstance(value, str) else None
