"""The tokens of a step by their slots."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.plan import make_plan
from pallas_kernels.sizes import next_power_of_two

FEW_TOKENS = 16
"""So many tokens are one tile, out of which every slot picks its own."""
_MIN_ROWS, _MAX_ROWS = 16, 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tokens sorted by slot, those without one last, in tiles that have one slot each."""

    token_T: jax.Array
    """int32 [T]: the tokens in order of their slots."""
    slot_N: jax.Array
    """int32 [N]: the slot of each tile; not less than the number of slots: its tokens have none."""
    start_N: jax.Array
    """int32 [N]: its first place among the sorted tokens."""
    count_N: jax.Array
    """int32 [N]: its tokens; 0 for a tile that is not used."""
    num_rows: int = field(metadata={"static": True})
    """The most tokens of a tile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """What all products of a step share."""

    slot_T: jax.Array
    """int32 [T]: the slot of each token; -1: none."""
    tiles: Tiles | None
    """None for few tokens."""


def group(slot_T: jax.Array, num_slots: int, *, tile_rows: int | None = None) -> Groups:
    """The groups of tokens whose slots are given, int32 [T]; -1: none.

    tile_rows: tokens of a tile; None: about as many as a slot has if all have equally many.
    """
    num_tokens = slot_T.shape[0]
    if num_tokens <= FEW_TOKENS:
        return Groups(slot_T, None)
    if tile_rows is None:
        tile_rows = max(_MIN_ROWS, min(_MAX_ROWS, next_power_of_two(num_tokens // num_slots)))
    plan = make_plan(jnp.where(slot_T < 0, num_slots, slot_T), num_slots + 1, tile_rows)
    return Groups(slot_T, Tiles(plan.pair_P, plan.expert_N, plan.start_N, plan.count_N, tile_rows))
