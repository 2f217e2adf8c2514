"""Which rows each tile of a grouped product computes: pairs of token and choice, sorted by expert. Static shapes, no loops.

sorted pairs   | expert 0: 5 | 1: 0 | expert 2: 9            | ... | of no expert here |
tiles of 4     [0 0 0 0][0]         [2 2 2 2][2 2 2 2][2]    ...   unused tiles: expert E, 0 rows
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

BLOCK = 256
"""Pairs that are compared with each other."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Tiles and their rows. A row is a place in the sorted order."""

    row_P: jax.Array
    """int32 [P]: the row of each pair, P if it has no expert here."""
    pair_P: jax.Array
    """int32 [P]: the pair of each row, P where the row is of none."""
    expert_N: jax.Array
    """int32 [N]: the expert of each tile; E for a tile that is not used, these come last."""
    start_N: jax.Array
    """int32 [N]: its first row."""
    count_N: jax.Array
    """int32 [N]: its rows."""

    @property
    def num_tiles(self) -> jax.Array:
        """int32 []: tiles in use."""
        return jnp.sum(self.count_N > 0, dtype=jnp.int32)


def local_experts(
    expert_Tk: jax.Array, is_real_T: jax.Array | None, first_expert: int | jax.Array, num_experts: int
) -> jax.Array:
    """int32 [P]: the expert of each pair as an index into this device's; outside of [0, E) if it is not here or the token is padding.

    Costs no kernel where there is nothing to do.
    """
    local_Tk = expert_Tk.astype(jnp.int32)
    if not (isinstance(first_expert, int) and first_expert == 0):
        local_Tk -= first_expert
    if is_real_T is not None:
        local_Tk = jnp.where(is_real_T[:, None], local_Tk, num_experts)
    return local_Tk.reshape(-1)


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that pairs can fill, however they are distributed."""
    return min(num_pairs, num_experts) + num_pairs // tile_rows


def make_plan(expert_P: jax.Array, num_experts: int, tile_rows: int) -> Plan:
    """The plan for pairs whose experts are given by `local_experts`."""
    num_pairs = expert_P.shape[0]
    expert_P = jnp.where((expert_P >= 0) & (expert_P < num_experts), expert_P, num_experts)
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    place_P, count_E = _places(expert_P, num_experts)

    def before(x_E: jax.Array) -> jax.Array:
        """Sums over the experts before each."""
        return jnp.sum(jnp.where(expert_E[None, :] < expert_E[:, None], x_E[None, :], 0), axis=1, dtype=jnp.int32)

    tiles_E, start_E = -(-count_E // tile_rows), before(count_E)
    first_E = before(tiles_E)
    known_P = jnp.minimum(expert_P, num_experts - 1)
    row_P = jnp.where(expert_P < num_experts, start_E[known_P] + place_P, num_pairs)
    pair_P = jnp.full(num_pairs, num_pairs, jnp.int32).at[row_P].set(jnp.arange(num_pairs, dtype=jnp.int32), mode="drop")
    tile_N = jnp.arange(max_tiles(num_pairs, num_experts, tile_rows), dtype=jnp.int32)
    expert_N = jnp.sum(tile_N[:, None] >= (first_E + tiles_E)[None, :], axis=1, dtype=jnp.int32)
    known_N = jnp.minimum(expert_N, num_experts - 1)
    offset_N = (tile_N - first_E[known_N]) * tile_rows
    count_N = jnp.where(expert_N < num_experts, jnp.clip(count_E[known_N] - offset_N, 0, tile_rows), 0)
    start_N = jnp.where(count_N > 0, start_E[known_N] + offset_N, 0)
    return Plan(row_P, pair_P, expert_N, start_N, count_N)


def _places(expert_P: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """int32 [P]: how many pairs before each have the same expert, and [E]: how many pairs an expert has.

    Counted in blocks: a few kernels on a GPU, where sorting takes about twenty.
    """
    num_pairs = expert_P.shape[0]
    block = min(BLOCK, num_pairs)
    num_blocks = -(-num_pairs // block)
    expert_CB = jnp.pad(expert_P, (0, num_blocks * block - num_pairs), constant_values=num_experts).reshape(num_blocks, block)
    index_B = jnp.arange(block)
    is_same_CBB = (expert_CB[:, None, :] == expert_CB[:, :, None]) & (index_B[None, :] < index_B[:, None])
    place_P = jnp.sum(is_same_CBB, axis=2, dtype=jnp.int32).reshape(-1)[:num_pairs]
    is_expert_CBE = expert_CB[:, :, None] == jnp.arange(num_experts)
    count_CE = jnp.sum(is_expert_CBE, axis=1, dtype=jnp.int32)
    if num_blocks > 1:
        index_C = jnp.arange(num_blocks)
        is_before_CC1 = (index_C[None, :] < index_C[:, None])[:, :, None]
        before_CE = jnp.sum(jnp.where(is_before_CC1, count_CE[None, :, :], 0), axis=1, dtype=jnp.int32)
        place_P += before_CE[jnp.arange(num_pairs) // block, jnp.minimum(expert_P, num_experts - 1)]
    return place_P, jnp.sum(count_CE, axis=0)


def weighted_sum(out_PD: jax.Array, expert_P: jax.Array, weight_Tk: jax.Array, num_experts: int) -> jax.Array:
    """[T, D] from the results of pairs; what stands in the place of pairs without an expert here may be anything."""
    out_TkD = out_PD.reshape(*weight_Tk.shape, -1)
    is_here_Tk1 = ((expert_P >= 0) & (expert_P < num_experts)).reshape(*weight_Tk.shape, 1)
    wide_TkD = jnp.where(is_here_Tk1, out_TkD.astype(jnp.float32) * weight_Tk[:, :, None], 0.0)
    return jnp.sum(wide_TkD, axis=1).astype(out_PD.dtype)
