"""Parameters of a test of which most run only with `-m slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, those that are not in `quick` marked as slow. A case is a value, or a tuple of one for each argument."""
    quick, cases = list(quick), list(cases)
    assert all(case in cases for case in quick), "a quick case is none of the cases"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
