"""Messages about LoRA adapters between API servers and the engine core."""

from typing import Literal

import msgspec

from jaxllm.errors import InvalidRequestError

MAX_NAME_LENGTH = 256


class AdapterInfo(msgspec.Struct, frozen=True, tag="adapter"):
    """An adapter that requests may name."""

    name: str
    path: str
    """The directory that it was read from."""
    rank: int
    num_bytes: int
    """Memory that it takes on the device, all of them together, and the same on the host."""
    is_pinned: bool
    where: Literal["device", "host", "disk"]
    """The fastest memory that holds it now."""
    cache_key: str = ""
    """Key of the adapter in the hashes of its cached blocks."""


class AdapterState(msgspec.Struct, frozen=True, tag="adapter_state"):
    """How far the loading of an adapter has got."""

    state: Literal["loading", "ready", "failed"]
    error: str = ""
    """Why it failed."""


def check_name(name: object, param: str) -> None:
    """Raise InvalidRequestError unless a name of an adapter is a printable text of bounded length."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        given = f"a {type(name).__name__}" if not isinstance(name, str) else repr(name[:60])
        raise InvalidRequestError(f"{param} is {given}, must be a printable text of 1 to {MAX_NAME_LENGTH} characters", param)
