"""A host above 0: runs what host 0 sends, on its own devices, until host 0 ends or is lost."""

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.executor import Executor, PendingStep, TokenTaker
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.foreseen import Needs
from jaxllm.framing import SILENCE_SECONDS, WireError
from jaxllm.hosts import handshake, identity, process_group, wire
from jaxllm.hosts.connection import Connection
from jaxllm.hosts.leader import NOTICE_SECONDS, START_SILENCE_SECONDS
from jaxllm.hosts.relay import Relay
from jaxllm.hosts.results import SentResults
from jaxllm.hosts.wire import (
    AllFacts,
    Begin,
    Dispatch,
    DispatchRanks,
    Do,
    Done,
    End,
    Facts,
    Failed,
    Piece,
    Sample,
    SampledTokens,
)
from jaxllm.log import logger
from jaxllm.options.hosts import has_ranks_on_hosts
from jaxllm.ranks_plan import RanksPlan
from jaxllm.scheduler_output import SchedulerOutput

CALLS = ("start_over", "memory")
"""Methods of an executor that host 0 may call."""
_MAX_IN_FLIGHT = 3
"""More than host 0 has, but for one more for each stage."""


class Member:
    """A follower's connection to host 0."""

    def __init__(self, config: EngineConfig, connection: Connection, rank: int):
        self.config = config
        self._connection, self._rank = connection, rank
        self._has_ended = False
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Messages for the thread that runs them, and errors that end it."""

    @classmethod
    def of(cls, config: EngineConfig, found: Mapping[str, str]) -> "Member":
        """Connect to host 0 and wait for all others. Raises ConfigError if host 0 is not there in time, or refuses this host."""
        options = config.parallel
        deadline = time.monotonic() + options.distributed_timeout_seconds
        connection = handshake.connect(options, found)
        connection.accept(wire.FROM_HOST_0)
        try:
            answer = connection.receive(max(1.0, deadline - time.monotonic()))
        except WireError as error:
            raise ConfigError(f"host 0 ended before all hosts were there: {error}") from error
        if not isinstance(answer, Begin):
            raise ConfigError(f"host 0 ends the engine: {answer.reason if isinstance(answer, End) else 'it sent no Begin'}")
        connection.limit(START_SILENCE_SECONDS)
        member = cls(config, connection, options.node_rank)
        threading.Thread(target=member._listen, name="host-0", daemon=True).start()
        connection.send_beats()
        with member.reported():
            timeout = options.distributed_timeout_seconds
            address = Relay(connection.peer, answer.coordinator_port).address
            process_group.join(address, options.nnodes, options.node_rank, timeout_seconds=timeout)
        return member

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """An error in this block is sent to host 0, which ends."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, JaxLLMError):
                logger.exception("host %d failed", self._rank)
            self._has_ended = True
            with contextlib.suppress(WireError):
                self._connection.send(Failed(messages.fault_of(error)))
            raise

    def agree(self, phase: str, facts: dict[str, Any]) -> None:
        """Wait until all hosts are in this phase. Raises ConfigError, on all of them, if their facts differ."""
        found = self.exchange(phase, facts)
        if (differs := identity.difference([f"host {rank}" for rank in range(len(found))], found)) is not None:
            raise ConfigError(f"the hosts differ: {differs}")

    def exchange(self, phase: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """The facts of all hosts in this phase, by rank."""
        self._connection.send(Facts(phase, facts))
        answer = self.calls.get()
        assert isinstance(answer, AllFacts) and answer.phase == phase, "hosts are in different phases of the start"
        return answer.facts

    def executor(self, own: Executor) -> Executor:
        """The executor of this host's devices."""
        return own

    def started(self) -> None:
        """The start is over: that host 0 is lost is noticed sooner."""
        self._connection.limit(SILENCE_SECONDS)

    def send(self, message: Any) -> None:
        """Send an answer to host 0."""
        with contextlib.suppress(WireError):  # the other thread ends the process
            self._connection.send(message)

    def end(self) -> None:
        """Leave the other hosts after `End`."""
        self._has_ended = True
        process_group.leave()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if isinstance(message, End) and message.reason:
                    self._end_at_once(f"host 0 ends the engine: {message.reason}")
                self.calls.put(message)
                if isinstance(message, End):
                    self._has_ended = True
                    return
        except WireError as error:
            if not self._has_ended:
                self._end_at_once(f"host 0 is lost: {error}")

    def _end_at_once(self, reason: str) -> None:
        """The main thread may wait for a device that waits for other hosts."""
        logger.error("%s; host %d ends", reason, self._rank)
        process_group.end_process(process_group.EXIT_FAILED)


class Follower:
    """Runs the calls of host 0."""

    def __init__(self, executor: Executor, member: Member):
        self._executor, self._member = executor, member
        options = member.config.parallel
        has_ranks = has_ranks_on_hosts(options.nnodes, options.num_ranks)
        self._results = SentResults(member.send, member.calls.put) if has_ranks else None
        self._in_flight: deque[PendingStep | Future[None]] = deque()
        """Steps that were sampled, or what sends their results."""
        self._most_in_flight = _MAX_IN_FLIGHT + options.pipeline_parallel_size
        self._unsampled: PendingStep | None = None
        self._arriving: dict[int, np.ndarray] = {}
        """Arrays that arrive in pieces, by handle."""

    def run(self) -> None:
        """Until host 0 ends the engine."""
        with self._member.reported():
            try:
                while not isinstance(message := self._member.calls.get(), End):
                    self._do(message)
                self._forget()
            except Exception:
                time.sleep(NOTICE_SECONDS)  # if another host is lost, that was the reason, and this process ends meanwhile
                raise

    def _do(self, message: Any) -> None:
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Dispatch):
            self._dispatch(message.plan)
        elif isinstance(message, DispatchRanks):
            self._dispatch(replace(RanksPlan.of(message.ranks, message.step_id), ops=message.ops))
        elif isinstance(message, Sample):
            self._sample(message)
        elif isinstance(message, SampledTokens):
            assert isinstance(self._executor, TokenTaker), "these steps need no tokens"
            self._executor.take_tokens(message.tokens)
        elif isinstance(message, Do):
            self._call(message)
        elif isinstance(message, Piece):
            self._take(message)

    def _dispatch(self, plan: SchedulerOutput) -> None:
        for new in plan.new_requests:
            if new.sampling_params.seed is None:
                new.sampling_params.seed = -1  # to callers -1 means none; here it is a seed
            self._executor.foresee(Needs(new.sampling_params, new.pooling_params, new.is_masked, new.items))
        # Reading results changes rows; host 0 reads a step before it dispatches the next but so many.
        while len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft().result()
        step = self._executor.dispatch(plan)
        if plan.masked_request_ids and step.mask_TW is not None:
            self._unsampled = step
        else:  # if it needs masks, the stage that samples is on other hosts
            self._in_flight.append(self._read(step))

    def _sample(self, message: Sample) -> None:
        step, self._unsampled = self._unsampled, None
        if step is None:
            return  # as above
        assert step.mask_TW is not None, "no step waits for masks"
        step.mask_TW[: message.num_rows] = np.frombuffer(message.mask, np.int32).reshape(message.num_rows, -1)
        step.sample()
        self._in_flight.append(self._read(step))

    def _read(self, pending: PendingStep) -> "PendingStep | Future[None]":
        """Read it for host 0 if needed: host 0 has its own data-parallel ranks' results, and those that all hosts have."""
        return pending if self._results is None else self._results.send(pending)

    def _call(self, message: Do) -> None:
        self._forget()
        fault = None
        try:
            assert message.method in CALLS, "host 0 may not call this"
            getattr(self._executor, message.method)(*message.arguments)
        except Exception as error:
            logger.exception("%s failed", message.method)
            fault = messages.fault_of(error)
        self._member.send(Done(message.number, fault))

    def _forget(self) -> None:
        """Wait for the steps in flight, as host 0 has done."""
        while self._in_flight:
            self._in_flight.popleft().result()
        self._unsampled = None

    def _take(self, piece: Piece) -> None:
        if piece.start == 0:
            self._arriving[piece.handle] = np.zeros(piece.size, np.uint8)
        data = self._arriving[piece.handle]
        data[piece.start : piece.start + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
        if piece.start + len(piece.data) == piece.size:
            del self._arriving[piece.handle]
            # In a thread, so that steps need not wait for it. Host 0 names the handle in a plan once this was answered.
            threading.Thread(target=self._stage, args=(piece, data), name="stage", daemon=True).start()

    def _stage(self, piece: Piece, data: np.ndarray) -> None:
        fault = None
        try:
            self._executor.stage(piece.handle, data)
        except Exception as error:
            logger.exception("what host 0 stages cannot be sent to the device")
            fault = messages.fault_of(error)
        self._member.send(Done(piece.number, fault))


def follow(config: EngineConfig) -> None:
    """Be host `config.parallel.node_rank` of an engine, until host 0 ends it. Ends the process if host 0 is lost.

    Raises ConfigError, ModelLoadError, KernelCheckError or OutOfMemoryError if the start fails.
    """
    from jaxllm.engine.start import Started
    from jaxllm.progress import Progress
    from jaxllm.sampling.processors import load_processors
    from jaxllm.start_times import StartTimes

    processors = load_processors(config.model.logits_processors or ())
    started = Started.of(config, processors, Progress(), StartTimes())
    member = started.hosts
    assert isinstance(member, Member), "host 0 does not follow"
    logger.info("host %d of %d is ready", config.parallel.node_rank, config.parallel.nnodes)
    Follower(started.executor, member).run()
    started.executor.close()
    member.end()


def follow_until_told(config: EngineConfig) -> None:
    """`follow` in a separate process: SIGTERM ends this host, and with it the engine."""
    signal.signal(signal.SIGTERM, lambda number, _: process_group.end_process(128 + number))
    follow(config)
