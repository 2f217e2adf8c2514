"""Kimi delta attention. Source: arXiv:2510.26692."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.causal_conv import causal_conv
from jaxllm.layers.channel_delta import channel_delta
from jaxllm.layers.latest_inputs import mix_in_layer
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import Normalization
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run, starts
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import KimiDeltaAttention
from pallas_kernels.quantize import Sums


class KimiDelta(nnx.Module):
    """A token mixer that keeps two states by row: the last inputs of its convolution, and a matrix [H, H] of each of K heads, keys by
    values. Devices split its heads; the narrow vectors that decays and gates may be products of are computed on each.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: KimiDeltaAttention, layer: int, prefix: str):
        D, K, H, J, dtype = config.hidden_size, part.num_heads, part.head_dim, part.kernel_size, config.dtype
        self.part, self.layer = part, layer
        names = {key: [f"{prefix}{name}" for name in found] for key, found in part.linears.items()}

        def of_heads(names: list[str], width: int, inputs: int = D, axis: str = "embed") -> Linear:
            modules = [Module(name, (K, width)) for name in names]
            shape, axes = (inputs, K, width * len(names)), (axis, "heads", "head")
            return Linear("td,dkc->tkc", shape, axes, dtype, modules=modules, joined=1)

        self.qkv, self.strength = of_heads(names["qkv"], H), of_heads(names["strength"], 1)
        self.into_decay = self.into_gate = nnx.data(None)
        of_narrow: tuple[int, str] = (D, "embed")
        if (E := part.narrow_dim) is not None:
            of_narrow = (E, "latent")
            self.into_decay, self.into_gate = (
                Linear("td,dc->tc", (D, E), ("embed", "latent"), dtype, modules=[Module(name, (E,))])
                for name in (*names["into_decay"], *names["into_gate"])
            )
        self.decay, self.gate = (of_heads(names[key], H, *of_narrow) for key in ("decay", "gate"))
        name = f"{prefix}{part.name}"
        convolved = tuple(Tensor(f"{name}.{each}_conv1d.weight", (K * H, 1, J), (K, H, J)) for each in "qkv")
        source = Source(convolved, 1, (0, 1, 2))
        self.conv = abstract_param((K, 3 * H, J), ("heads", "head", "kernel"), dtype, source=source)
        rate = Source((Tensor(f"{name}.A_log", (1, 1, K, 1) if part.nested_rates else (K,), (K,)),), 0, (0,))
        self.log_rate = abstract_param((K,), ("heads",), "float32", source=rate, init="ones")
        bias = Source((Tensor(f"{name}.dt_bias", (K * H,), (K, H)),), 0, (0, 1))
        self.decay_bias = abstract_param((K, H), ("heads", "head"), "float32", source=bias, init="ones")
        self.norm = Normalization(part.norm, H, "head", dtype, prefix=prefix)
        out = [Module(each, (D,)) for each in names["out"]]
        self.out = Linear("tkh,khd->td", (K, H, D), ("heads", "head", "embed"), dtype, modules=out)

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        qkv_TKC, strength_TK1 = products(self.qkv, runs, step), products(self.strength, runs, step)
        decay_TKH = self._narrowed(self.into_decay, self.decay, runs, step)
        gate_TKH = self._narrowed(self.into_gate, self.gate, runs, step)
        inputs = (qkv_TKC, jnp.concatenate([decay_TKH, strength_TK1], axis=2))
        out_TKH = mix_in_layer(self.layer, self.part, self._mix, inputs, step)
        out_TKH = (self.norm(out_TKH) * jax.nn.sigmoid(gate_TKH.astype(jnp.float32))).astype(qkv_TKC.dtype)
        return products_by_run(self.out, out_TKH, runs, step)

    @staticmethod
    def _narrowed(into: Linear | None, linear: Linear, runs: Sequence[Array], step: Step) -> Array:
        """Products of all tokens [T, K, H], of the narrow vectors if there are some."""
        if into is None:
            return products(linear, runs, step)
        narrow = [step.product(into, x, start) for x, start in zip(runs, starts(runs), strict=True)]
        return products(linear, narrow, step)

    def _mix(
        self, inputs: Sequence[Array], arrays: tuple[Array, ...], rows: StateRows, is_there_T11: Array | None = None
    ) -> tuple[Array, tuple[Array, ...]]:
        """The sums of tokens [T, K, H], and both states behind them: see `latest_inputs.Mix`."""
        (qkv_TKC, rest_TKC), (conv_state, state), H = inputs, arrays, self.part.head_dim
        dtype = qkv_TKC.dtype
        qkv_TKC, conv_state = causal_conv(qkv_TKC, self.conv[...], conv_state, rows)
        q_TKH, k_TKH, v_TKH = jnp.split(jax.nn.silu(qkv_TKC), 3, axis=2)
        log_decay_TKH = self._log_decay(rest_TKC[..., :H])
        beta_TK1 = jax.nn.sigmoid(rest_TKC[..., H:].astype(jnp.float32))
        if is_there_T11 is not None:
            log_decay_TKH, beta_TK1 = (jnp.where(is_there_T11, each, 0) for each in (log_decay_TKH, beta_TK1))
        q_TKH, k_TKH = (_normed(q_TKH) * H**-0.5).astype(dtype), _normed(k_TKH).astype(dtype)
        tokens = (q_TKH, k_TKH, v_TKH.astype(dtype), log_decay_TKH, beta_TK1[..., 0])
        out_TKH, state = channel_delta(*tokens, state, rows._replace(spans=None))
        return out_TKH, (conv_state, state)

    def _log_decay(self, x_TKH: Array) -> Array:
        """Float32, not positive."""
        rate_K1, z_TKH = jnp.exp(self.log_rate[...])[:, None], x_TKH.astype(jnp.float32) + self.decay_bias[...]
        if (bound := self.part.lower_bound) is not None:
            return bound * jax.nn.sigmoid(rate_K1 * z_TKH)
        return -rate_K1 * jax.nn.softplus(z_TKH)


def _normed(x_TKH: Array) -> Array:
    return x_TKH * jax.lax.rsqrt(jnp.sum(jnp.square(x_TKH), axis=-1, keepdims=True) + 1e-6)
