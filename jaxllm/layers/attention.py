"""The attention layer around whatever computes attention itself."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.attend import Projection
from jaxllm.layers.linear import Init, Linear, abstract_param
from jaxllm.layers.norm import normed
from jaxllm.layers.rope import head_order, rope_angles
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Norm, QueryScale
from jaxllm.parallel.shards import Shards
from pallas_kernels.quantize import Quantized, Sums
from pallas_kernels.rope_cache_write.xla import apply_rope

GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}
"""Activations of gates."""


class GroupedQueryAttention(nnx.Module):
    """Attention with rotary positions; q, k and v of all heads are one product.

    The weight [D, K, G+2, H] holds per KV head its G query heads, then its key, then its value, so that splitting K over
    devices gives each what belongs together. The values of query and key heads are ordered so that value i turns with value i + H/2.
    """

    def __init__(self, config: ModelConfig, part: Attention, layer: int, prefix: str):
        D, K, G, H = config.hidden_size, part.num_kv_heads, part.group_size, part.head_dim
        inputs = part.num_inputs * D
        stored_K, stored_G = K // part.kv_head_replicas, G * part.kv_head_replicas
        self.layer = layer
        self.part = part
        order = head_order(part.rope, H)
        num_products = 1 if part.reads_layer is not None else 2 if part.values_are_keys else 3
        names = [f"{prefix}{part.name}.{name}" for name in part.qkv] * (num_products // len(part.qkv))
        queries = Module(names[0], (stored_K, stored_G, H), order, (0, H, 2 * H) if part.gated else None)
        others = zip(names[1:], (order, None), strict=False)
        modules = [queries, *(Module(name, (stored_K, 1, H), order) for name, order in others)]
        self.value = nnx.data(None)
        V = part.value_dim or H
        if part.value_dim is not None:
            assert not part.bias and not part.transposed, "no family stores other values so"
            modules[-1] = Module(modules[-1].name, (stored_K, V))
        if part.qkv_runs > 1 or (len(part.qkv) == 1 and part.value_dim is not None):
            modules = in_one_tensor(modules, part.qkv_runs)
        if part.value_dim is not None:
            value, axes = modules.pop(), ("embed", "heads", "head")
            self.value = Linear("td,dkh->tkh", (inputs, K, V), axes, config.dtype, modules=[value])
        self.qkv = Linear(
            "td,dkgh->tkgh",
            (inputs, K, G + len(modules) - 1, H),
            ("embed", "heads", "qkv", "head"),
            config.dtype,
            modules=modules,
            joined=1,
            bias=part.bias,
            biased=() if part.key_bias else (True, False, True),
            transposed=part.transposed,
        )
        self.gate = nnx.data(None)
        if part.gated:
            self.gate = Linear(
                "td,dkgh->tkgh",
                (inputs, K, G, H),
                ("embed", "heads", "group", "head"),
                config.dtype,
                modules=[Module(names[0], (stored_K, stored_G, H), columns=(H, 2 * H, 2 * H))],
                bias=part.bias,
            )
        elif part.gate is not None:
            letters, of_value, axis = ("", (), ()) if part.gate.by_head else ("h", (V,), ("head",))
            self.gate = Linear(
                f"td,dkg{letters}->tkg{letters}",
                (inputs, K, G, *of_value),
                ("embed", "heads", "group", *axis),
                config.dtype,
                modules=[Module(f"{prefix}{part.name}.{part.gate.name}", (stored_K, stored_G, *of_value))],
            )
        self.q_norm = self.k_norm = nnx.data(None)
        if part.head_norms is not None:
            q, k = part.head_norms
            k = k if part.reads_layer is None else replace(k, weighted=False)
            norms = (HeadNorm(norm, ((H,), ("head",)), (H,), config.dtype, prefix, order) for norm in (q, k))
            self.q_norm, self.k_norm = norms
        elif (norms_of_all := part.whole_norms or part.own_norms) is not None:
            q, k = norms_of_all
            query, by_head = ((K, G, H), ("heads", "group", "head")), part.own_norms is not None
            self.q_norm = HeadNorm(q, query, (stored_K, stored_G, H), config.dtype, prefix, order, by_head=by_head)
            key = ((K, H), ("heads", "head"))
            self.k_norm = HeadNorm(k, key, (stored_K, H), config.dtype, prefix, order, by_head=by_head)
        self.out = Linear(
            "tkgh,kghd->td",
            (K, G, V, D),
            ("heads", "group", "head", "embed"),
            config.dtype,
            modules=[Module(f"{prefix}{name}", (D,)) for name in part.linears["out"]],
            inputs=(stored_K, stored_G, V),
            bias=part.out_bias,
            transposed=part.transposed,
        )
        sinks = Source(
            (Tensor(f"{prefix}{part.name}.{part.sinks_name}", (stored_K * stored_G,), (stored_K, stored_G)),), 0, (0, 1)
        )
        self.sinks = abstract_param((K, G), ("heads", "group"), "float32", source=sinks) if part.sinks else None
        written = prefix if part.reads_layer is None else f"{config.layer_name(part.reads_layer)}."
        scales = Source(tuple(Tensor(f"{written}{part.name}.{letter}_scale", (1,), (1,)) for letter in "kv"), 0, (0,))
        format = config.kv_format
        self.kv_scale = (
            None if format is None else abstract_param((2,), ("kv",), "float32", source=scales, init="ones", format=format)
        )

    @property
    def quantizes_inputs(self) -> bool:
        """Whether all products with what it takes do."""
        return all(linear is None or linear.quantizes_inputs for linear in (self.qkv, self.value, self.gate))

    def __call__(self, runs: Sequence[Array | Quantized], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        part = self.part
        qkv_TKGH = self._projected(runs, step)
        q_norm, k_norm = self.q_norm, self.k_norm
        if part.whole_norms is not None or part.own_norms is not None:
            qkv_TKGH, q_norm, k_norm = self._normed(qkv_TKGH, step.shards), None, None
        if part.query_scale is not None:
            assert part.head_norms is None, "these are applied later and undo the scale"
            qkv_TKGH = _with_scaled_queries(qkv_TKGH, part.query_scale, step.positions_T)
        rope = part.rope
        if part.rotates_first:
            qkv_TKGH, q_norm, k_norm, rope = self._rotated_and_normed(qkv_TKGH, step), None, None, None
        cos_TH, sin_TH = step.angles(rope, part.head_dim)
        projection = Projection(
            qkv_TKGH=qkv_TKGH,
            cos_TH=cos_TH,
            sin_TH=sin_TH,
            q_norm_H=None if q_norm is None else q_norm.stored_weight,
            k_norm_H=None if k_norm is None else k_norm.stored_weight,
            eps=1e-6 if q_norm is None else q_norm.norm.eps,
            norm_offset=0.0 if q_norm is None else q_norm.norm.weight_offset,
            kv_scale_2=None if self.kv_scale is None else self.kv_scale[...],
        )
        out_TKGH = step.attend(
            self.layer,
            projection,
            scale=part.scale,
            window=part.window,
            soft_cap=part.soft_cap,
            sinks_KG=None if self.sinks is None else self.sinks[...],
            **{name: value for name in ("reads_layer", "chunk") if (value := getattr(part, name)) is not None},
        )
        out_TKGH = out_TKGH if part.value_dim is None else out_TKGH[..., : part.value_dim]
        if part.value_scale != 1.0:
            out_TKGH = out_TKGH * part.value_scale
        if self.gate is not None:
            out_TKGH = out_TKGH * self._gates(runs, step)
        return products_by_run(self.out, out_TKGH, runs, step)

    def _projected(self, runs: Sequence[Array | Quantized], step: Step) -> Array:
        """Queries, keys and values [T, K, G + 2, H]."""
        qkv_TKGH = products(self.qkv, runs, step)
        if self.part.reads_layer is not None:
            return jnp.pad(qkv_TKGH, ((0, 0), (0, 0), (0, 2), (0, 0)))
        if self.part.values_are_keys:
            qkv_TKGH = jnp.concatenate([qkv_TKGH, qkv_TKGH[:, :, -1:]], axis=2)
        if (norm := self.part.value_norm) is not None:
            value_TK1H = normed(norm, qkv_TKGH[:, :, -1:], jnp.ones(())).astype(qkv_TKGH.dtype)
            qkv_TKGH = jnp.concatenate([qkv_TKGH[:, :, :-1], value_TK1H], axis=2)
        if self.value is None:
            return qkv_TKGH
        value_TKH = products(self.value, runs, step)
        padding = qkv_TKGH.shape[-1] - value_TKH.shape[-1]
        return jnp.concatenate([qkv_TKGH, jnp.pad(value_TKH, ((0, 0), (0, 0), (0, padding)))[:, :, None]], axis=2)

    def _gates(self, runs: Sequence[Array | Quantized], step: Step) -> Array:
        """Factors of the outputs [T, K, G, H], or [T, K, G, 1] of each head."""
        assert self.gate is not None
        gate = products(self.gate, runs, step)
        if self.part.gate is None:
            return jax.nn.sigmoid(gate)
        gate = gate[..., None] if self.part.gate.by_head else gate
        return GATES[self.part.gate.activation](gate.astype(jnp.float32)).astype(gate.dtype)

    def _rotated_and_normed(self, qkv_TKGH: Array, step: Step) -> Array:
        """Queries and keys rotated, then with the norm of each head."""
        assert self.q_norm is not None and self.k_norm is not None
        angles = rope_angles(self.part.rope, self.part.head_dim, step.positions_T)
        q, k, v = apply_rope(qkv_TKGH[:, :, :-2], angles), apply_rope(qkv_TKGH[:, :, -2], angles), qkv_TKGH[:, :, -1]
        return jnp.concatenate([self.q_norm.of_each(q), self.k_norm.of_each(k)[:, :, None], v[:, :, None]], axis=2)

    def _normed(self, qkv_TKGH: Array, shards: Shards) -> Array:
        """Queries and keys with the norms over all heads, or with those of each head's own weight."""
        q, k, v = qkv_TKGH[:, :, :-2], qkv_TKGH[:, :, -2], qkv_TKGH[:, :, -1]
        assert self.q_norm is not None and self.k_norm is not None
        if self.part.own_norms is not None:
            q, k = self.q_norm.of_each(q), self.k_norm.of_each(k)
        else:
            q, k = self.q_norm.over_all(q, shards), self.k_norm.over_all(k, shards)
        return jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)


def in_one_tensor(modules: Sequence[Module], runs: int) -> list[Module]:
    """Modules of one tensor, of which each of these runs has an equal part of each, in order."""
    sizes = [module.num_rows // runs for module in modules]
    return [replace(each, within=(sum(sizes[:i]), sum(sizes), runs)) for i, each in enumerate(modules)]


class HeadNorm(nnx.Module):
    """A norm over the values of each head, or an RMS norm over those of all heads together."""

    def __init__(
        self,
        norm: Norm,
        shape_and_axes: tuple[tuple[int, ...], tuple[str, ...]],
        stored: tuple[int, ...],
        dtype: str,
        prefix: str,
        order: tuple[int, ...] | None,
        *,
        by_head: bool = False,
    ):
        """stored: the dimensions of the weight in the checkpoint, which holds it flat, or as [heads, H] if by_head; order: of the
        values of a head."""
        shape, axes = shape_and_axes
        self.norm = norm
        last = len(stored) - 1
        flat = (math.prod(stored[:-1]), stored[-1]) if by_head else (math.prod(stored),)
        tensor = Tensor(f"{prefix}{norm.name}.weight", flat, stored, order=order, order_axis=last)
        source = Source((tensor,), 0, tuple(range(len(stored))))
        init: Init = "zeros" if norm.weight_offset else "ones"
        self.weight = abstract_param(shape, axes, dtype, source=source, init=init) if norm.weighted else None
        self.shape = shape

    @property
    def factor(self) -> Array:
        """Factor of the normed values."""
        weight = self.stored_weight
        return weight.astype(jnp.float32) + self.norm.weight_offset if self.norm.weight_offset else weight

    @property
    def stored_weight(self) -> Array:
        """The factor without the norm's offset, which the kernel adds."""
        return jnp.ones(self.shape, jnp.float32) if self.weight is None else self.weight[...]

    def of_each(self, x: Array) -> Array:
        """Norm each head of x [T, heads..., H] by itself."""
        return normed(self.norm, x, self.factor).astype(x.dtype)

    def over_all(self, x: Array, shards: Shards) -> Array:
        """Norm x [T, heads..., H] over the heads of all devices."""
        wide = x.astype(jnp.float32)
        num_values = shards.size * math.prod(x.shape[1:])
        mean_T = shards.sum(jnp.sum(jnp.square(wide), axis=range(1, x.ndim))) / num_values
        factor_T = jax.lax.rsqrt(mean_T + self.norm.eps).reshape(-1, *(1,) * (x.ndim - 1))
        return (wide * factor_T * self.factor.astype(jnp.float32)).astype(x.dtype)


def query_factors(scale: QueryScale, positions_T: Array) -> Array:
    """The factor of queries at each position, float32 [T]."""
    return 1 + scale.rate * jnp.log1p(jnp.floor((positions_T.astype(jnp.float32) + scale.offset) / scale.step))


def _with_scaled_queries(qkv_TKGH: Array, scale: QueryScale, positions_T: Array) -> Array:
    factor_T = query_factors(scale, positions_T)
    is_query_G = np.arange(qkv_TKGH.shape[2]) < qkv_TKGH.shape[2] - 2
    factor_TG = jnp.where(is_query_G, factor_T[:, None], 1)
    return (qkv_TKGH * factor_TG[:, None, :, None]).astype(qkv_TKGH.dtype)
