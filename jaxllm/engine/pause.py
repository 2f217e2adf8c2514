"""Pause: the engine accepts requests but computes none until it resumes, e.g. while its weights or memory are changed."""

from typing import get_args

from jaxllm.core_interface import PauseMode
from jaxllm.errors import EngineError, InvalidRequestError, OverloadedError
from jaxllm.request import EngineCoreRequest

MODES: tuple[str, ...] = get_args(PauseMode)


class Pause:
    """Whether an engine is paused, and the requests that arrived during the pause, at most `max_held` (None: no limit)."""

    def __init__(self, max_held: int | None):
        self._max_held = max_held
        self.mode: PauseMode | None = None
        """How unfinished requests are treated: aborted, run to completion, or suspended. None: not paused."""
        self.held: dict[str, EngineCoreRequest] = {}

    def begin(self, mode: PauseMode) -> None:
        """Hold back requests from now on. Raises InvalidRequestError for an unknown mode."""
        if mode not in MODES:
            raise InvalidRequestError(f"mode is {mode!r}, must be one of {', '.join(MODES)}", "mode")
        self.mode = mode

    def hold(self, request: EngineCoreRequest) -> None:
        """Keep a request until the engine resumes. Raises OverloadedError if too many are kept."""
        if self._max_held is not None and len(self.held) >= self._max_held:
            raise OverloadedError(f"the engine is paused and {len(self.held)} requests wait already", 1, "max_num_queued_reqs")
        if request.request_id in self.held:
            raise EngineError("there is a request of this id already")
        self.held[request.request_id] = request

    def end(self) -> list[EngineCoreRequest]:
        """End the pause. Returns the held requests in order of arrival."""
        held, self.mode, self.held = list(self.held.values()), None, {}
        return held
