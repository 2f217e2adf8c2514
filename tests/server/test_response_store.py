from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.responses.store import ResponseStore, StoredResponse


def entry(response_id: str, owner: str = "me", previous: str | None = None) -> StoredResponse:
    response: dict[str, Any] = {"id": response_id, "previous_response_id": previous, "output": [{"said": response_id}]}
    return StoredResponse(owner, response, [{"asked": response_id}])


def test_a_response_is_there_for_its_owner_alone() -> None:
    store = ResponseStore(10, 1000)
    store.put(entry("a"), 10)
    assert store.get("a", "me") is not None
    assert store.get("a", "you") is None
    assert store.conversation("a", "you") is None
    assert not store.delete("a", "you")
    assert store.delete("a", "me") and store.get("a", "me") is None


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(2, 1000)
    for name in "ab":
        store.put(entry(name), 10)
    store.get("a", "me")
    store.put(entry("c"), 10)
    assert [name for name in "abc" if store.get(name, "me")] == ["a", "c"]


def test_what_is_larger_than_the_store_is_not_kept_and_drives_nothing_out() -> None:
    store = ResponseStore(2, 100)
    store.put(entry("a"), 60)
    assert not store.put(entry("b"), 101)
    assert store.get("a", "me") is not None
    assert store.put(entry("c"), 60)
    assert store.get("a", "me") is None


def test_a_conversation_is_all_its_turns_and_none_without_its_beginning() -> None:
    store = ResponseStore(3, 1000)
    store.put(entry("a"), 10)
    store.put(entry("b", previous="a"), 10)
    assert store.conversation("b", "me") == ([{"asked": "a"}, {"said": "a"}, {"asked": "b"}, {"said": "b"}], 20)
    store.delete("a", "me")
    assert store.conversation("b", "me") is None


def test_a_store_of_nothing_keeps_nothing() -> None:
    store = ResponseStore(0, 1000)
    assert not store.put(entry("a"), 1)
    assert len(store) == 0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("pgdc"), st.sampled_from("abcdef"), st.integers(1, 60)), max_size=40))
def test_bounds_hold_whatever_happens(steps: list[tuple[str, str, int]]) -> None:
    store = ResponseStore(4, 100)
    for what, name, size in steps:
        if what == "p":
            store.put(entry(name, previous=chr(ord(name) - 1) if name != "a" else None), size)
        elif what == "g":
            store.get(name, "me")
        elif what == "c":
            store.conversation(name, "me")
        else:
            store.delete(name, "me")
        store.check_integrity()


@pytest.mark.parametrize("size", [1, 7])
def test_storing_again_replaces(size: int) -> None:
    store = ResponseStore(4, 100)
    store.put(entry("a"), 50)
    store.put(entry("a"), size)
    assert (len(store), store.num_bytes) == (1, size)
