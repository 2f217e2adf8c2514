"""The shapes in which an engine calls each op on one device: those that its kernels are checked in."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from flax import nnx

from jaxllm.config import EngineConfig
from jaxllm.layers.linear import PackedWeight
from jaxllm.layers.mlp import FeedForward
from jaxllm.layers.moe import MixtureOfExperts
from jaxllm.layers.parameters import weights
from jaxllm.layers.routing import rule_of
from jaxllm.model_config import FP8, ModelConfig
from jaxllm.model_parts import Attention, MoE
from jaxllm.parallel.topology import Topology
from jaxllm.quantization.formats.mxfp4 import Mxfp4
from jaxllm.quantization.formats.packed import PackedFormat
from jaxllm.quantization.tiles import Tiled
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.memory import MemoryPlan
from jaxllm.weight_format import WeightFormat
from pallas_kernels import wide_attention
from pallas_kernels.checking import (
    attention_at_start,
    collectives,
    delta_decode,
    expert_choice,
    gated_delta,
    gated_matmul,
    grouped_matmul,
    lora,
    mla_attention,
    quantize,
    quantized_matmul,
    rope_cache_write,
    router_scores,
    sampling,
    segment_attention,
    state_space,
)
from pallas_kernels.grouped_matmul.packed import type_of
from pallas_kernels.quantized_matmul import TILE, decoder_of


@dataclass(frozen=True)
class ProductShapes:
    """The distinct weights of an engine's models that kernels multiply."""

    linears: tuple[quantized_matmul.Shapes, ...] = ()
    """In tiles, on one device."""
    experts: tuple[tuple[MoE, tuple[grouped_matmul.Stored, grouped_matmul.Stored] | None], ...] = ()
    """Packing of gate and up, and of down, by mixture; None: they are not in tiles."""
    gated: tuple[gated_matmul.Shapes, ...] = ()
    """Dense layers that `pallas_kernels.gated_matmul` takes, with their sizes on all devices together."""

    @property
    def expert_types(self) -> tuple[str | None, ...]:
        """The types of mixtures' weights as `grouped_matmul.candidates` takes them; None: the model's."""
        found = ((None,) if stored is None else tuple(type_of(each.number) for each in stored) for _, stored in self.experts)
        return tuple(dict.fromkeys(name for names in found for name in names))


NO_PRODUCTS = ProductShapes()


@dataclass(frozen=True)
class _Engine:
    """Properties of an engine that shapes depend on."""

    model: ModelConfig
    plan: MemoryPlan
    tensor_parallel: int
    num_expert_devices: int
    """Devices that whole experts are distributed to."""
    max_logprobs: int
    """-1: the whole vocabulary."""
    adaptation: Adaptation | None
    num_parts: int = 1
    """Devices that split the keys of a row."""
    products: ProductShapes = NO_PRODUCTS

    @property
    def page_size(self) -> int:
        """Slots of a block on one device."""
        return self.plan.block_size // self.num_parts

    @property
    def table_width(self) -> int:
        return -(-self.plan.max_model_len // self.plan.block_size)

    @property
    def paged(self) -> dict[str, Any]:
        """Properties that all layers with keys and values share."""
        model = self.model
        return {
            "dtype": model.dtype,
            "cache_dtype": model.kv_cache_dtype,
            "page_size": self.page_size,
            "has_scales": model.kv_format is not None and model.kv_cache_dtype == FP8,
        }

    @property
    def layers(self) -> list[tuple[dict[str, Any], list[Attention]]]:
        """The kinds of layers by the numbers and width of their heads."""
        found: dict[tuple[int, int, int], list[Attention]] = {}
        for part in self.model.attentions:
            found.setdefault((part.num_kv_heads // self.tensor_parallel, part.group_size, part.head_dim), []).append(part)
        names = ("num_kv_heads", "num_groups", "head_dim")
        return [(dict(zip(names, heads, strict=True)), parts) for heads, parts in found.items()]


def _paged_attention(engine: _Engine) -> tuple[attention_at_start.Shapes, ...]:
    found = _shapes_of_attention(engine, is_wide=False)
    # Steps with images take the keys of the cache as one part of all: kernels treat all numbers of parts alike.
    in_parts = (replace(shapes, num_queries=1, num_parts=2) for shapes in found)
    return (*found, *in_parts) if engine.model.attends_within_images else found


def _shapes_of_attention(engine: _Engine, *, is_wide: bool) -> tuple[attention_at_start.Shapes, ...]:
    """Shapes of the layers whose heads are for `wide_attention`, or of the others."""

    def kinds(parts: list[Attention]) -> tuple[attention_at_start.Layer, ...]:
        layers = (attention_at_start.Layer(part.scale, part.window, part.soft_cap, part.sinks) for part in parts)
        return tuple(dict.fromkeys(layers))

    return tuple(
        attention_at_start.Shapes(
            **engine.paged,
            **heads,
            table_width=engine.table_width,
            layers=kinds(parts),
            num_queries=engine.plan.num_queries,
            num_parts=engine.num_parts,
        )
        for heads, parts in engine.layers
        if wide_attention.is_wide(heads["head_dim"]) == is_wide
    )


def _rope_cache_write(engine: _Engine) -> tuple[rope_cache_write.Shapes, ...]:
    return tuple(
        rope_cache_write.Shapes(
            **engine.paged,
            **heads,
            eps=norms[0].eps if norms else 1e-6,
            has_norms=norms is not None,
            norm_offset=norms[0].weight_offset if norms else 0.0,
        )
        for heads, parts in engine.layers
        for norms in dict.fromkeys(part.head_norms for part in parts)
    )


def _expert_choice(engine: _Engine) -> tuple[expert_choice.Shapes, ...]:
    return tuple(
        expert_choice.Shapes(routing.num_experts, rule_of(routing), has_bias=routing.correction_bias is not None)
        for routing in dict.fromkeys(part.routing for part in engine.model.mixtures)
    )


def _grouped_matmul(engine: _Engine) -> tuple[grouped_matmul.Shapes, ...]:
    model, tensor_parallel = engine.model, engine.tensor_parallel
    mixtures = engine.products.experts or tuple((part, None) for part in model.mixtures if part.has_kernels)
    return tuple(
        grouped_matmul.Shapes(
            dtype=model.dtype,
            num_experts=len(part.slots) // (engine.num_expert_devices if part.by_expert else 1),
            num_choices=part.routing.top_k,
            width=model.hidden_size,
            hidden=part.width // (1 if part.by_expert else tensor_parallel),
            activation=part.activation,
            has_biases=part.bias,
            is_packed=model.has_packed_experts,
            stored=stored,
        )
        for part, stored in mixtures
    )


def _gated_matmul(engine: _Engine) -> tuple[gated_matmul.Shapes, ...]:
    return tuple(replace(shapes, hidden=shapes.hidden // engine.tensor_parallel) for shapes in engine.products.gated)


def _router_scores(engine: _Engine) -> tuple[router_scores.Shapes, ...]:
    model = engine.model
    found = [
        router_scores.Shapes(
            model.dtype,
            mlp.routing.num_experts,
            model.hidden_size,
            norm.eps,
            norm.weight_offset,
            has_bias=mlp.routing.router_bias,
        )
        for mlp, norm in ((layer.mlp, layer.mlp_norm) for layer in model.layers)
        if isinstance(mlp, MoE) and norm is not None
    ]
    return tuple(dict.fromkeys(found))


def _gated_delta(engine: _Engine) -> tuple[gated_delta.Shapes, ...]:
    return tuple(
        gated_delta.Shapes(
            engine.model.dtype, part.num_key_heads // engine.tensor_parallel, part.group_size, part.key_dim, part.value_dim
        )
        for part in engine.model.delta_nets
    )


def _delta_decode(engine: _Engine) -> tuple[delta_decode.Shapes, ...]:
    return tuple(
        delta_decode.Shapes(
            engine.model.dtype,
            part.num_key_heads // engine.tensor_parallel,
            part.group_size,
            part.key_dim,
            part.value_dim,
            kernel_size=part.kernel_size,
            gate=part.gate,
            eps=part.norm.eps,
        )
        for part in engine.model.delta_nets
    )


def _state_space(engine: _Engine) -> tuple[state_space.Shapes, ...]:
    return tuple(
        state_space.Shapes(
            engine.model.dtype, part.num_groups // engine.tensor_parallel, part.group_size, part.head_dim, part.state_size
        )
        for part in engine.model.mambas
    )


def _lora(engine: _Engine) -> tuple[lora.Shapes, ...]:
    adaptation = engine.adaptation
    if adaptation is None:
        return ()
    return tuple(
        lora.Shapes(engine.model.dtype, adaptation.num_slots, adaptation.rank, width, parts, adaptation.dtype)
        for width, parts in adaptation.products
    )


def shapes_of_tiles(models: Iterable[nnx.Module], dtype: str) -> tuple[quantized_matmul.Shapes, ...]:
    """The distinct weights of linear layers in tiles of models that compute in this type, on one device."""
    formats = (weight.format for model in models for weight in weights(model))
    found = (_shapes_of_tiles(format, dtype) for format in formats if _is_tiled(format) and not format.layout.num_lead)
    return tuple(dict.fromkeys(found))


def product_shapes(models: Sequence[nnx.Module], dtype: str) -> ProductShapes:
    """The weights of models that compute in this type."""
    mixtures = [part for model in models for _, part in nnx.iter_modules(model) if isinstance(part, MixtureOfExperts)]
    experts = dict.fromkeys((each.part, _experts_in_tiles(each)) for each in mixtures if each.part.has_kernels)
    has_tiles = any(stored is not None for _, stored in experts)
    return ProductShapes(shapes_of_tiles(models, dtype), tuple(experts) if has_tiles else (), _gated_layers(models, dtype))


def _gated_layers(models: Sequence[nnx.Module], dtype: str) -> tuple[gated_matmul.Shapes, ...]:
    parts = (part for model in models for _, part in nnx.iter_modules(model) if isinstance(part, FeedForward))
    found = dict.fromkeys(layer for part in parts if (layer := part.shapes_of_kernel) is not None)
    return tuple(gated_matmul.Shapes(dtype, *layer) for layer in found)


def _is_tiled(format: WeightFormat) -> TypeGuard[Any]:
    return isinstance(format, PackedFormat | Mxfp4) and isinstance(format.layout, Tiled)


def _experts_in_tiles(mixture: MixtureOfExperts) -> tuple[grouped_matmul.Stored, grouped_matmul.Stored] | None:
    def stored(weight: Any) -> grouped_matmul.Stored | None:
        if not isinstance(weight, PackedWeight) or not _is_tiled(weight.format):
            return None
        parts = {name: getattr(weight, name) for name in weight.names}
        scale, words, scheme = parts.get("scale"), parts["words"], weight.format.weight_scheme
        return grouped_matmul.Stored(
            decoder_of(scheme.number),
            None if scale is None else words.shape[-2] * TILE // scale.shape[-2],
            "bfloat16" if scale is None else str(scale.dtype),
            has_zeros="zero" in parts,
            has_factor="factor" in parts,
        )

    gate_up, down = stored(mixture.gate_up), stored(mixture.down)
    return None if gate_up is None or down is None else (gate_up, down)


def _shapes_of_tiles(format: PackedFormat, dtype: str) -> quantized_matmul.Shapes:
    scheme, tiled = format.weight_scheme, format.layout
    assert scheme is not None and isinstance(tiled, Tiled)
    return quantized_matmul.Shapes(
        scheme.number,
        math.prod(tiled.outputs),
        tiled.num_inputs,
        None if tiled.num_groups == 1 else tiled.num_inputs // tiled.num_groups,
        scheme.scale_type,
        has_zeros=scheme.zeros,
        has_factor=scheme.factor,
        dtype=dtype,
        result="float32" if format.of_head else None,
    )


def _mla_attention(engine: _Engine) -> tuple[mla_attention.Shapes, ...]:
    model = engine.model
    return tuple(
        mla_attention.Shapes(
            dtype=model.dtype,
            cache_dtype=model.kv_cache_dtype,
            num_heads=part.num_heads // engine.tensor_parallel,
            latent_dim=part.latent_dim,
            rotated_dim=part.rotated_dim,
            plain_dim=part.plain_dim,
            value_dim=part.value_dim,
            page_size=engine.plan.block_size,
            table_width=engine.table_width,
            scale=part.score_scale,
            num_queries=engine.plan.num_queries,
        )
        for part in model.latent_attentions
    )


def _collectives(engine: _Engine) -> tuple[collectives.Shapes, ...]:
    model = engine.model
    return (
        collectives.Shapes(
            num_devices=engine.tensor_parallel, width=model.hidden_size, dtype=model.dtype, vocab_size=model.padded_vocab_size
        ),
    )


def _sampling(engine: _Engine) -> tuple[sampling.Shapes, ...]:
    model, max_logprobs = engine.model, engine.max_logprobs
    return (
        sampling.Shapes(
            vocab_size=model.padded_vocab_size,
            num_padded=model.padded_vocab_size - model.vocab_size,
            num_top_values=model.vocab_size if max_logprobs == -1 else min(max_logprobs, model.vocab_size),
        ),
    )


def _quantize(engine: _Engine) -> tuple[quantize.Shapes, ...]:
    model = engine.model
    if not model.quantizes_inputs:
        return ()
    dense = [layer.dense for layer in model.layers]
    found = (
        quantize.Shapes(
            dtype=model.dtype,
            width=model.hidden_size,
            of_heads=layer.attention.output_width // engine.tensor_parallel,
            of_mlp=0 if mlp is None else mlp.width // engine.tensor_parallel,
            eps=1e-5 if layer.mlp_norm is None else layer.mlp_norm.eps,
        )
        for layer, mlp in zip(model.layers, dense, strict=True)
        if isinstance(layer.attention, Attention)
    )
    return tuple(dict.fromkeys(found))


def _segment_attention(engine: _Engine) -> tuple[segment_attention.Shapes, ...]:
    if parts := engine.model.encoder_attentions:
        heads = dict.fromkeys((part.num_heads // engine.tensor_parallel, part.head_dim) for part in parts)
        return tuple(segment_attention.Shapes(engine.model.dtype, *each) for each in heads)
    encoder = engine.model.vision or engine.model.audio
    return () if encoder is None else (segment_attention.Shapes(engine.model.dtype, encoder.num_heads, encoder.head_dim),)


_SHAPES: dict[str, Callable[[_Engine], tuple[Any, ...]]] = {
    "paged_attention": _paged_attention,
    "wide_attention": partial(_shapes_of_attention, is_wide=True),
    "rope_cache_write": _rope_cache_write,
    "router_scores": _router_scores,
    "expert_choice": _expert_choice,
    "grouped_matmul": _grouped_matmul,
    "gated_matmul": _gated_matmul,
    "gated_delta": _gated_delta,
    "delta_decode": _delta_decode,
    "state_space": _state_space,
    "lora": _lora,
    "mla_attention": _mla_attention,
    "quantized_matmul": lambda engine: engine.products.linears,
    "collectives": _collectives,
    "quantize": _quantize,
    "sampling": _sampling,
    "segment_attention": _segment_attention,
}


def shapes_of(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    adaptation: Adaptation | None = None,
    products: ProductShapes = NO_PRODUCTS,
) -> dict[str, tuple[Any, ...]]:
    """By op, the sets of shapes that its cases depend on, on one device."""
    topology = Topology.of(config.parallel)
    sizes = topology.tensor, topology.expert
    engine = _Engine(model, plan, *sizes, config.model.max_logprobs, adaptation, topology.context, products)
    return {op: shapes(engine) for op, shapes in _SHAPES.items()}
