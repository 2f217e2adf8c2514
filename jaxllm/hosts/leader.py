"""Host 0's side of the connections: waits for the other hosts, sends them calls, and notices when one is lost."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from jaxllm import framing
from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.executor import Executor
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError
from jaxllm.framing import SILENCE_SECONDS, WireError
from jaxllm.hosts import identity, process_group, wire
from jaxllm.hosts.connection import Connection
from jaxllm.hosts.reception import POLL_SECONDS, Arrival, Reception, Started, free_port
from jaxllm.hosts.results import ExpectedResults
from jaxllm.hosts.wire import AllFacts, Begin, Done, End, Facts, Failed, Result
from jaxllm.log import logger

START_SILENCE_SECONDS = 60.0
"""`SILENCE_SECONDS` during the start."""
GRACE_SECONDS = 2.0
"""After which the process ends if its main thread waits for a device that waits for a lost host."""
NOTICE_SECONDS = 1.0
"""A collective fails when a host is lost, perhaps before its connection does."""


@dataclass
class _Host:
    """A follower."""

    arrival: Arrival
    facts: "queue.SimpleQueue[Facts | None]" = field(default_factory=queue.SimpleQueue)
    results: ExpectedResults = field(default_factory=ExpectedResults)

    @property
    def connection(self) -> Connection:
        return self.arrival.connection

    def __str__(self) -> str:
        return str(self.arrival)


@dataclass
class _Call:
    """A call that every follower answers."""

    num_open: int
    future: "Future[None]" = field(default_factory=Future)


class Leader:
    """The other hosts of an engine, as host 0 sees them."""

    def __init__(self, config: EngineConfig, hosts: list[_Host], started: "Started | None" = None):
        self.config = config
        self._hosts, self._started = hosts, started
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._has_ended = False
        self._is_inside = False
        """Whether the caller's thread is in `waiting`."""
        self.lost: Future[None] = Future()
        """Gets an EngineDeadError when a host is lost."""

    @classmethod
    def of(cls, config: EngineConfig, found: Mapping[str, str], started: "Started | None" = None) -> "Leader":
        """Listen and wait for all hosts, which someone else or `started` has started. Raises ConfigError if one does not come in time,
        or differs from this one."""
        options = config.parallel
        hosts, address = _gather(config, found, started)
        port = free_port(address)
        coordinator = f"{f'[{address}]' if ':' in address else address}:{port}"
        leader = cls(config, hosts, started)
        leader._begin(Begin(port))
        with leader.reported():
            process_group.join(coordinator, options.nnodes, 0, timeout_seconds=options.distributed_timeout_seconds)
        return leader

    def _begin(self, begin: Begin) -> None:
        for host in self._hosts:
            host.connection.limit(START_SILENCE_SECONDS)
            host.connection.send(begin)
            host.connection.send_beats()
            threading.Thread(target=self._listen_to, args=(host,), name=f"host-{host.arrival.rank}", daemon=True).start()

    # The start

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """An error in this block ends the other hosts too, with its text. If one is lost meanwhile, this process ends."""
        try:
            with self.waiting():
                yield
        except BaseException as error:
            self.end(f"host 0 could not start: {type(error).__name__}" if not isinstance(error, JaxLLMError) else str(error))
            raise

    def agree(self, phase: str, facts: dict[str, Any]) -> None:
        """Wait until all hosts are in this phase. Raises ConfigError, on all of them, if their facts differ."""
        found = self.exchange(phase, facts)
        if (differs := identity.difference([f"host {rank}" for rank in range(len(found))], found)) is not None:
            raise ConfigError(f"the hosts differ: {differs}")

    def exchange(self, phase: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """The facts of all hosts in this phase, by rank."""
        found = [facts]
        for host in self._hosts:
            answer = host.facts.get()
            self.check()
            assert answer is not None and answer.phase == phase, "hosts are in different phases of the start"
            found.append(answer.facts)
        self.send(AllFacts(phase, found))
        return found

    def executor(self, own: Executor) -> Executor:
        """An executor on all hosts, of that on this one."""
        from jaxllm.hosts.executor import HostsExecutor

        return HostsExecutor(own, self)

    def started(self) -> None:
        """The start is over: lost hosts are noticed sooner."""
        for host in self._hosts:
            host.connection.limit(SILENCE_SECONDS)

    # Calls

    def send(self, message: Any) -> None:
        """Send a message to all hosts. Raises EngineDeadError if one is lost."""
        self.check()
        frame = framing.frame(message, wire.MAX_MESSAGE_BYTES)
        for host in self._hosts:
            try:
                host.connection.send_frame(frame)
            except WireError as error:
                self._lose(f"{host} is lost: {error}")
        self.check()

    def new_call(self) -> "tuple[int, Future[None]]":
        """A number for a message that every host answers with Done, and what its answers complete."""
        with self._lock:
            self._num_calls += 1
            call = self._calls[self._num_calls] = _Call(len(self._hosts))
        return self._num_calls, call.future

    def expect_results(self) -> "list[Future[bytes]]":
        """Expect the results of every host's data-parallel ranks, of the call that is sent next."""
        return [host.results.expect() for host in self._hosts]

    def waiting(self) -> "_Waiting":
        """A block in which the caller may wait for devices. If it does so for a lost host, the process ends."""
        return _Waiting(self)

    def wait_for(self, future: "Future[Any]") -> None:
        """Wait for it, or raise EngineDeadError when a host is lost."""
        if not future.done():
            wait((future, self.lost), return_when=FIRST_COMPLETED)
        if not future.done():
            self.check()

    def check(self) -> None:
        """Raise EngineDeadError if a host is lost."""
        if self.lost.done():
            raise EngineDeadError(str(self.lost.exception()))

    def tell_when_lost(self, tell: Callable[[], None]) -> None:
        """Make a call, in any thread, when a host is lost; at once if one is."""
        self.lost.add_done_callback(lambda _: tell())

    def fail(self, reason: str) -> None:
        """This host cannot go on with the others: end them, as if one were lost. If one is, that was the reason."""
        wait((self.lost,), timeout=NOTICE_SECONDS)
        self._lose(reason)

    def end(self, reason: str = "") -> None:
        """Tell all hosts to end, and close the connections. May be called again."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._tell(End(reason))
        if not reason and not self.lost.done():
            process_group.leave()
        for host in self._hosts:
            host.connection.close()
        if self._started is not None:
            self._started.end()

    # In threads

    def _listen_to(self, host: _Host) -> None:
        try:
            while True:
                message = host.connection.receive()
                if isinstance(message, Facts):
                    host.facts.put(message)
                elif isinstance(message, Done):
                    self._answered(host, message)
                elif isinstance(message, Result):
                    host.results.take(message)
                elif isinstance(message, Failed):
                    self._lose(f"{host} failed: {message.fault.message}")
                    return
        except WireError as error:
            self._lose(f"{host} is lost: {error}")
        except Exception:  # no other thread would notice that its messages are no longer read
            logger.exception("what %s sent could not be taken", host)
            self._lose(f"{host} is lost: what it sent could not be taken; the log says more")

    def _answered(self, host: _Host, done: Done) -> None:
        with self._lock:
            call = self._calls.get(done.number)
            if call is None:
                return
            call.num_open -= 1
            is_first_fault = done.fault is not None and not call.future.done()
            if not call.num_open:
                del self._calls[done.number]
        if is_first_fault and done.fault is not None:
            fault = messages.error_of(done.fault)
            fault.args = (f"{host}: {fault}",)
            call.future.set_exception(fault)
        elif not call.num_open and not call.future.done():
            call.future.set_result(None)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._has_ended or self.lost.done():
                return
            logger.error("%s; the engine ends on all hosts", reason)  # first: this process may end as soon as others know
            self.lost.set_exception(EngineDeadError(reason))
        threading.Thread(target=self._end_if_stuck, args=(reason,), name="end-if-stuck", daemon=True).start()
        for host in self._hosts:
            host.facts.put(None)
        self._tell(End(reason))

    def _end_if_stuck(self, reason: str) -> None:
        time.sleep(GRACE_SECONDS)
        if self._is_inside:
            logger.error("this process waits for a lost host, so it ends (%s)", reason)
            process_group.end_process(process_group.EXIT_FAILED)
        process_group.end_with_main_thread()

    def _tell(self, message: Any) -> None:
        """Send it to those that can still be reached, without waiting for those that cannot."""
        threads = [threading.Thread(target=_try_to_send, args=(host, message), daemon=True) for host in self._hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.5)


class _Waiting:
    """See Leader.waiting. A class, because a generator's would cost more in every step."""

    def __init__(self, leader: Leader):
        self._leader = leader

    def __enter__(self) -> None:
        self._leader._is_inside = True

    def __exit__(self, *_: object) -> None:
        self._leader._is_inside = False


def _try_to_send(host: _Host, message: Any) -> None:
    with contextlib.suppress(WireError):
        host.connection.send(message)


def _gather(config: EngineConfig, found: Mapping[str, str], started: "Started | None") -> tuple[list[_Host], str]:
    """Wait for all other hosts, by rank. Also returns this host's address. Raises ConfigError if one does not come in time, or may not
    take part."""
    arrivals: queue.SimpleQueue[Arrival | ConfigError] = queue.SimpleQueue()
    reception = Reception(config.parallel, found, arrivals.put, started)
    try:
        reception.open()
        while not reception.has_all():
            with contextlib.suppress(queue.Empty):
                if isinstance(arrival := arrivals.get(timeout=POLL_SECONDS), ConfigError):
                    raise arrival
                logger.info("%s is there", arrival)
    except BaseException as error:
        reception.close()
        for arrival in reception.present.values():
            with contextlib.suppress(WireError):
                arrival.connection.send(End(str(error)))
            arrival.connection.close()
        raise
    reception.close()
    hosts = [_Host(arrival) for _, arrival in sorted(reception.present.items())]
    for host in hosts:
        host.connection.accept(wire.FROM_FOLLOWER)
    return hosts, reception.address
