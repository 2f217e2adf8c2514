"""Pause: the engine accepts requests but computes none until it resumes, e.g. while its weights or memory are changed."""

from collections.abc import Iterable
from itertools import chain
from typing import get_args

from jaxllm.config import SchedulerOptions
from jaxllm.core_interface import PauseMode
from jaxllm.errors import EngineError, InvalidRequestError, OverloadedError
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler.limits import excess_items

MODES: tuple[str, ...] = get_args(PauseMode)


class Pause:
    """Whether an engine is paused, and the requests that arrived during the pause, as far as the options let them wait."""

    def __init__(self, options: SchedulerOptions):
        self._options = options
        self.mode: PauseMode | None = None
        """How unfinished requests are treated: aborted, run to completion, or suspended. None: not paused."""
        self.held: dict[str, EngineCoreRequest] = {}

    def begin(self, mode: PauseMode) -> None:
        """Hold back requests from now on. Raises InvalidRequestError for an unknown mode."""
        if mode not in MODES:
            raise InvalidRequestError(f"mode is {mode!r}, must be one of {', '.join(MODES)}", "mode")
        self.mode = mode

    def hold(self, request: EngineCoreRequest, unfinished: Iterable[EngineCoreRequest]) -> None:
        """Keep a request until the engine resumes. Raises OverloadedError if too many are kept, or if they, with those that had come before
        the pause and are unfinished, have too many bytes of items."""
        most = self._options.max_num_queued_reqs
        if most is not None and len(self.held) >= most:
            raise OverloadedError(f"the engine is paused and {len(self.held)} requests wait already", 1, "max_num_queued_reqs")
        excess = excess_items(request, chain(unfinished, self.held.values()), self._options.max_queued_image_gb)
        if excess is not None:
            raise OverloadedError(f"the engine is paused, and {excess}", 1, "max_queued_image_gb")
        if request.request_id in self.held:
            raise EngineError("there is a request of this id already")
        self.held[request.request_id] = request

    def end(self) -> list[EngineCoreRequest]:
        """End the pause. Returns the held requests in order of arrival."""
        held, self.mode, self.held = list(self.held.values()), None, {}
        return held
