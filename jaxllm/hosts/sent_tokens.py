"""Sends the tokens that the last stage of a pipeline samples, which host 0 has, to the host that has the first stage."""

from concurrent.futures import Future
from functools import partial

from jaxllm.engine.executor import PendingStep
from jaxllm.errors import EngineDeadError
from jaxllm.hosts.leader import Leader
from jaxllm.hosts.wire import SampledTokens
from jaxllm.runner.pending import StepInFlight
from jaxllm.worker_thread import WorkerThread


class SentTokens:
    """A thread that reads the tokens of each step and sends them.

    The thread that launches steps cannot do so: a launch may wait for the device, which waits for the first stage, which waits for tokens.
    """

    def __init__(self, leader: Leader):
        self._leader = leader
        self._thread = WorkerThread("send-tokens")
        self._last: Future[None] | None = None

    def send(self, step: PendingStep) -> None:
        """Send the tokens of a step, after those of the steps before, once the device has sampled them. Returns at once."""
        self._last = self._thread.submit(partial(self._send, step))

    def wait(self) -> None:
        """Wait until all were sent. Raises EngineDeadError if a host is lost."""
        if self._last is not None:
            self._leader.wait_for(self._last)

    def _send(self, step: PendingStep) -> None:
        assert isinstance(step, StepInFlight)
        try:
            self._leader.send(SampledTokens(step.tokens()))
        except EngineDeadError:
            pass  # all hosts end
        except Exception as error:
            self._leader.fail(f"a step failed on host 0: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def shutdown(self) -> None:
        """End the thread after what it does now."""
        self._thread.abandon()
