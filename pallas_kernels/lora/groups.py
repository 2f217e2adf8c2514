"""The tokens of a step by their slots."""

from dataclasses import dataclass

import jax

from pallas_kernels.grouped_matmul.plan import make_plan

FEW_TOKENS = 64
"""So many tokens are one tile, out of which every slot picks its own."""
_MANY_TOKENS = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tiles of tokens sorted by slot, each of one slot."""

    token_T: jax.Array
    """int32 [T]: the tokens in order of their slots."""
    slot_N: jax.Array
    """int32 [N]: the slot of each tile; that of a tile that is not used is not less than the number of slots."""
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


def tile_rows(num_tokens: int) -> int:
    """Tokens of a tile."""
    if num_tokens <= FEW_TOKENS:
        return max(16, 1 << (num_tokens - 1).bit_length())
    return 64 if num_tokens <= _MANY_TOKENS else 128


def group(slot_T: jax.Array, num_slots: int) -> Groups:
    """The groups of tokens whose slots are given, int32 [T]; -1: none."""
    num_tokens = slot_T.shape[0]
    if num_tokens <= FEW_TOKENS:
        return Groups(slot_T, None)
    plan = make_plan(slot_T, num_slots, tile_rows(num_tokens))
    return Groups(slot_T, Tiles(plan.pair_P, plan.expert_N, plan.start_N, plan.count_N))
