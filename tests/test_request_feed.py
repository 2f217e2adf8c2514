"""Requests of a call, some of which are made later, in the order in which the engine gets them."""

import threading

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.request_feed import AHEAD, LaterRequest, RequestFeed


def later(value: int, priority: int = 0) -> LaterRequest[int]:
    return LaterRequest(lambda: value, lambda prepared: 10 * prepared, priority)


def test_ready_requests_come_at_once_and_later_ones_as_far_as_there_is_room() -> None:
    feed = RequestFeed([later(0), 1, later(2), later(3), 4], max_unfinished=3)
    assert [*feed.take(0)][:2] == [(1, 1), (4, 4)] and len(feed) in (2, 3)
    while len(feed):
        assert all(value == 10 * place for place, value in feed.take(0))
    assert [*feed.take(0)] == []
    feed.close()


def test_only_some_are_prepared_ahead_and_by_priority() -> None:
    begun: list[int] = []

    def noted(value: int) -> LaterRequest[int]:
        return LaterRequest(lambda: begun.append(value), lambda prepared: value, -value)

    feed = RequestFeed([noted(value) for value in range(3 * AHEAD)], max_unfinished=1)
    [(place, value)] = feed.take(0)
    assert place == value
    assert [*feed.take(1)] == [], "the engine has enough"
    feed.close()
    assert len(begun) <= AHEAD + 1 and min(begun) >= 2 * AHEAD - 1


def test_what_is_ready_does_not_wait_for_what_is_not() -> None:
    release = threading.Event()
    feed = RequestFeed([LaterRequest(lambda: release.wait(10), lambda prepared: 0), later(1), later(2)], max_unfinished=9)
    taken = [*feed.take(0)]
    while len(taken) < 2:
        taken += feed.take(len(taken))
    assert sorted(taken) == [(1, 10), (2, 20)]
    release.set()
    assert [*feed.take(0)] == [(0, 0)]
    feed.close()


def test_an_error_names_the_prompt() -> None:
    def fail() -> int:
        raise InvalidRequestError("it is damaged", "prompt")

    feed = RequestFeed([1, LaterRequest(fail, lambda prepared: 0)], max_unfinished=9)
    with pytest.raises(InvalidRequestError, match="prompt 1 of 2 cannot be served, and ended the call: it is damaged"):
        while len(feed):
            [*feed.take(0)]
    feed.close()


def test_the_first_requests_are_those_that_fill_some_tokens():
    feed = RequestFeed([3, 2, 4, 1], max_unfinished=9, first_tokens=5, num_tokens=lambda request: request)
    assert [list(feed.take(0)), list(feed.take(2)), len(feed)] == [[(0, 3), (1, 2)], [(2, 4), (3, 1)], 0]
