"""Linear attention by the gated delta rule. Source: arXiv:2412.06464."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.causal_conv import causal_conv
from jaxllm.layers.latest_inputs import mix_in_layer
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import Normalization
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import GatedDeltaNet
from pallas_kernels.quantize import Sums


class GatedDelta(nnx.Module):
    """A token mixer that keeps two states by row: the last inputs of its convolution, and a matrix [H, V] of each value head.

    The outputs of the two products of x belong to K key heads one after the other: a query and a key of width H, then the values of G
    value heads of width V, then their gates; strengths and decays of the value heads. So devices split all weights by key heads.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: GatedDeltaNet, layer: int, prefix: str):
        D, K, G, H, V = config.hidden_size, part.num_key_heads, part.group_size, part.key_dim, part.value_dim
        C, J, dtype = part.num_channels, part.kernel_size, config.dtype
        self.part, self.layer = part, layer
        names = {key: [f"{prefix}{name}" for name in found] for key, found in part.linears.items()}

        def of_heads(names: list[str], *widths: int) -> Linear:
            """widths: of the parts of a key head's outputs; names: of the tensor of each part, or of one with all."""
            width = sum(widths)
            modules = [Module(name, (K, each)) for name, each in zip(names, widths if part.is_flat else (width,), strict=True)]
            axes = ("embed", "heads", "head")
            return Linear("td,dkc->tkc", (D, K, width), axes, dtype, modules=modules, joined=int(part.is_flat))

        qkvz = names["qkvz"][:1] * 3 + names["qkvz"][1:] if part.is_flat else names["qkvz"]
        self.qkvz, self.ba = of_heads(qkvz, H, H, G * V, G * V), of_heads(names["ba"], G, G)
        name = f"{prefix}{part.name}"
        ends = np.cumsum([0, K * H, K * H, K * G * V]).tolist()
        convolved = tuple(
            Tensor(f"{name}.conv1d.weight", (ends[-1], 1, J), (K, width, J), rows=rows)
            for width, rows in zip((H, H, G * V), zip(ends, ends[1:], strict=False), strict=True)
        )
        self.conv = abstract_param((K, C, J), ("heads", "head", "kernel"), dtype, source=Source(convolved, 1, (0, 1, 2)))

        def by_value_head(key: str) -> nnx.Param:
            source = Source((Tensor(f"{name}.{key}", (K * G,), (K, G)),), 0, (0, 1))
            return abstract_param((K, G), ("heads", "group"), "float32", source=source, init="ones")

        self.log_rate, self.rate_bias = by_value_head("A_log"), by_value_head("dt_bias")
        self.norm = Normalization(part.norm, V, "head", dtype, prefix=prefix)
        self.out = Linear(
            "tkgv,kgvd->td",
            (K, G, V, D),
            ("heads", "group", "head", "embed"),
            dtype,
            modules=[Module(name, (D,)) for name in names["out"]],
        )

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        qkvz_TKC, ba_TKC = (products(linear, runs, step) for linear in (self.qkvz, self.ba))
        joined = self._in_one_kernel(qkvz_TKC, ba_TKC, step)
        return products_by_run(self.out, self._in_parts(qkvz_TKC, ba_TKC, step) if joined is None else joined, runs, step)

    def _in_one_kernel(self, qkvz_TKC: Array, ba_TKC: Array, step: Step) -> Array | None:
        """The gated outputs of tokens [T, K, G, V]; None for a step that the kernel does not take."""
        states = step.states
        if step.delta_decode is None or states is None or not step.policy.is_joined(len(qkvz_TKC)) or not self.norm.is_plain:
            return None
        arrays, rows = states.read(self.layer), states.rows
        if arrays is None or len(arrays) > 2 or rows.query_start_R1 is not None:  # in an engine with drafts there are more
            return None
        weights = self.conv[...], self.log_rate[...], self.rate_bias[...], self.norm.factor
        options = {"gate": self.part.gate, "eps": self.norm.eps}
        out_TKGV, *after = step.delta_decode(qkvz_TKC, ba_TKC, *weights, *arrays, rows.row_R, rows.is_new_R, **options)
        states.write(self.layer, after)
        return out_TKGV

    def _in_parts(self, qkvz_TKC: Array, ba_TKC: Array, step: Step) -> Array:
        """The gated outputs of tokens [T, K, G, V]."""
        part = self.part
        C = part.num_channels
        qkv_TKC, z_TKC = jnp.split(qkvz_TKC, [C], axis=2)
        out_TKGV = mix_in_layer(self.layer, part, partial(self._mix, step=step), (qkv_TKC, ba_TKC), step)

        activation = jax.nn.sigmoid if part.gate == "sigmoid" else jax.nn.silu
        gate_TKGV = activation(z_TKC.astype(jnp.float32)).reshape(out_TKGV.shape)
        if step.states is not None and step.states.rows.query_start_R1 is None:
            # In a decode it runs while the kernels before the norm do, and XLA leaves the product with it to the norm's kernel.
            gate_TKGV = jax.lax.optimization_barrier(gate_TKGV)
        return (self.norm(out_TKGV) * gate_TKGV).astype(qkvz_TKC.dtype)

    def _mix(
        self,
        inputs: Sequence[Array],
        arrays: tuple[Array, ...],
        rows: StateRows,
        is_there_T11: Array | None = None,
        *,
        step: Step,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The sums of tokens [T, K, G, V], and both states behind them: see `latest_inputs.Mix`."""
        qkv_TKC, ba_TKC = inputs
        H, V, G, dtype = self.part.key_dim, self.part.value_dim, self.part.group_size, qkv_TKC.dtype
        conv_state, delta_state = arrays
        qkv_TKC, conv_state = causal_conv(qkv_TKC, self.conv[...], conv_state, rows)
        q_TKH, k_TKH, v_TKC = jnp.split(jax.nn.silu(qkv_TKC), [H, 2 * H], axis=2)
        b_TKG, a_TKG = jnp.split(ba_TKC.astype(jnp.float32), 2, axis=2)
        log_decay_TKG = -jnp.exp(self.log_rate[...]) * jax.nn.softplus(a_TKG + self.rate_bias[...])
        q_TKH, k_TKH = (_normed(q_TKH) * H**-0.5).astype(dtype), _normed(k_TKH).astype(dtype)
        v_TKGV, beta_TKG = v_TKC.reshape(*v_TKC.shape[:2], G, V).astype(dtype), jax.nn.sigmoid(b_TKG)
        if is_there_T11 is not None:
            log_decay_TKG, beta_TKG = (jnp.where(is_there_T11, each, 0) for each in (log_decay_TKG, beta_TKG))
        out_TKGV, delta_state = step.gated_delta(
            q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG, delta_state, rows.row_R, rows.is_new_R, rows.query_start_R1
        )
        return out_TKGV, (conv_state, delta_state)


def _normed(x_TKH: Array) -> Array:
    return x_TKH * jax.lax.rsqrt(jnp.sum(jnp.square(x_TKH), axis=-1, keepdims=True) + 1e-6)
