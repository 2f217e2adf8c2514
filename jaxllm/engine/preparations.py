"""Preparations that requests wait for before they are admitted, made concurrently with the step loop. Does not import JAX."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import Request
from jaxllm.scheduler.admission import AdmissionRoom
from jaxllm.scheduler.interface import AnyScheduler


class Preparation(AdmissionRoom, Protocol):
    """Prepares what some requests need: grammars, adapters, programs. The step loop's thread calls all methods."""

    def bind(self, request: Request) -> None:
        """A request is about to be queued. Raises InvalidRequestError if it can never get what it needs; changes nothing else."""
        return

    def admit(self, request: Request) -> None:
        """A request was queued: begin to prepare what it needs."""

    def settle(self, scheduler: AnyScheduler) -> list[EngineCoreOutput]:
        """Process what is prepared. Called once a step. Returns the outputs of requests that failed."""

    def jobs(self) -> Sequence[Future[Any]]:
        """Futures of the work of threads for requests that wait. Some may be done that `settle` has not processed."""

    def forget_slots(self) -> None:
        """Drop what the device had of it: its memory was released."""
        return

    def check_integrity(self) -> None:
        """Raise AssertionError if something is held without need. Called without unfinished requests."""
        return

    def shutdown(self) -> None:
        """End the threads. May be called again."""
        return
