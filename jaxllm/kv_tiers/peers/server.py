"""The server of a prefill engine: gives decode engines the contents that leases keep."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.framing import WireError
from jaxllm.kv_tiers.peers import messages
from jaxllm.kv_tiers.peers.channel import Channel
from jaxllm.kv_tiers.peers.identity import Identity
from jaxllm.kv_tiers.peers.leases import Growth, Leases, NoLeaseError
from jaxllm.kv_tiers.slot_store import SlotMemory
from jaxllm.log import logger

FIRST_SECONDS = 5.0
"""The longest wait for each message of a stranger."""
SILENCE_SECONDS = 60.0
"""A connection without a message for so long is closed."""
BLOCK_SECONDS = 10.0
"""The longest time that a reader may take for a block."""
STORE_SECONDS = 5.0
"""The longest wait for a content that is still being stored."""
FOLLOW_SECONDS = 0.2
"""The longest wait for the growth of leases, before those are asked for again that were attached meanwhile."""
MAX_STRANGERS = 64
"""Connections whose handshake is not over: for one more, the oldest is closed."""
MAX_CONNECTIONS = 512
"""Connections whose handshake is over: one more is closed."""
_BACKLOG = 1024


class ServedMemory(SlotMemory, Protocol):
    """The slots of a prefill engine."""

    descriptor: int | None
    """File descriptor of all slots, if processes can share it."""

    def offset(self, slot: int) -> int:
        """Where they begin in that file."""

    @property
    def num_bytes(self) -> int:
        """Size of that file."""


def socket_name(engine_id: str) -> str:
    """The abstract address at which processes of the same host find an engine."""
    return f"\0jaxllm-kv-{engine_id}"


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError if the address cannot be taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # the second for a name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"kv_host is {host} and kv_port {port}, where this engine cannot listen ({reason}); choose an address of "
            "this host and a free port, or port 0 for any"
        ) from error


class Server:
    """Listens at an address, and where processes of this host look for this engine. A thread serves each connection."""

    def __init__(self, identity: Identity, leases: Leases, memory: ServedMemory):
        self._identity, self._leases, self._memory = identity, leases, memory
        self._lock = threading.Lock()
        self._strangers: dict[Channel, None] = {}
        self._guests: dict[Channel, None] = {}
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.port = 0
        """Where it listens, once it does."""

    def open(self, host: str, port: int) -> None:
        """Listen. Raises ConfigError if the address cannot be taken."""
        listener = listener_at(host, port)
        self.port = listener.getsockname()[1]
        self._listen(listener)
        if self._memory.descriptor is not None:
            local = socket.socket(socket.AF_UNIX)
            local.bind(socket_name(self._identity.engine_id))
            local.listen(_BACKLOG)
            self._listen(local)
        logger.info("decode engines find this engine at %s, port %d", host, self.port)

    def reset(self) -> None:
        """The weights may be others from now on: decode engines connect anew, to be compared with this one."""
        self._identity.forget_facts()
        with self._lock:
            channels = [*self._strangers, *self._guests]
        for channel in channels:
            channel.interrupt()

    def close(self) -> None:
        """Close all connections, and wait for their threads. May be called again."""
        with self._lock:
            self._is_closed = True
            channels = [*self._strangers, *self._guests]
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for channel in channels:
            channel.interrupt()
        self._leases.end_all()
        for thread in self._threads:
            thread.join()

    @property
    def num_connections(self) -> int:
        return len(self._strangers) + len(self._guests)

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._start(lambda: self._accept(listener), "kv-listen")

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                threading.Event().wait(0.1)  # e.g. no descriptors are left
                continue
            channel = Channel(stream, messages.FIRST_OF_DECODE)
            with self._lock:
                if self._is_closed:
                    stream.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.interrupt()
                self._strangers[channel] = None
            try:
                self._start(lambda channel=channel: self._serve(channel), "kv-serve")  # type: ignore[misc]
            except RuntimeError as error:  # there are too many threads
                logger.warning("a connection of a decode engine is closed: %s", error)
                with self._lock:
                    self._strangers.pop(channel, None)
                channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            if self._welcome(channel):
                while True:
                    self._answer(channel, channel.receive(SILENCE_SECONDS))
        except WireError as error:
            logger.debug("a decode engine is gone: %s", error)
        except (JaxLLMError, OSError) as error:
            logger.warning("a decode engine cannot be compared with this one: %s", error)
        finally:
            channel.close()
            with self._lock:
                self._strangers.pop(channel, None)
                self._guests.pop(channel, None)
            self._leases.leave(channel)

    def _welcome(self, channel: Channel) -> bool:
        """The handshake. Returns whether the connection may be used. Raises WireError."""
        own, hello = self._identity, channel.receive(FIRST_SECONDS)
        if not isinstance(hello, messages.Hello):
            raise WireError("its first message is no Hello")
        if hello.protocol != messages.PROTOCOL:
            return _refuse(
                channel,
                messages.Code.PROTOCOL,
                f"this engine speaks version {messages.PROTOCOL}, the decode engine {hello.protocol}",
            )
        nonce = messages.new_nonce()
        channel.send(messages.Hello(messages.PROTOCOL, own.engine_id, dict(own.facts), own.block_bytes, nonce), FIRST_SECONDS)
        proof = channel.receive(FIRST_SECONDS)
        if not isinstance(proof, messages.Proof):
            raise WireError("its second message is no Proof")
        if not messages.is_proven(proof.hmac, "decode", own.token, hello.nonce, nonce):
            return _refuse(
                channel,
                messages.Code.TOKEN,
                "the engines have different tokens; set the same JAXLLM_KV_TOKEN for both, or for neither",
            )
        if hello.engine_id != own.engine_id:
            return _refuse(channel, messages.Code.ENGINE, f"this is engine {own.engine_id}, not {hello.engine_id}")
        if (difference := own.difference(hello.facts, hello.block_bytes)) is not None:
            logger.error("a decode engine may not fetch blocks: %s", difference)
            return _refuse(channel, messages.Code.DIFFERS, difference)
        if channel.is_local and channel.user_id not in (os.geteuid(), 0):
            return _refuse(channel, messages.Code.TOKEN, "the memory is shared with processes of the same user alone")
        with self._lock:
            self._strangers.pop(channel, None)
            if self._is_closed or len(self._guests) >= MAX_CONNECTIONS:
                raise WireError("there are too many connections")
            self._guests[channel] = None
        channel.accept(messages.OF_DECODE)
        channel.send(messages.Proof(messages.proof("prefill", own.token, nonce, hello.nonce)), FIRST_SECONDS)
        return True

    def _answer(self, channel: Channel, message: object) -> None:
        """Process a message. Raises WireError."""
        match message:
            case messages.Attach(number):
                try:
                    names, is_complete = self._leases.attach(number, channel), self._leases.growth(number).is_complete
                    channel.send(messages.Attached(number, list(names), is_complete), BLOCK_SECONDS)
                except NoLeaseError as error:
                    channel.send(messages.Refused(messages.Code.LEASE, str(error)), BLOCK_SECONDS)
            case messages.Follow(known):
                grown = self._leases.follow(known, FOLLOW_SECONDS)
                changes = {number: None if each is None else _change(each) for number, each in grown.items()}
                channel.send(messages.Grown(changes), BLOCK_SECONDS)
            case messages.Pull(number, names):
                self._send_contents(channel, number, names)
            case messages.Renew(numbers):
                self._leases.renew(numbers, channel)
            case messages.Done(number):
                self._leases.end(number)
            case messages.Map():
                if not channel.is_local or self._memory.descriptor is None:
                    raise WireError("memory is not shared on this connection")
                channel.send(messages.Mapped(self._memory.num_bytes), BLOCK_SECONDS)
                channel.send_descriptor(self._memory.descriptor, BLOCK_SECONDS)

    def _send_contents(self, channel: Channel, number: str, names: Sequence[bytes]) -> None:
        memory, missing, there = self._memory, [], list[tuple[bytes, int]]()
        try:
            with self._leases.reading(number) as slot_of:
                for name in names:
                    if (slot := slot_of(name, 0.0)) is None:
                        self._send_slots(channel, there)
                        slot = slot_of(name, STORE_SECONDS)
                    if slot is None:
                        missing.append(name)
                    elif channel.is_local:
                        there.append((name, slot))
                    else:
                        block = messages.Block(name, memory.block_bytes, memory.sums[slot].tobytes())
                        channel.send(block, BLOCK_SECONDS, memory.view(slot))
                self._send_slots(channel, there)
        except NoLeaseError:
            missing = list(names)
        if missing:
            channel.send(messages.Missing(missing), BLOCK_SECONDS)

    def _send_slots(self, channel: Channel, there: list[tuple[bytes, int]]) -> None:
        """Tell where contents are in the memory that is shared, and empty the list."""
        if there:
            names, slots = [name for name, _ in there], [slot for _, slot in there]
            sums = [self._memory.sums[slot].tobytes() for slot in slots]
            channel.send(messages.Slots(names, [self._memory.offset(slot) for slot in slots], sums), BLOCK_SECONDS)
            there.clear()


def _change(growth: Growth) -> messages.Change:
    return messages.Change(list(growth.stored), list(growth.lost), growth.is_computing, growth.is_complete)


def _refuse(channel: Channel, code: str, text: str) -> bool:
    channel.send(messages.Refused(code, text), FIRST_SECONDS)
    return False
