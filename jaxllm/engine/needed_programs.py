"""Lets requests wait for programs that only they need, while threads compile these and the others run. Does not import JAX."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from jaxllm.engine.executor import Executor
from jaxllm.engine.preparations import Preparation
from jaxllm.foreseen import Foreseen, Needs
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.interface import AnyScheduler


class NeededPrograms(Preparation):
    """The programs that requests of an engine core wait for. A request fits once its programs are there; others overtake it. The threads
    that make programs are the executor's."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._waiting: dict[Request, Foreseen] = {}
        """Requests whose programs are missing."""
        self._limiting: dict[Request, Foreseen] = {}
        """Requests whose items only smaller steps can compute yet."""
        self._most_tokens: int | None = None
        """The limit of steps that the scheduler has."""
        self._told: set[Future[Any]] = set()
        """Programs being made of which the log says that requests wait for them."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for programs."""
        return len(self._waiting)

    def admit(self, request: Request) -> None:
        """Have programs that the request needs made next. It waits for those without which its steps could not run."""
        spec = request.spec
        is_masked = spec.grammar is not None or spec.thinking_budget is not None
        found = self._executor.foresee(Needs(spec.sampling_params, spec.pooling_params, is_masked, spec.items))
        if found.limit is not None:
            self._limiting[request] = found
        if found.awaited:
            self._waiting[request] = found
            self._tell(found)

    def fits(self, request: Request) -> Fit:
        """Requests whose programs are there overtake those that wait."""
        return Fit.LATER if request in self._waiting else Fit.NOW

    def release(self, request: Request) -> None:
        """A request that starts over waits on."""
        if request.status.is_finished:
            self._waiting.pop(request, None)
            self._limiting.pop(request, None)

    def settle(self, scheduler: AnyScheduler) -> list[EngineCoreOutput]:
        """Let the requests run whose programs were made. Returns the outputs of those whose programs cannot be compiled."""
        if self._limiting or self._most_tokens is not None:
            self._limit_steps(scheduler)
        if not self._waiting:
            return []
        outputs: list[EngineCoreOutput] = []
        for request, found in list(self._waiting.items()):
            failed = {name: error for name, job in found.awaited.items() if job.done() and (error := job.exception())}
            if failed:
                name, error = next(iter(failed.items()))
                # The log has the error itself.
                message = (
                    f"a program that the request needs cannot be compiled ({name}: {type(error).__name__}); try again later"
                )
                outputs += scheduler.fail_requests([request.request_id], ErrorKind.INTERNAL, message)
            elif all(job.done() for job in found.awaited.values()):
                del self._waiting[request]
        self._told = {job for job in self._told if not job.done()}
        return outputs

    def _limit_steps(self, scheduler: AnyScheduler) -> None:
        """Have no steps planned for which the program with items is still missing."""
        limits = {request: found.limit for request, found in self._limiting.items() if found.limit is not None}
        self._limiting = {request: self._limiting[request] for request, limit in limits.items() if not limit.until.done()}
        most = min((limits[request].num_tokens for request in self._limiting), default=None)
        if most != self._most_tokens:
            self._most_tokens = most
            scheduler.limit_tokens(most)

    def _tell(self, found: Foreseen) -> None:
        new = {name: job for name, job in found.awaited.items() if job not in self._told}
        if new:
            self._told.update(new.values())
            logger.info("requests wait until these programs are compiled, while others run: %s", ", ".join(new))

    def jobs(self) -> Sequence[Future[Any]]:
        return [job for found in self._waiting.values() for job in found.awaited.values()]

    def check_integrity(self) -> None:
        assert not self._waiting and not self._limiting, "a request that ended waits for programs"
