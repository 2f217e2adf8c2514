from collections.abc import Sequence

import pytest

from jaxllm.model_parts.description import short_ranges


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0, 1"),
        (range(48), "0-47"),
        ([0, 2, 4], "0, 2, 4"),
        (range(5, 48, 6), "5, 11, …, 47"),
        ([9, 10, 12, 13, 14, 15, 16, 18], "9, 10, 12-16, 18"),
    ],
)
def test_numbers_are_short(given: Sequence[int], shown: str) -> None:
    assert short_ranges(given) == shown
