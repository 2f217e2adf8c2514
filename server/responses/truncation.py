"""`truncation: auto`: as many of the last turns of a conversation as fit into the context."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Items = list[dict[str, Any]]
Made = TypeVar("Made")


async def longest_that_fits(items: Items, attempt: Callable[[Items], Awaitable[Made | None]]) -> Made | None:
    """The result of `attempt` for the most turns that fit (None: too long); None if even the last turn does not fit.

    Starts with few turns, so that the work depends on what fits, not on what was sent.
    """
    starts = turn_starts(items)
    best, fits, too_many, count = None, 0, len(starts) + 1, 1
    while fits < count < too_many:
        kept = last_turns(items, starts, count)
        made = await attempt(kept) if len(kept) < len(items) else None
        if made is None:
            too_many = count
        else:
            best, fits = made, count
        count = min(2 * count, len(starts)) if too_many > len(starts) else (fits + too_many) // 2
    return best


def turn_starts(items: Items) -> list[int]:
    """Where turns begin: at user messages, so that a call and its result stay together."""
    return [place for place, item in enumerate(items) if item["type"] == "message" and item["role"] == "user"]


def last_turns(items: Items, starts: list[int], count: int) -> Items:
    """The last turns, after the system messages of the earlier ones."""
    place = starts[-count]
    return [item for item in items[:place] if item.get("role") in ("system", "developer")] + items[place:]
