"""Mamba-2. Source: arXiv:2405.21060."""

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
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Mamba2
from jaxllm.parallel.shards import Shards
from pallas_kernels.quantize import Sums


class Mamba2Mixer(nnx.Module):
    """A token mixer that keeps two states by row: the last inputs of its convolution, and a matrix [P, S] of each head.

    The checkpoint's in_proj has the gates of all heads, then their values, the input vectors of K groups, their output vectors, and a
    time step of each head. Here its outputs belong to the groups one after the other, by which devices split all weights: G heads of
    width P, and vectors of width S. Where devices share the heads of a group, each has its vectors.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: Mamba2, layer: int, prefix: str):
        D, K, G, P, S = config.hidden_size, part.num_groups, part.group_size, part.head_dim, part.state_size
        C, J, dtype = part.num_channels, part.kernel_size, config.dtype
        self.part, self.layer = part, layer
        stored_K, stored_G = K // part.group_replicas, G * part.group_replicas
        names = {key: f"{prefix}{name}" for key, (name,) in part.linears.items()}
        name = f"{prefix}{part.name}"

        def outputs(width: int, *, is_shared: bool = False) -> Module:
            return Module(names["in"], (stored_K, width), distributed=not is_shared)

        values, vectors, steps = outputs(stored_G * P), outputs(S, is_shared=True), outputs(stored_G)
        self.inputs = Linear(
            "td,dkc->tkc",
            (D, K, G * P + C + G),
            ("embed", "heads", "head"),
            dtype,
            modules=[values, values, vectors, vectors, steps],
            joined=1,
            bias=part.bias,
        )
        widths, shared = (stored_G * P, S, S), (False, True, True)
        ends = np.cumsum([0, *(stored_K * width for width in widths)]).tolist()

        def convolved(kind: str, *trailing: int) -> Source:
            """The convolution's tensor of all channels, by group."""
            stored = (ends[-1], *((1, *trailing) if trailing else ()))
            tensors = (
                Tensor(f"{name}.conv1d.{kind}", stored, (stored_K, width, *trailing), rows=rows, distributed=not is_shared)
                for width, rows, is_shared in zip(widths, zip(ends, ends[1:], strict=False), shared, strict=True)
            )
            return Source(tuple(tensors), 1, tuple(range(2 + len(trailing))))

        self.conv = abstract_param((K, C, J), ("heads", "head", "kernel"), dtype, source=convolved("weight", J))
        self.conv_bias = (
            abstract_param((K, C), ("heads", "head"), dtype, source=convolved("bias"), init="zeros") if part.conv_bias else None
        )

        def by_head(key: str, *width: int, dtype: str = "float32") -> nnx.Param:
            """A value, or `width` values, of each head."""
            view = (stored_K, stored_G, *width)
            axes = ("heads", "group", "head")[: len(view)]
            source = Source((Tensor(f"{name}.{key}", (int(np.prod(view)),), view),), 0, tuple(range(len(view))))
            return abstract_param((K, G, *width), axes, dtype, source=source, init="ones")

        self.log_rate, self.step_bias, self.skip = by_head("A_log"), by_head("dt_bias"), by_head("D")
        self.norm = by_head("norm.weight", P, dtype=dtype)
        self.out = Linear(
            "tkgp,kgpd->td",
            (K, G, P, D),
            ("heads", "group", "head", "embed"),
            dtype,
            modules=[Module(names["out"], (D,))],
            inputs=(stored_K, stored_G, P),
            bias=part.bias,
        )

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        part = self.part
        G, P, C = part.group_size, part.head_dim, part.num_channels
        inputs_TKC = products(self.inputs, runs, step)
        z_TKC, xbc_TKC, step_TKG = jnp.split(inputs_TKC, [G * P, G * P + C], axis=2)
        out_TKGP = mix_in_layer(self.layer, part, partial(self._mix, step=step), (xbc_TKC, step_TKG), step)

        gated_TKGP = out_TKGP.astype(jnp.float32) * jax.nn.silu(z_TKC.astype(jnp.float32)).reshape(out_TKGP.shape)
        return products_by_run(self.out, self._normed(gated_TKGP, step.shards).astype(inputs_TKC.dtype), runs, step)

    def _mix(
        self,
        inputs: Sequence[Array],
        arrays: tuple[Array, ...],
        rows: StateRows,
        is_there_T11: Array | None = None,
        *,
        step: Step,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The outputs of tokens [T, K, G, P] before their gates, and both states behind them: see `latest_inputs.Mix`."""
        (xbc_TKC, step_TKG), (conv_state, state), part = inputs, arrays, self.part
        G, P, S, dtype = part.group_size, part.head_dim, part.state_size, xbc_TKC.dtype
        xbc_TKC, conv_state = causal_conv(xbc_TKC, self.conv[...], conv_state, rows)
        if self.conv_bias is not None:
            xbc_TKC += self.conv_bias[...].astype(jnp.float32)
        x_TKC, b_TKS, c_TKS = jnp.split(jax.nn.silu(xbc_TKC).astype(dtype), [G * P, G * P + S], axis=2)
        dt_TKG = jax.nn.softplus(step_TKG.astype(jnp.float32) + self.step_bias[...])
        if part.time_step_limit is not None:
            dt_TKG = jnp.clip(dt_TKG, *part.time_step_limit)
        if is_there_T11 is not None:
            dt_TKG = jnp.where(is_there_T11, dt_TKG, 0)
        out_TKGP, state = step.state_space(
            x_TKC.reshape(*x_TKC.shape[:2], G, P),
            b_TKS,
            c_TKS,
            dt_TKG,
            -jnp.exp(self.log_rate[...]) * dt_TKG,
            self.skip[...],
            state,
            rows.row_R,
            rows.is_new_R,
            rows.query_start_R1,
        )
        return out_TKGP, (conv_state, state)

    def _normed(self, x_TKGP: Array, shards: Shards) -> Array:
        """The RMS norm over the heads of each group."""
        sum_TK = jnp.sum(jnp.square(x_TKGP), axis=(2, 3))
        if self.part.group_replicas > 1:  # one group, which all devices share
            sum_TK = shards.sum(sum_TK)
        values = self.part.group_replicas * x_TKGP.shape[2] * x_TKGP.shape[3]
        factor_TK = jax.lax.rsqrt(sum_TK / values + self.part.norm.eps)
        return x_TKGP * factor_TK[..., None, None] * self.norm[...].astype(jnp.float32)
