"""Adapters of the experts of a mixture."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.layers.linear import abstract_param, precision_of
from jaxllm.layers.moe import MixtureOfExperts
from jaxllm.layers.source import Stacked, Tensor
from jaxllm.lora.shapes import TargetShape, expert_targets
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, weighted_sum


class Factors(NamedTuple):
    """The adapters in all slots of all experts on a device."""

    gate_up_down_SE2RD: Array
    """Takes the input of gate and of up to R values each."""
    gate_up_up_SE2FR: Array
    """Takes these to the outputs of gate and up."""
    down_down_SERF: Array
    down_up_SEDR: Array


class ExpertsTarget(nnx.Module):
    """The adapters in all slots of a mixture's routed experts, split over devices as the experts' weights."""

    def __init__(self, mixture: MixtureOfExperts, num_slots: int, rank: int, dtype: str):
        self.name = mixture.name
        (E, D), F = mixture.router.shape, mixture.part.width
        experts, width = mixture.axes
        modules = list(modules_of(mixture))
        gates_and_ups, downs = [name for i, name in enumerate(modules) if i % 3 < 2], modules[2::3]

        def param(names: Sequence[str], side: str, sizes: Mapping[str, int]) -> nnx.Param:
            shape = tuple(sizes.values())
            tensors = tuple(Tensor(f"{name}.lora_{side}.weight", shape, shape) for name in names)
            lead = {experts: E, "gate_up": 2} if names is gates_and_ups else {experts: E}
            source = Stacked(tensors, tuple(lead.values()))
            all_sizes = {"slot": num_slots, **lead, **sizes}
            return abstract_param(tuple(all_sizes.values()), tuple(all_sizes), dtype, source=source)

        self.gate_up_down = param(gates_and_ups, "A", {"rank": rank, "embed": D})
        self.gate_up_up = param(gates_and_ups, "B", {width: F, "rank": rank})
        self.down_down = param(downs, "A", {"rank": rank, width: F})
        self.down_up = param(downs, "B", {"embed": D, "rank": rank})

    @property
    def factors(self) -> Factors:
        """The arrays."""
        return Factors(*(each[...] for each in (self.gate_up_down, self.gate_up_up, self.down_down, self.down_up)))


def modules_of(mixture: MixtureOfExperts) -> Mapping[str, TargetShape]:
    """The checkpoint's modules of a mixture's routed experts: gate, up and down of one after those of the other."""
    return expert_targets(mixture.part, mixture.prefix, mixture.router.shape[1])


@partial(jax.jit, static_argnames=("activation",))
def compute(
    x_TD: Array,
    expert_Tk: Array,
    weight_Tk: Array,
    gate_up_E2FD: Any,
    down_EDF: Any,
    *,
    slot_T: Array,
    factors: Factors,
    is_real_T: Array | None = None,
    gate_up_bias_E2F: Array | None = None,
    down_bias_ED: Array | None = None,
    activation: str = "silu",
    first_expert: int | Array = 0,
) -> Array:
    """`pallas_kernels.grouped_matmul.experts` in which the experts of each token are changed by the adapter in its slot; -1: none.

    Weights are arrays, or what `WeightFormat.operand` returns.

    A loop over tiles of pairs of token and expert, each of one expert, in plain JAX. Beside inputs and results of all pairs, [T * k, D]
    each in the type of x, it needs the values of one tile: 0.3 GB for 4096 tokens with 8 experts each of width 2048, in bfloat16.
    A tile is multiplied with the changes of its expert in all slots, of which those of other slots count nothing.
    """
    num_experts, hidden, width = len(down_EDF), factors.gate_up_up_SE2FR.shape[3], x_TD.shape[1]
    num_choices, num_slots = expert_Tk.shape[1], len(factors.down_up_SEDR)
    dtype = x_TD.dtype
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    num_pairs = len(expert_P)
    tile_rows = min(num_pairs, max(8, min(128, num_pairs // num_experts)))
    plan = make_plan(expert_P, num_experts, tile_rows)
    token_P = plan.pair_P // num_choices
    x_PD = x_TD.at[token_P].get(mode="clip")
    slot_P = slot_T.at[token_P].get(mode="clip")

    def changed(sum_MX: Array, x_MXI: Array, own_MS: Array, down: Array, up: Array) -> Array:
        """Float32 sums with the low-rank products of inputs x added, of those rows that have an adapter."""
        values = _einsum("mi,s...ri->ms...r", x_MXI, down.astype(dtype))
        is_own = own_MS.reshape(*own_MS.shape, *(1,) * (values.ndim - 2))
        change = _einsum("ms...r,s...or->m...o", jnp.where(is_own, values, 0).astype(dtype), up.astype(dtype))
        has_adapter = jnp.any(own_MS, axis=1).reshape(-1, *(1,) * (sum_MX.ndim - 1))
        return jnp.where(has_adapter, sum_MX + change, sum_MX)

    def compute_tile(tile: Array, out_PD: Array) -> Array:
        # A tile at the end begins earlier and computes rows of another expert too, which are not kept.
        start = jnp.minimum(plan.start_N[tile], num_pairs - tile_rows)
        row_M = start + jnp.arange(tile_rows)
        is_own_M = (row_M >= plan.start_N[tile]) & (row_M < plan.start_N[tile] + plan.count_N[tile])
        expert = plan.expert_N[tile]
        own_MS = lax.dynamic_slice_in_dim(slot_P, start, tile_rows)[:, None] == jnp.arange(num_slots)
        of_expert = [lax.dynamic_index_in_dim(each, expert, 1, keepdims=False) for each in factors]
        gate_up_2FD, down_DF = (weight[expert].astype(dtype) for weight in (gate_up_E2FD, down_EDF))
        if down_DF.shape != (width, hidden):  # in tiles, which are padded
            gate_up_2FD, down_DF = gate_up_2FD[:, :hidden, :width], down_DF[:width, :hidden]
        tile_MD = lax.dynamic_slice_in_dim(x_PD, start, tile_rows)
        gate_up_M2F = _einsum("md,nd->mn", tile_MD, gate_up_2FD.reshape(2 * hidden, width)).reshape(tile_rows, 2, hidden)
        gate_up_M2F = changed(gate_up_M2F, tile_MD, own_MS, *of_expert[:2])
        if gate_up_bias_E2F is not None:
            gate_up_M2F += gate_up_bias_E2F[expert].astype(jnp.float32)
        hidden_MF = ACTIVATIONS[activation](gate_up_M2F[:, 0], gate_up_M2F[:, 1]).astype(dtype)
        out_MD = changed(_einsum("mf,df->md", hidden_MF, down_DF), hidden_MF, own_MS, *of_expert[2:])
        if down_bias_ED is not None:
            out_MD += down_bias_ED[expert].astype(jnp.float32)
        kept_MD = lax.dynamic_slice_in_dim(out_PD, start, tile_rows)
        out_MD = jnp.where(is_own_M[:, None], out_MD.astype(dtype), kept_MD)
        return lax.dynamic_update_slice_in_dim(out_PD, out_MD, start, 0)

    sorted_PD = lax.fori_loop(0, plan.num_tiles, compute_tile, jnp.zeros((num_pairs, width), dtype))
    return weighted_sum(sorted_PD.at[plan.row_P].get(mode="clip"), expert_P, weight_Tk, num_experts)


def _einsum(subscripts: str, *operands: Array) -> Array:
    """Accumulated in float32."""
    return jnp.einsum(subscripts, *operands, precision=precision_of(operands[0].dtype), preferred_element_type=jnp.float32)
