"""Where, when and for whom the engine computes what a task asks for, e.g. one HTTP request."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Set by whoever answers for the task; None: as the requests themselves say."""

    data_parallel_rank: int | None = None
    """The replica of requests that name none."""
    session_id: str | None = None
    """The session of requests that name none."""
    priority: int | None = None
    """Replaces the requests' own."""
    client: str = ""
    """Who asks: see `EngineCoreRequest.client`."""


_current: ContextVar[Placement | None] = ContextVar("placement", default=None)
set_placement, reset_placement = _current.set, _current.reset


def placement() -> Placement:
    """That of this task."""
    return _current.get() or Placement()
