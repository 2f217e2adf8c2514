import numpy as np

from jaxllm.request import PromptItem
from jaxllm.rope_positions import rope_delta, rope_positions


def item(position: int, grid: tuple[int, int, int] | None, num_tokens: int | None = None) -> PromptItem:
    return PromptItem("image", b"", position, num_tokens or int(np.prod(grid)), grid=grid)


def one_by_one(items: list[PromptItem], count: int) -> np.ndarray:
    """The rule, token after token."""
    found: list[tuple[int, int, int]] = []
    here = 0
    while len(found) < count:
        start = next((item for item in items if item.position == len(found) and item.grid is not None), None)
        if start is None:
            found.append((here, here, here))
            here += 1
            continue
        frames, height, width = start.grid
        found += [(here + t, here + y, here + x) for t in range(frames) for y in range(height) for x in range(width)]
        here += max(start.grid[1:])
    return np.array(found[:count]).T


ITEMS = [item(2, (1, 3, 5)), item(17, (1, 4, 2)), item(25, None, 6), item(31, (3, 2, 2)), item(60, (1, 7, 7))]
"""The second begins where the first ends."""


def test_every_chunk_of_a_prompt_with_images():
    whole = one_by_one(ITEMS, 130)
    for start in range(120):
        for count in (1, 3, 10, 40):
            end = min(start + count, 130)
            found = rope_positions(ITEMS, start, end - start)
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, whole[:, start:end])


def test_text_has_its_index_on_all_axes():
    np.testing.assert_array_equal(rope_positions([], 5, 3), [[5, 6, 7]] * 3)
    assert rope_delta([]) == rope_delta([item(3, None, 4)]) == 0


def test_the_delta_is_that_of_the_tokens_behind_the_last_item():
    delta = rope_delta(ITEMS)
    np.testing.assert_array_equal(rope_positions(ITEMS, 200, 2), [[200 + delta, 201 + delta]] * 3)
    assert delta == (5 - 15) + (4 - 8) + (2 - 12) + (7 - 49)
