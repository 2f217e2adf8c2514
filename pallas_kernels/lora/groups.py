"""The tokens of a step by their slots."""

from dataclasses import dataclass

import jax

from pallas_kernels.grouped_matmul.plan import make_plan
from pallas_kernels.sizes import next_power_of_two

FEW_TOKENS = 16
"""So many tokens are one tile, out of which every slot picks its own."""
_MAX_ROWS = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tokens sorted by slot, in tiles that have one slot each."""

    token_T: jax.Array
    """int32 [T]: the tokens in order of their slots; what follows the last with a slot is T."""
    slot_N: jax.Array
    """int32 [N]: the slot of each tile; of a tile that is not used, the number of slots."""
    start_N: jax.Array
    """int32 [N]: its first place among the sorted tokens."""
    count_N: jax.Array
    """int32 [N]: its tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """What all products of a step share."""

    slot_T: jax.Array
    """int32 [T]: the slot of each token; -1: none."""
    tiles: Tiles | None
    """None for few tokens."""


def tile_rows(num_tokens: int, num_slots: int) -> int:
    """Tokens of a tile: about as many as a slot has if all have equally many."""
    if num_tokens <= FEW_TOKENS:
        return FEW_TOKENS
    return max(FEW_TOKENS, min(_MAX_ROWS, next_power_of_two(num_tokens // num_slots)))


def group(slot_T: jax.Array, num_slots: int) -> Groups:
    """The groups of tokens whose slots are given, int32 [T]; -1: none."""
    num_tokens = slot_T.shape[0]
    if num_tokens <= FEW_TOKENS:
        return Groups(slot_T, None)
    plan = make_plan(slot_T, num_slots, tile_rows(num_tokens, num_slots))
    return Groups(slot_T, Tiles(plan.pair_P, plan.expert_N, plan.start_N, plan.count_N))
