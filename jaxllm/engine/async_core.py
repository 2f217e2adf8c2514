"""AsyncCore: an engine core that steps by itself, in a thread, in a process, or as several replicas; and the one in a thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxllm.core_interface import Core, SteppedCore
from jaxllm.errors import EngineDeadError, EngineError, JaxLLMError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.mailbox import Letter, post
from jaxllm.metrics.metric import Metric
from jaxllm.outputs import EngineCoreOutput
from jaxllm.scheduler_stats import SchedulerStats

ReplicaState = Literal["loading", "serving", "stalled", "joining", "draining", "down"]
"""stalled: it serves, but seems to hang; joining: it is ready, and gets what the others have; draining: it ends once its
requests have; down: it has ended, and is started again."""


@dataclass(frozen=True)
class ReplicaInfo:
    """State and statistics of one replica of the engine."""

    rank: int
    state: ReplicaState
    stats: SchedulerStats
    tick_seconds: float = 0.0
    """How long ago its loop last began a step or a call, or was known to wait for work."""
    detail: str = ""
    """Why it is stalled, or what else keeps it from its next step, such as a compilation."""
    role: str = ""
    """prefill or decode; empty: it does both."""


class CoreListener(Protocol):
    """Receives outputs and events of an AsyncCore. All methods are called where `AsyncCore.send` runs commands."""

    def take_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Outputs of a step."""

    def take_move(self, request_id: str, replica: int, transfer: KVTransfer | None) -> None:
        """An unfinished request, of which at most the first token was reported, is computed by this replica from now on. transfer: where
        blocks of its prompt come from."""

    def take_refusal(self, request_id: str, error: JaxLLMError) -> None:
        """The core rejected a request, which it was sent by `Core.add_request`."""

    def take_failure(self, error: EngineError, request_ids: Collection[str] | None = None) -> None:
        """These requests have ended with an error (None: all), and the core goes on."""

    def end(self) -> None:
        """The caller shuts the core down: end all requests as aborted ones. `die` follows."""

    def die(self, error: EngineDeadError) -> None:
        """The core cannot continue. The last call."""

    def own_metrics(self) -> list[Metric]:
        """Metrics that this listener itself has counted."""


class AsyncCore(Protocol):
    """A core that steps by itself and reports to a listener."""

    @property
    def core(self) -> Core:
        """The core to which requests are added, within commands."""

    @property
    def namespace(self) -> str:
        """Distinguishes the ids of this API server's requests from those of the core's other API servers."""

    @property
    def metrics_of_others(self) -> list[Metric]:
        """Metrics of the core's other API servers, as of the last exchange."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that stopped the core; None while it runs."""

    @property
    def is_stopping(self) -> bool:
        """Whether `shutdown` was called."""

    def start(self, listener: CoreListener) -> None:
        """Begin to report."""

    def send(self, command: Callable[[], None]) -> None:
        """Run a command where the listener is called, between two reports. Raises EngineDeadError."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run the core's method of this name, one of PauseCalls, between two steps and return its result."""

    def replicas(self) -> list[ReplicaInfo]:
        """The engines behind this core, usually one."""

    def hand_over(self, letters: list[Letter]) -> None:
        """Hand outputs to callers, from within a report or a command."""

    async def refresh_metrics(self) -> None:
        """Bring `metrics_of_others` up to date."""

    def shutdown(self) -> None:
        """End every request and release the core. May be called again."""


class ThreadCore:
    """A core whose steps run in a thread of their own, the only one that touches it."""

    namespace = ""

    def __init__(self, core: SteppedCore):
        self.core: SteppedCore = core
        self.metrics_of_others: list[Metric] = []
        self.dead_error: EngineDeadError | None = None
        self.is_stopping = False
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Held while a command is queued or the core is declared dead, so that no command is left unanswered."""
        self._thread = threading.Thread(target=self._loop, name="jaxllm-engine", daemon=True)
        core.run_between_steps(self._commands.put)

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        self._thread.start()

    def send(self, command: Callable[[], None]) -> None:
        with self._gate:
            check_alive(self)
            self._commands.put(command)

    async def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.core, name)
        if name == "finish_compiling":  # may take minutes, in which the thread goes on with its steps
            check_alive(self)
            return await asyncio.to_thread(method, *arguments)
        return await run_in(self, lambda: method(*arguments))

    def replicas(self) -> list[ReplicaInfo]:
        return [ReplicaInfo(0, "down" if self.dead_error is not None else "serving", self.core.stats())]

    def hand_over(self, letters: list[Letter]) -> None:
        post(letters)

    async def refresh_metrics(self) -> None:
        pass  # there are no other API servers

    def shutdown(self) -> None:
        with self._gate:
            self.is_stopping = True
            self._commands.put(lambda: None)  # wakes the thread
        self._thread.join()

    # In the thread

    def _loop(self) -> None:
        try:
            while self._obey_commands():
                if self.core.has_unfinished_requests():
                    self._step()
            self._listener.end()
            self._die(EngineDeadError("the engine was shut down"))
        except BaseException as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("the engine's thread failed")
                error = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            self._die(error)
        finally:
            self.core.shutdown()

    def _obey_commands(self) -> bool:
        """Run the commands queued since the last step; wait for one if the engine is idle. Returns False to stop."""
        is_idle = not self.core.has_unfinished_requests()
        while not self.is_stopping:
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                break
            command()
            is_idle = is_idle and not self.core.has_unfinished_requests()
        return not self.is_stopping

    def _step(self) -> None:
        try:
            outputs = self.core.step()
        except EngineDeadError:
            raise
        except EngineError as error:  # its requests have ended; the engine continues
            self._listener.take_failure(error)
            return
        except JaxLLMError:
            raise
        except Exception as error:
            self._listener.take_failure(EngineError(f"a step failed: {type(error).__name__}: {error}"))
            return
        self._listener.take_outputs(outputs)

    def _die(self, error: EngineDeadError) -> None:
        """Accept no more commands, and fail the waiting commands and all requests with the error."""
        with self._gate:
            self.dead_error = error
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
            except Exception:
                continue  # its caller was answered already
        self._listener.die(error)


def check_alive(core: AsyncCore) -> None:
    """Raise EngineDeadError if the core is dead or being shut down."""
    if core.dead_error is not None:
        raise EngineDeadError(str(core.dead_error)) from core.dead_error
    if core.is_stopping:
        raise EngineDeadError("the engine was shut down")


async def run_in(core: AsyncCore, call: Callable[[], Any]) -> Any:
    """Run a call as a command of the core and return its result."""
    future: Future[Any] = Future()

    def command() -> None:
        if not future.set_running_or_notify_cancel():
            return  # the caller cancelled
        try:
            future.set_result(call())
        except BaseException as error:  # reported to the caller
            future.set_exception(error)

    core.send(command)
    return future.result() if future.done() else await asyncio.wrap_future(future)
