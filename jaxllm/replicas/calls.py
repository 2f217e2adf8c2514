"""Control calls to all replicas: how their answers become one, and the calls that undo one that failed on some of them."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.adapters import AdapterInfo, AdapterState


def _none(answers: Sequence[Any]) -> None:
    return None


def _state(answers: Sequence[AdapterState]) -> AdapterState:
    """Failed if one has failed, ready when all are."""
    by_state = {answer.state: answer for answer in reversed(answers)}
    return by_state.get("failed") or by_state.get("loading") or answers[0]


def _in_all(answers: Sequence[Sequence[AdapterInfo]]) -> list[AdapterInfo]:
    """Adapters that every replica has, as the first describes them."""
    names = set.intersection(*({info.name for info in answer} for answer in answers))
    return [info for info in answers[0] if info.name in names]


def _added(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens of experts: replicas have the same ones."""
    by_layer = zip(*(answer["tokens"] for answer in answers), strict=True)
    return {**answers[0], "tokens": [list(map(sum, zip(*tokens, strict=True))) for tokens in by_layer]}


COMBINE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "reset_prefix_cache": all,
    "sleep": _none,
    "wake_up": _none,
    "is_sleeping": any,
    "start_profile": _none,
    "stop_profile": _none,
    "expert_load": _added,
    "finish_compiling": _none,
    "check_integrity": _none,
    "add_adapter": list,
    "adapter_state": _state,
    "remove_adapter": any,
    "list_adapters": _in_all,
    "pin_adapter": _none,
    "pause": _none,
    "resume": _none,
    "is_paused": all,
    "is_draining": any,
    "hold_requests": _none,
    "release_requests": _none,
}
"""How the answers of all replicas become one, by the name of the call."""

UNDO: dict[str, Callable[..., tuple[Any, ...]]] = {
    "sleep": lambda *_: ("wake_up",),
    "start_profile": lambda: ("stop_profile",),
    "add_adapter": lambda name, *_: ("remove_adapter", name),
    "pause": lambda *_: ("resume",),
}
"""The call that takes another back, where that worked and the same call to another replica failed."""
