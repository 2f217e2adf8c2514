"""Lightning attention. Source: arXiv:2401.04658."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.attention import HeadNorm
from jaxllm.layers.latest_inputs import mix_in_layer
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.rope import head_order
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LightningAttention
from jaxllm.parallel.shards import Shards
from pallas_kernels.quantize import Sums
from pallas_kernels.rope_cache_write.xla import apply_rope


class LightningMixer(nnx.Module):
    """A token mixer that keeps a matrix [H, H] of each head by row, values by keys. Devices split its heads.

    Its recurrence is that of Mamba-2 with time steps of 1 and a constant decay, where a key is the vector by which a head takes into its
    matrix, and a query that by which it takes out.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: LightningAttention, layer: int, prefix: str):
        D, K, H, dtype = config.hidden_size, part.num_heads, part.head_dim, config.dtype
        self.part, self.layer = part, layer
        names = {key: f"{prefix}{name}" for key, (name,) in part.linears.items()}
        order, axes = head_order(part.rope, H), ("embed", "heads", "head")
        modules = [Module(names["qkv"], (K, H), each) for each in (order, order, None)]
        self.qkv = Linear("td,dkh->tkh", (D, K, 3 * H), axes, dtype, modules=modules, joined=1)
        self.gate = Linear("td,dkh->tkh", (D, K, H), axes, dtype, modules=[Module(names["gate"], (K, H))])
        self.q_norm = self.k_norm = nnx.data(None)
        if part.head_norms is not None:
            norms = (HeadNorm(norm, ((H,), ("head",)), (H,), dtype, prefix, order) for norm in part.head_norms)
            self.q_norm, self.k_norm = norms
        weight = Source((Tensor(f"{prefix}{part.norm.name}.weight", (K * H,), (K, H)),), 0, (0, 1))
        self.norm = abstract_param((K, H), ("heads", "head"), dtype, source=weight, init="ones")
        out = [Module(names["out"], (D,))]
        self.out = Linear("tkh,khd->td", (K, H, D), ("heads", "head", "embed"), dtype, modules=out)

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        part = self.part
        q_TKH, k_TKH, v_TKH = jnp.split(products(self.qkv, runs, step), 3, axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_TKH, k_TKH = self.q_norm.of_each(q_TKH), self.k_norm.of_each(k_TKH)
        angles, dtype = step.angles(part.rope, part.head_dim), v_TKH.dtype
        q_TKH = (apply_rope(q_TKH, angles) * part.head_dim**-0.5).astype(dtype)
        inputs = jnp.concatenate([v_TKH, apply_rope(k_TKH, angles), q_TKH], axis=2)
        out_TKH = mix_in_layer(self.layer, part, partial(self._mix, step=step), (inputs,), step)
        gate_TKH = jax.nn.sigmoid(products(self.gate, runs, step).astype(jnp.float32))
        out_TKH = (self._normed(out_TKH, step.shards) * gate_TKH).astype(dtype)
        return products_by_run(self.out, out_TKH, runs, step)

    def _mix(
        self,
        inputs: Sequence[Array],
        arrays: tuple[Array, ...],
        rows: StateRows,
        is_there_T11: Array | None = None,
        *,
        step: Step,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The sums of tokens [T, K, H], and the states behind them: see `latest_inputs.Mix`."""
        v_TKH, k_TKH, q_TKH = jnp.split(inputs[0], 3, axis=2)
        rate_K = _own(jnp.asarray(self.part.rates, jnp.float32), v_TKH.shape[1], step.shards)
        dt_TK1 = jnp.ones((*v_TKH.shape[:2], 1), jnp.float32)
        if is_there_T11 is not None:
            dt_TK1 = jnp.where(is_there_T11, dt_TK1, 0)
        out_TK1H, state = step.state_space(
            v_TKH[:, :, None],
            k_TKH,
            q_TKH,
            dt_TK1,
            -rate_K[:, None] * dt_TK1,
            jnp.zeros((len(rate_K), 1), jnp.float32),
            arrays[0],
            rows.row_R,
            rows.is_new_R,
            rows.query_start_R1,
        )
        return out_TK1H[:, :, 0], (state,)

    def _normed(self, x_TKH: Array, shards: Shards) -> Array:
        """The RMS norm over the heads of each group, float32."""
        num_tokens, num_heads, width = x_TKH.shape
        groups = x_TKH.astype(jnp.float32).reshape(num_tokens, self.part.num_norm_groups // shards.size, -1)
        groups *= jax.lax.rsqrt(jnp.mean(jnp.square(groups), axis=-1, keepdims=True) + self.part.norm.eps)
        return groups.reshape(num_tokens, num_heads, width) * self.norm[...].astype(jnp.float32)


def _own(x_K: Array, num_heads: int, shards: Shards) -> Array:
    """The values of this device's heads."""
    return x_K if shards.size == 1 else jax.lax.dynamic_slice_in_dim(x_K, shards.index * num_heads, num_heads)
