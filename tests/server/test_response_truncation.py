import asyncio
from typing import Any

import pytest

from server.responses.truncation import last_turns, longest_that_fits, turn_starts


def user(number: int) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": str(number)}


SYSTEM = {"type": "message", "role": "system", "content": "stay"}
CALL = [{"type": "function_call", "call_id": "a"}, {"type": "function_call_output", "call_id": "a"}]


@pytest.mark.parametrize("num_turns", [1, 2, 7, 100])
@pytest.mark.parametrize("first", [[], [SYSTEM], [{"type": "message", "role": "assistant", "content": "x"}]])
def test_as_many_turns_stay_as_fit(num_turns: int, first: list[Any]) -> None:
    items = [*first, *(item for number in range(num_turns) for item in (user(number), *CALL))]
    for room in range(num_turns + 2):
        tried: list[int] = []

        async def attempt(kept: list[Any], room: int = room, tried: list[int] = tried) -> list[Any] | None:
            assert len(kept) < len(items)
            tried.append(len(turn_starts(kept)))
            return kept if tried[-1] <= room else None

        kept = asyncio.run(longest_that_fits(items, attempt))
        most = num_turns - (
            first in ([], [SYSTEM])
        )  # with all turns and nothing before them it is the whole, which did not fit
        wanted = min(room, most)
        assert kept == (last_turns(items, turn_starts(items), wanted) if wanted else None)
        assert max(tried, default=0) <= 2 * wanted + 1
        assert kept is None or kept[0] == (SYSTEM if first == [SYSTEM] else user(num_turns - wanted))
