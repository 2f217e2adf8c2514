"""Exchanges between data-parallel ranks: a mixture's tokens go to the devices that hold their experts, and the experts' sums come back.

A rank's devices have the same tokens, so each sends what concerns its own column of the mesh: device (d, t) exchanges with the devices
(0, t) to (N - 1, t) of the other ranks alone. The sum over a rank's devices, which every layer ends in, adds up the columns.

Dimension letters besides those of the package: k choices of a token, E experts of a device, n ranks, C capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxllm.kernel_policy import KernelPolicy
from jaxllm.parallel.mesh import DATA, TENSOR, tensor_size

Experts = Callable[[Array, Array, Array], Array]
"""The weighted sums [T, D] over a device's own experts: of tokens [T, D], chosen experts int32 [T, k], weights float32 [T, k].
A choice of another device's expert, or of none (-1), adds nothing."""

SLACK = 2.0
"""Room for so many times the tokens that a device gets where all experts are chosen equally often."""


@dataclass(frozen=True)
class RankExchange:
    """The data-parallel ranks of a mesh, as seen by one of its devices inside a shard_map over both axes."""

    num_ranks: int
    num_columns: int
    """Devices of a rank."""
    policy: KernelPolicy

    @property
    def rank(self) -> Array:
        """The number of this device's rank."""
        return jax.lax.axis_index(DATA)

    @property
    def device(self) -> Array:
        """The number of this device among all that experts are distributed to."""
        return self.rank * self.num_columns + jax.lax.axis_index(TENSOR)

    def run(self, experts: Experts, x_TD: Array, expert_Tk: Array, weight_Tk: Array, num_experts: int) -> Array:
        """The sums [T, D] of this rank's tokens over all experts of this column. Exact whatever is chosen; no token is dropped.

        num_experts: of each device. Which way the tokens take depends on shapes and the policy alone, but for a send that overflows.
        """
        capacity = self.capacity(*expert_Tk.shape)
        if capacity is None:
            return self.gather(experts, x_TD, expert_Tk, weight_Tk)
        return self.send(experts, x_TD, expert_Tk, weight_Tk, num_experts, capacity)

    def capacity(self, num_tokens: int, num_choices: int) -> int | None:
        """Tokens that a rank may send to a device; None: gathering all of them is no more work for the links."""
        expected = num_tokens * num_choices / (self.num_ranks * self.num_columns)
        capacity = 8 * -(-int(SLACK * expected) // 8)
        return capacity if self.policy.sends_tokens(num_tokens) and 2 * capacity <= num_tokens else None

    def gather(self, experts: Experts, x_TD: Array, expert_Tk: Array, weight_Tk: Array) -> Array:
        """Every device gets the tokens of all ranks, and computes those that chose its experts."""
        every = partial(jax.lax.all_gather, axis_name=DATA, tiled=True)

        def some(x_TD: Array, packed_T2k: Array) -> Array:
            sum_TD = experts(every(x_TD), *_unpacked(every(packed_T2k)))
            return jax.lax.psum_scatter(sum_TD, DATA, tiled=True)

        return _in_rounds(some, self.policy.max_tokens_at_once // self.num_ranks, x_TD, _packed(expert_Tk, weight_Tk))

    def send(self, experts: Experts, x_TD: Array, expert_Tk: Array, weight_Tk: Array, num_experts: int, capacity: int) -> Array:
        """Each token goes once to each device that holds an expert of its choice. Where more than `capacity` tokens of a rank chose one
        device, all ranks gather instead."""
        num_tokens, num_choices = expert_Tk.shape
        device_Tk = expert_Tk // num_experts  # -1 for no expert
        is_mine_Tk = (expert_Tk >= 0) & (device_Tk % self.num_columns == jax.lax.axis_index(TENSOR))
        rank_Tk = jnp.where(is_mine_Tk, device_Tk // self.num_columns, self.num_ranks)
        is_sent_nT = (rank_Tk == jnp.arange(self.num_ranks)[:, None, None]).any(axis=2)
        slot_nT = jnp.cumsum(is_sent_nT, axis=1, dtype=jnp.int32) - 1
        overflows = (slot_nT[:, -1] >= capacity).any()
        # The same on every device: all must take the same branch, because the branches exchange.
        overflows = jax.lax.pmax(overflows.astype(jnp.int32), (DATA, TENSOR)) > 0

        def send() -> Array:
            token_nC = jnp.full((self.num_ranks, capacity), num_tokens, jnp.int32)
            target_nT = jnp.where(is_sent_nT, slot_nT, capacity)
            token_nC = token_nC.at[jnp.arange(self.num_ranks)[:, None], target_nT].set(jnp.arange(num_tokens), mode="drop")
            to = partial(jax.lax.all_to_all, axis_name=DATA, split_axis=0, concat_axis=0, tiled=True)
            sent_nCD = to(x_TD.at[token_nC].get(mode="fill", fill_value=0))
            nothing_1k = jnp.full((1, num_choices), -1), jnp.zeros((1, num_choices))
            choices_nC2k = to(jnp.concatenate([_packed(expert_Tk, weight_Tk), _packed(*nothing_1k)])[token_nC])
            sum_PD = _in_rounds(
                lambda x_PD, packed_P2k: experts(x_PD, *_unpacked(packed_P2k)),
                self.policy.max_tokens_at_once,
                sent_nCD.reshape(-1, x_TD.shape[1]),
                choices_nC2k.reshape(-1, 2 * num_choices),
            )
            back_PD = to(sum_PD.reshape(sent_nCD.shape)).reshape(sum_PD.shape)
            # Each device's sum once, in the order of choices: what other tokens chose does not matter.
            is_first_Tk = ~jnp.tril(rank_Tk[:, :, None] == rank_Tk[:, None, :], -1).any(axis=2)
            place_Tk = rank_Tk * capacity + jnp.take_along_axis(slot_nT.T, jnp.minimum(rank_Tk, self.num_ranks - 1), axis=1)
            place_Tk = jnp.where(is_mine_Tk & is_first_Tk, place_Tk, len(back_PD))
            sum_TkD = back_PD.at[place_Tk].get(mode="fill", fill_value=0)
            return jnp.sum(sum_TkD, axis=1, dtype=jnp.float32).astype(x_TD.dtype)

        return jax.lax.cond(overflows, lambda: self.gather(experts, x_TD, expert_Tk, weight_Tk), send)


def _in_rounds(compute: Callable[..., Array], most: int, *arrays: Array) -> Array:
    """The results for arrays of tokens, computed for at most so many at a time."""
    num_tokens, most = len(arrays[0]), max(1, most)
    parts = [compute(*(array[start : start + most] for array in arrays)) for start in range(0, num_tokens, most)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _packed(expert_Tk: Array, weight_Tk: Array) -> Array:
    """int32 [T, 2 k]: choices and the bits of their weights, for one exchange of both."""
    bits_Tk = jax.lax.bitcast_convert_type(weight_Tk.astype(jnp.float32), jnp.int32)
    return jnp.concatenate([expert_Tk.astype(jnp.int32), bits_Tk], axis=1)


def _unpacked(packed_T2k: Array) -> tuple[Array, Array]:
    expert_Tk, bits_Tk = jnp.split(packed_T2k, 2, axis=1)
    return expert_Tk, jax.lax.bitcast_convert_type(bits_Tk, jnp.float32)


def make_exchange(mesh: Mesh, policy: KernelPolicy) -> RankExchange | None:
    """The exchange between the data-parallel ranks of a mesh; None if there is one."""
    return RankExchange(mesh.shape[DATA], tensor_size(mesh), policy) if DATA in mesh.shape else None
