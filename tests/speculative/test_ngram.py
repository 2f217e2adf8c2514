"""Prompt lookup, compared with a plain search."""

import jax
import numpy as np
import pytest

from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.speculative.ngram import NGramDrafter
from tests.helpers.slow import slow_except

LENGTH, ROWS, NUM_DRAFTS = 40, 64, 5


def plain_search(tokens: list[int], shortest: int, longest: int) -> list[int]:
    """The drafts behind these tokens."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):  # the latest first
            if tokens[end - size : end] == tokens[-size:]:
                found = list(tokens)
                while len(found) < len(tokens) + NUM_DRAFTS:
                    found.append(found[end + len(found) - len(tokens)])
                return found[len(tokens) :]
    return [NO_DRAFT] * NUM_DRAFTS


@pytest.mark.parametrize("num_ids", slow_except([2, 20], [1, 2, 3, 20]))
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 50)])
def test_the_longest_and_then_the_latest_match_is_continued(num_ids, shortest, longest):
    rng = np.random.default_rng(num_ids)
    drafter = NGramDrafter(NUM_DRAFTS, shortest, longest)
    find = jax.jit(drafter.find)
    for _ in range(4):
        tokens_RL = rng.integers(0, num_ids, (ROWS, LENGTH), dtype=np.int32)
        last_R = rng.choice([*range(8), *range(LENGTH)], ROWS).astype(np.int32)
        last_R[0] = LENGTH - 1
        found = np.asarray(find(tokens_RL, last_R)).tolist()
        for drafts, tokens, last in zip(found, tokens_RL.tolist(), last_R.tolist(), strict=True):
            assert drafts == plain_search(tokens[: last + 1], shortest, longest), (tokens[: last + 1], drafts)


def test_cached_beginnings_are_shown_in_parts():
    drafter = NGramDrafter(NUM_DRAFTS, 1, 3)
    state = drafter.new_state(3, 10)
    for position, part in ((0, [5, 6, 7, 8]), (4, [9, 4, -1, -1]), (8, [1, 2, 3, 4])):
        state = drafter.show(state, np.int32(1), np.int32(position), np.array(part, np.int32))
    assert state.tolist() == [[0] * 10, [5, 6, 7, 8, 9, 4, 0, 0, 1, 2], [0] * 10]
