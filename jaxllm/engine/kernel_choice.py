"""Lists the implementations of each op that an engine can use, in order of preference."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.errors import ConfigError
from jaxllm.layers.routing import rule_of
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Audio, LatentAttention, Vision
from jaxllm.parallel.across_hosts import has_other_hosts
from jaxllm.parallel.mesh import context_size, tensor_size
from jaxllm.runner.memory import MemoryPlan
from pallas_kernels import (
    collectives,
    delta_decode,
    expert_choice,
    gated_delta,
    gated_matmul,
    grouped_matmul,
    lora,
    mla_attention,
    paged_attention,
    quantize,
    quantized_matmul,
    rope_cache_write,
    router_scores,
    sampling,
    segment_attention,
    state_space,
    wide_attention,
)
from pallas_kernels.checking.gated_matmul import Shapes as GatedShapes
from pallas_kernels.verified import is_verified, was_verified

PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""
SAMPLING_PREFERENCE = ("triton", "xla")

Candidates = Mapping[str, tuple[str, ...]]
"""By op, the implementations that support the model's shapes, in order of preference."""


def attention_implementation(wanted: str, model: ModelConfig, page_size: int, *, on_gpu: bool, has_part: bool = False) -> str:
    """The wanted implementation if it supports the model's shapes, or for "auto" the fastest that does. Raises ConfigError.

    has_part: whether each device has a part of a row's keys, or a step attends to its own in parts.
    """
    if wanted == "auto":
        found = attention_candidates(wanted, model, page_size, on_gpu=on_gpu, has_part=has_part)
        return next(iter(found.values()))[0]
    missing = paged_attention.missing(wanted)
    if missing is not None:
        raise ConfigError(f"attention_implementation is {wanted!r}, which {missing}")
    for attention in model.encoder_attentions:
        known = segment_attention.candidates(
            platform="gpu", dtype=model.dtype, head_dim=attention.head_dim, interpret=not on_gpu
        )
        if wanted not in (*known, *PLAIN):
            raise ConfigError(
                f"attention_implementation is {wanted!r}, which does not take heads of width {attention.head_dim} in {model.dtype} in an "
                "encoder; use auto"
            )
    for attention in model.attentions:
        case = {**_attention_case(model, attention, page_size), "has_part": has_part, "interpret": not on_gpu}
        op, name = (wide_attention, wide_attention.named(wanted)) if is_wide(attention) else (paged_attention, wanted)
        if not op.supports(name, **case):
            raise ConfigError(
                f"attention_implementation is {wanted!r}, which does not take {attention.group_size} query heads per key-value head of "
                f"width {attention.head_dim} in {model.dtype} over a cache of {model.kv_cache_dtype} in blocks of {page_size}"
                f"{' and sinks' if attention.sinks else ''}{' and keys in parts' if has_part else ''}; use auto"
            )
    for latents in model.latent_attentions:
        case = _latent_case(model, latents, page_size)
        if wanted not in mla_attention.IMPLEMENTATIONS or not mla_attention.supports(wanted, **case, interpret=not on_gpu):
            raise ConfigError(
                f"attention_implementation is {wanted!r}, which does not take {case['num_heads']} heads over latents of "
                f"{latents.latent_dim} and rotated keys of {latents.rotated_dim} values in {model.dtype} over a cache of "
                f"{model.kv_cache_dtype} in blocks of {page_size}; use auto"
            )
    return wanted


def attention_candidates(
    wanted: str, model: ModelConfig, page_size: int, *, on_gpu: bool, has_part: bool = False
) -> dict[str, tuple[str, ...]]:
    """By op of attention that the model has: the wanted implementation alone, or for "auto" all that support the model's shapes."""
    platform = "gpu" if on_gpu else "cpu"
    found = {}
    if model.encoder_attentions:
        found["segment_attention"] = _of_all(
            segment_attention.candidates(platform=platform, dtype=model.dtype, head_dim=part.head_dim)
            for part in model.encoder_attentions
        )
    if narrow := [part for part in model.attentions if not is_wide(part)]:
        found["paged_attention"] = _of_all(
            paged_attention.candidates(platform=platform, **_attention_case(model, part, page_size), has_part=has_part)
            for part in narrow
        )
    if wide := [part for part in model.attentions if is_wide(part)]:
        found["wide_attention"] = _of_all(
            wide_attention.candidates(platform=platform, **_attention_case(model, part, page_size), has_part=has_part)
            for part in wide
        )
        if not _may_use("wide_attention", wanted, on_gpu=on_gpu):
            found["wide_attention"] = ("xla",)
    if model.latent_attentions:
        found["mla_attention"] = _of_all(
            mla_attention.candidates(platform=platform, **_latent_case(model, part, page_size))
            for part in model.latent_attentions
        )
    if wanted == "auto":
        return found
    return {op: (wide_attention.named(wanted) if op == "wide_attention" else wanted,) for op in found}


def is_wide(part: Attention) -> bool:
    """Whether these heads are for the kernels of `wide_attention`."""
    return wide_attention.is_wide(part.head_dim)


def wants_tiles(wanted: str, model: ModelConfig, *, on_gpu: bool, is_checked: bool, is_here: bool = True) -> bool:
    """Whether weights in 4 and 8 bits are laid out for kernels: those of this GPU take the model's type, or a CPU was asked for kernels.

    `wanted` is the option attention_implementation. Where is_checked says that kernels are checked at the start, those are used of which
    some source was verified on this kind of GPU, and all where `wanted` names kernels; else those whose source is verified. Those of
    experts in tiles are newer than some records of `grouped_matmul`.
    is_here: False for a GPU elsewhere, which is taken for one on which kernels were verified."""
    if not is_here:
        return wanted not in PLAIN and model.dtype == "bfloat16"
    if wanted in PLAIN or not on_gpu:
        return wanted not in ("auto", *PLAIN)
    if quantized_matmul.candidates(platform="gpu", dtype=model.dtype)[0] in PLAIN:
        return False
    if wanted != "auto" and is_checked:
        return True
    kind = jax.local_devices()[0].device_kind
    if is_checked:
        return all(was_verified(kind, op) for op in ("quantized_matmul", *(("grouped_matmul",) if model.mixtures else ())))
    are_experts_verified = not model.mixtures or is_verified(kind, "grouped_matmul", carried=False)
    return are_experts_verified and is_verified(kind, "quantized_matmul")


def may_quantize_by_kernels(wanted: str, *, on_gpu: bool) -> bool:
    """Whether fp8 products may be computed in the new way: see `_may_use`."""
    return _may_use("quantize", wanted, on_gpu=on_gpu)


def _may_use(op: str, wanted: str, *, on_gpu: bool) -> bool:
    """Whether the new kernels of an op may be chosen: on this kind of GPU they were verified, or `wanted`, the option
    attention_implementation, names kernels."""
    if wanted != "auto":
        return wanted not in PLAIN
    return on_gpu and is_verified(jax.local_devices()[0].device_kind, op)


def candidates(
    wanted: str,
    model: ModelConfig,
    plan: MemoryPlan,
    mesh: Mesh,
    *,
    on_gpu: bool,
    has_adapters: bool = False,
    has_tiles: bool = False,
    expert_types: Sequence[str | None] = (),
    gated: Sequence[GatedShapes] = (),
) -> Candidates:
    """Candidates for every op. `wanted` is the option attention_implementation; if it is plain JAX, so are all other ops.
    has_tiles: weights of some linear layers are in tiles. expert_types: those of mixtures' weights, if some are in tiles.
    gated: dense layers whose gate and up a kernel may compute together, on all devices."""
    num_parts = context_size(mesh)
    has_part = num_parts > 1 or model.attends_within_images
    found = attention_candidates(wanted, model, plan.block_size // num_parts, on_gpu=on_gpu, has_part=has_part)
    # On a GPU plain JAX may be the only choice for latents; the other ops have their kernels all the same.
    is_plain = all(names[0] in PLAIN for names in found.values()) and (wanted != "auto" or not on_gpu or bool(model.attentions))
    if is_plain and wanted == "auto" and on_gpu:
        head_dims = ", ".join(map(str, sorted({part.head_dim for part in model.attentions})))
        logger.warning(
            "no kernel for attention takes %s with heads of width %s in %s: plain JAX computes all operations, which is slower",
            model.architecture,
            head_dims,
            model.dtype,
        )
    elif wanted == "auto" and on_gpu and found.get("wide_attention", ("",))[0] in PLAIN:
        logger.warning(
            "heads of width %s: plain JAX computes their attention, which is slower, because their kernel was not verified on this kind of "
            "GPU or does not take them; --attention-implementation %s uses it if it can be used and the kernel check finds it right",
            ", ".join(map(str, sorted({part.head_dim for part in model.attentions if is_wide(part)}))),
            found["paged_attention"][0],
        )
    if model.attentions:
        found["rope_cache_write"] = ("xla",) if is_plain else _rope_candidates(model, plan, mesh, on_gpu=on_gpu)
    if has_tiles:
        found["quantized_matmul"] = quantized_matmul.candidates(platform="gpu", dtype=model.dtype, interpret=not on_gpu)
    # As of `quantize` below, several devices compute with it only where `wanted` names kernels.
    may_gate = (mesh.size == 1 or wanted != "auto") and _may_use("gated_matmul", wanted, on_gpu=on_gpu)
    if gated and not is_plain and may_gate:
        of_layers = _gated_candidates(gated, mesh, on_gpu=on_gpu)
        if of_layers[0] not in PLAIN:
            found["gated_matmul"] = of_layers
    encoder = model.vision or model.audio
    if widths := quantized_widths(model, tensor_size(mesh)):
        # Several devices do it only where `wanted` names kernels: no record has that, and it was not timed against plain JAX.
        is_unproven = wanted == "auto" and tensor_size(mesh) > 1
        is_left_out = is_plain or is_unproven or not may_quantize_by_kernels(wanted, on_gpu=on_gpu)
        found["quantize"] = ("xla",) if is_left_out else _quantize_candidates(model, widths, on_gpu=on_gpu)
    if is_plain:
        of_mixtures = ("router_scores", "expert_choice", "grouped_matmul") if model.mixtures else ()
        others = ("sampling", "collectives", *of_mixtures, *(("gated_delta", "delta_decode") if model.delta_nets else ()))
        others += ("state_space",) if model.mambas else ()
        others += (*(("lora",) if has_adapters else ()), *(("segment_attention",) if encoder else ()))
        return {**found, **dict.fromkeys(others, ("xla",))}
    sample = tuple(
        name
        for name in SAMPLING_PREFERENCE
        if name in PLAIN or sampling.supports(name, vocab_size=model.padded_vocab_size, interpret=not on_gpu)
    )
    return {
        **found,
        "sampling": sample,
        "collectives": _collectives(model, mesh, on_gpu=on_gpu),
        **(_of_mixtures(model, wanted, mesh, expert_types, on_gpu=on_gpu) if model.mixtures else {}),
        **(_of_delta_nets(model, wanted, on_gpu=on_gpu) if model.delta_nets else {}),
        **({"state_space": _state_space_candidates(model, wanted, on_gpu=on_gpu)} if model.mambas else {}),
        **({"lora": lora.candidates(platform="gpu", dtype=model.dtype, interpret=not on_gpu)} if has_adapters else {}),
        **({"segment_attention": _segment_candidates(model, encoder, on_gpu=on_gpu)} if encoder else {}),
    }


def quantized_widths(model: ModelConfig, num_devices: int) -> tuple[int, ...]:
    """The widths of the vectors that products of layers quantise on a device, where kernels may do that; empty: no product does, or it is
    left to plain JAX, as in layers without keys and values."""
    if not model.quantizes_inputs or model.latent_attentions or model.state_mixers:
        return ()
    dense = (layer.dense for layer in model.layers)
    split = [*(part.output_width for part in model.attentions), *(mlp.width for mlp in dense if mlp is not None)]
    return tuple(dict.fromkeys([model.hidden_size, *(width // num_devices for width in split)]))


def _quantize_candidates(model: ModelConfig, widths: tuple[int, ...], *, on_gpu: bool) -> tuple[str, ...]:
    if model.dtype != "bfloat16":
        return ("xla",)  # its sums are float32: scales might leave the range of float16
    return quantize.candidates(platform="gpu", dtype=model.dtype, widths=widths, interpret=not on_gpu)


def _gated_candidates(layers: Sequence[GatedShapes], mesh: Mesh, *, on_gpu: bool) -> tuple[str, ...]:
    return _of_all(
        gated_matmul.candidates(
            platform="gpu",
            dtype=layer.dtype,
            width=layer.width,
            hidden=layer.hidden // tensor_size(mesh),
            is_scaled=layer.is_scaled,
            interpret=not on_gpu,
        )
        for layer in layers
    )


def _rope_candidates(model: ModelConfig, plan: MemoryPlan, mesh: Mesh, *, on_gpu: bool) -> tuple[str, ...]:
    return _of_all(
        rope_cache_write.candidates(
            platform="gpu",
            dtype=model.dtype,
            cache_dtype=model.kv_cache_dtype,
            cache_size=plan.num_blocks
            * plan.cache.layers_per_block
            * (plan.block_size // context_size(mesh))
            * part.head_dim
            * (part.num_kv_heads // tensor_size(mesh)),
            head_dim=part.head_dim,
            interpret=not on_gpu,
        )
        for part in model.attentions
    )


def _of_mixtures(
    model: ModelConfig, wanted: str, mesh: Mesh, expert_types: Sequence[str | None], *, on_gpu: bool
) -> Candidates:
    choice = _of_all(
        expert_choice.candidates(
            platform="gpu",
            num_experts=part.routing.num_experts,
            rule=rule_of(part.routing),
            interpret=not on_gpu,
        )
        for part in model.mixtures
    )
    experts = _of_all(
        grouped_matmul.candidates(
            platform="gpu",
            dtype=model.dtype,
            weight_dtype=weight_dtype or model.expert_type,
            width=model.hidden_size,
            hidden=part.width // (1 if part.by_expert else tensor_size(mesh)),
            interpret=not on_gpu,
        )
        for part in model.mixtures
        if part.has_kernels
        for weight_dtype in expert_types or (None,)
    )
    scores: tuple[str, ...] = ("xla",)
    # It is for routers that run concurrently with the norm before them: see `ModelConfig.has_concurrent_branches`.
    if mesh.size == 1 and not model.formats and _may_use("router_scores", wanted, on_gpu=on_gpu):
        scores = router_scores.candidates(platform="gpu", width=model.hidden_size, interpret=not on_gpu)
    return {"router_scores": scores, "expert_choice": choice, "grouped_matmul": experts}


def _of_delta_nets(model: ModelConfig, wanted: str, *, on_gpu: bool) -> Candidates:
    rule = _of_all(
        gated_delta.candidates(platform="gpu", key_dim=part.key_dim, interpret=not on_gpu) for part in model.delta_nets
    )
    if not _may_use("delta_decode", wanted, on_gpu=on_gpu):
        return {"gated_delta": rule, "delta_decode": ("xla",)}
    decode = _of_all(
        delta_decode.candidates(platform="gpu", key_dim=part.key_dim, value_dim=part.value_dim, interpret=not on_gpu)
        for part in model.delta_nets
    )
    return {"gated_delta": rule, "delta_decode": decode}


def _state_space_candidates(model: ModelConfig, wanted: str, *, on_gpu: bool) -> tuple[str, ...]:
    if not _may_use("state_space", wanted, on_gpu=on_gpu):
        return ("xla",)
    return _of_all(
        state_space.candidates(platform="gpu", head_dim=part.head_dim, state_size=part.state_size, interpret=not on_gpu)
        for part in model.mambas
    )


def _segment_candidates(model: ModelConfig, encoder: Vision | Audio, *, on_gpu: bool) -> tuple[str, ...]:
    return segment_attention.candidates(platform="gpu", dtype=model.dtype, head_dim=encoder.head_dim, interpret=not on_gpu)


def _collectives(model: ModelConfig, mesh: Mesh, *, on_gpu: bool) -> tuple[str, ...]:
    """Use peers' memory if the kernels support the model on this GPU and peers' memory can be accessed."""
    case: dict[str, Any] = {"shape": (1, model.hidden_size), "dtype": model.dtype, "num_devices": tensor_size(mesh)}
    if (
        tensor_size(mesh) == 1
        or mesh.size > tensor_size(mesh)  # peers exchange over one axis
        or not on_gpu
        or has_other_hosts()
        or not collectives.supports("peer", "all_reduce_norm", **case)
    ):
        return ("xla",)
    if not collectives.peers_can_access(list(mesh.devices.flat)):
        logger.info(
            "the GPUs cannot read each other's memory: sums over devices are left to NCCL, which is slower for small steps"
        )
        return ("xla",)
    return ("peer", "xla")


def _of_all(candidates: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The names that are in all of these, in the order of the first; plain JAX if there are none."""
    first, *others = list(candidates) or [("xla",)]
    return tuple(name for name in first if all(name in names for names in others))


def _attention_case(model: ModelConfig, attention: Attention, page_size: int) -> dict[str, Any]:
    return {
        "dtype": model.dtype,
        "num_groups": attention.group_size,
        "head_dim": attention.head_dim,
        "cache_dtype": model.kv_cache_dtype,
        "page_size": page_size,
        "has_sinks": attention.sinks,
    }


def _latent_case(model: ModelConfig, part: LatentAttention, page_size: int) -> dict[str, Any]:
    return {
        "dtype": model.dtype,
        "cache_dtype": model.kv_cache_dtype,
        "num_heads": part.num_heads // part.copies,
        "latent_dim": part.latent_dim,
        "rotated_dim": part.rotated_dim,
        "plain_dim": part.plain_dim,
        "value_dim": part.value_dim,
        "page_size": page_size,
    }
