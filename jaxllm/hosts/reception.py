"""The port of host 0: accepts connections, and decides which of them are hosts that may take part. Does not import JAX."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxllm.config import ParallelOptions
from jaxllm.errors import ConfigError
from jaxllm.framing import WireError
from jaxllm.hosts import handshake
from jaxllm.hosts.connection import Connection
from jaxllm.hosts.handshake import Challenge, Hello, Refused, Welcome
from jaxllm.hosts.identity import difference
from jaxllm.log import logger

MAX_STRANGERS = 64
"""Connections above one a host that may wait to say hello. Beyond them, the oldest is closed: a host says hello at once."""
POLL_SECONDS = 0.25
_TELL_SECONDS = 10.0


class Started(Protocol):
    """The launcher of the other hosts."""

    def fault(self) -> str | None:
        """Why one of them ended before it connected; None if none did."""

    def end(self) -> None:
        """End them, if they have not ended by themselves."""


@dataclass(frozen=True)
class Arrival:
    """A host above 0 that was welcomed."""

    rank: int
    name: str
    connection: Connection

    def __str__(self) -> str:
        return f"host {self.rank} ({self.name}, {self.connection.peer})"


class Reception:
    """Accepts connections in a thread until it is closed, and waits for the Hello of each in a separate thread.

    `take` gets each host that is welcomed, and a ConfigError for each that may not take part, in one of these threads. `identity`: of this
    host. `started`: what started the other hosts, if that was not done by hand. Raises ConfigError if it cannot listen at the address and
    port of host 0.
    """

    def __init__(
        self,
        options: ParallelOptions,
        identity: Mapping[str, str],
        take: Callable[[Arrival | ConfigError], None],
        started: "Started | None" = None,
    ):
        self._options, self._identity, self._take, self._started = options, identity, take, started
        self._listening = _listen(options)
        self.address = str(self._listening.getsockname()[0])
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not said hello yet, the oldest first."""
        self.present: dict[int, Arrival] = {}
        """Hosts that were welcomed and have not left, by rank."""
        self._refused = ""
        """Why a host without the token was refused last."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="accept-hosts", daemon=True)

    def open(self) -> None:
        """Accept connections from now on."""
        options = self._options
        self._deadline = time.monotonic() + options.distributed_timeout_seconds
        self._next_told = time.monotonic() + _TELL_SECONDS
        logger.info(
            "host 0 of %d waits for the others at %s, port %d", options.nnodes, options.master_addr, options.master_port
        )
        self._listening.settimeout(POLL_SECONDS)
        self._thread.start()

    def has_all(self) -> bool:
        """Whether all hosts are there. Raises ConfigError if one does not come in time, or failed before."""
        options = self._options
        if not (missing := [rank for rank in range(1, options.nnodes) if rank not in self.present]):
            return True
        if self._started is not None and (fault := self._started.fault()) is not None:
            raise ConfigError(fault)
        names = ", ".join(map(str, missing))
        if time.monotonic() > self._deadline:
            raise ConfigError(
                f"these hosts did not connect to {options.master_addr}, port {options.master_port}, within "
                f"{options.distributed_timeout_seconds} s (--distributed-timeout-seconds): {names}; start each with the same options and "
                f"its --node-rank, and see that it reaches this address{self._refused}"
            )
        if time.monotonic() > self._next_told:
            self._next_told += _TELL_SECONDS
            logger.info("host 0 still waits for: %s", names)
        return False

    def leave(self, rank: int) -> None:
        """A host was lost: another may take its rank."""
        with self._lock:
            self.present.pop(rank, None)

    def close(self) -> None:
        """Stop to listen. Connections of hosts that were taken stay open. May be called again."""
        with self._lock:
            self._is_closed = True
            strangers = list(self._strangers)
        for stream in (self._listening, *strangers):
            _shut_down(stream)  # wakes the thread that waits for it
        if self._thread.is_alive():
            self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                stream, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:  # there are too many open files, say
                if not self._is_closed:
                    logger.warning("a connection could not be accepted: %s", error)
                    time.sleep(POLL_SECONDS)
                continue
            with self._lock:
                self._strangers[stream] = None
                if len(self._strangers) > self._options.nnodes + MAX_STRANGERS:
                    _shut_down(next(iter(self._strangers)))
            threading.Thread(target=self._greet, args=(stream, str(address[0])), name="greet-host", daemon=True).start()

    def _greet(self, stream: socket.socket, peer: str) -> None:
        nonce = handshake.new_nonce()
        try:
            connection = Connection(stream, handshake.FROM_OTHER)
            connection.limit(handshake.FIRST_SECONDS)
            connection.send(Challenge(nonce))
            hello = connection.receive(handshake.FIRST_SECONDS)
            self._admit(connection, hello, nonce)
        except WireError as error:
            if not self._is_closed:
                logger.warning("a connection from %s is no host's: %s", peer, error)
            stream.close()
        finally:
            with self._lock:
                self._strangers.pop(stream, None)

    def _admit(self, connection: Connection, hello: Hello, nonce: bytes) -> None:
        """Welcome the host at the other end, or refuse it. Raises WireError if it is none."""
        if hello.protocol != handshake.PROTOCOL:
            fault = (
                f"a host at {connection.peer} speaks version {hello.protocol} of the hosts' protocol, host 0 version "
                f"{handshake.PROTOCOL}; install the same jaxllm"
            )
            return self._refuse(connection, fault, is_proven=False)
        found = handshake.introduction_of(hello)
        arrival = Arrival(found.rank, found.name, connection)
        if not handshake.is_proven(found.proof, "host", nonce):
            fault = f"{arrival} has another token than host 0, or one of them has none; set the same JAXLLM_HOSTS_TOKEN on all hosts"
            return self._refuse(connection, fault, is_proven=False)
        with self._lock:
            if self._is_closed:
                return connection.close()
            if (reason := self._fault(arrival, found.identity)) is None:
                self._strangers.pop(connection.stream, None)  # `close` and `_accept` shut down strangers
                connection.send(Welcome(handshake.proof("host 0", found.nonce)))
                self.present[arrival.rank] = arrival
                return self._take(arrival)
        return self._refuse(connection, reason, is_proven=True)

    def _fault(self, arrival: Arrival, identity: Mapping[str, str]) -> str | None:
        """Why a host may not take part."""
        num_hosts = self._options.nnodes
        if (differs := difference(["host 0", f"host {arrival.rank}"], [self._identity, identity])) is not None:
            return f"{arrival} differs from host 0: {differs}; start all hosts with the same versions, options and model"
        if not 1 <= arrival.rank < num_hosts:
            return f"{arrival} has node_rank {arrival.rank}, there are 1 to {num_hosts - 1}"
        if (other := self.present.get(arrival.rank)) is not None:
            return f"two hosts have node_rank {arrival.rank}: {other} and {arrival}; give each its own"
        return None

    def _refuse(self, connection: Connection, fault: str, *, is_proven: bool) -> None:
        logger.error("%s", fault)
        with contextlib.suppress(WireError):
            connection.send(Refused(fault))
        connection.close()
        if handshake.token() and not is_proven:  # it must not end the start of hosts that have the token
            self._refused = f"; {fault}"
            return
        with self._lock:
            if not self._is_closed:
                self._take(ConfigError(fault))


def _listen(options: ParallelOptions) -> socket.socket:
    """A socket at the address and the port of host 0, and at no other. Raises ConfigError if it cannot listen there."""
    where = options.master_addr, options.master_port
    try:
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(where, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {where[1]} of {where[0]} is taken by another program; choose another --master-port, on all hosts"
            ) from error
        raise ConfigError(
            f"host 0 cannot listen at master_addr {where[0]}, port {where[1]} ({error.strerror or error}); give an address of this "
            "machine that the other hosts reach"
        ) from error


def free_port(address: str) -> int:
    """A free port at an address of this machine."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def _shut_down(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has done it
        stream.shutdown(socket.SHUT_RDWR)
