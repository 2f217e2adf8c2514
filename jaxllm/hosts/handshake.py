"""The first messages between host 0 and another host, in which each shows who it is. Does not import JAX.

Host 0 begins with `Challenge`; the other host answers `Hello` and gets `Welcome` or `Refused`. Nothing is encrypted. If both have a token,
each proves to the other that it knows it, without sending it. Reception is host 0's side.
"""

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm import env
from jaxllm.config import ParallelOptions
from jaxllm.errors import ConfigError
from jaxllm.framing import Accepted, ClosedError, Message, WireError, decoded
from jaxllm.hosts.connection import Connection
from jaxllm.log import logger

PROTOCOL = 5
"""Version of these messages and of all that follow, of an engine's hosts and of hosts with replicas."""
FIRST_BYTES = 64 << 10
"""The most that a message may have which comes before the other end has shown who it is."""
FIRST_SECONDS = 5.0
"""The longest wait for each of these messages to be whole."""
_RETRY_SECONDS = 0.5


class Challenge(Message, tag="challenge"):
    """The first message of host 0. `nonce` goes into the proof of the other host."""

    nonce: bytes


class Hello(Message, tag="hello"):
    """The answer: an Introduction in the form that this version of the protocol has."""

    protocol: int
    introduction: msgspec.Raw


class Introduction(Message):
    """A host above 0. `identity`: all that must be the same on every host, by a name for error messages."""

    rank: int
    name: str
    nonce: bytes
    proof: bytes
    identity: dict[str, str]


class Welcome(Message, tag="welcome"):
    """This host takes part."""

    proof: bytes


class Refused(Message, tag="refused"):
    """This host may not take part."""

    reason: str


FROM_OTHER = Accepted(Hello, FIRST_BYTES)
FROM_HOST_0 = Accepted(Challenge | Welcome | Refused, FIRST_BYTES)
_introduction = msgspec.msgpack.Decoder(Introduction)


def token() -> bytes:
    """The token of this host; empty if it has none."""
    return os.environ.get(env.HOSTS_TOKEN, "").encode()


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def proof(of: str, nonce: bytes) -> bytes:
    """Proof for the other end, which chose the nonce, that this one knows the token; `of` keeps it from being sent back to its sender."""
    return hmac.new(token(), of.encode() + b"\0" + nonce, hashlib.sha256).digest()


def is_proven(found: bytes, of: str, nonce: bytes) -> bool:
    """Whether the other end has this host's token: none is one too."""
    return hmac.compare_digest(found, proof(of, nonce))


def introduction_of(hello: Hello) -> Introduction:
    """The Introduction in a Hello of this version of the protocol. Raises WireError."""
    found: Introduction = decoded(_introduction, hello.introduction)
    if not found.name.isprintable():
        raise WireError("its name is not printable")
    return found


def hello(rank: int, identity: Mapping[str, str], nonce: bytes, challenge: Challenge) -> Hello:
    """The answer of a host to a challenge; `nonce` goes into the proof of host 0."""
    found = Introduction(rank, socket.gethostname(), nonce, proof("host", challenge.nonce), dict(identity))
    return Hello(PROTOCOL, msgspec.Raw(msgspec.msgpack.encode(found)))


def _open(options: ParallelOptions) -> tuple[Connection, Any]:
    """A connection to host 0, and its first message. Raises OSError or WireError."""
    stream = socket.create_connection((options.master_addr, options.master_port), timeout=FIRST_SECONDS)
    try:
        connection = Connection(stream, FROM_HOST_0)
        return connection, connection.receive(FIRST_SECONDS)
    except WireError:
        stream.close()
        raise


def connect(options: ParallelOptions, identity: Mapping[str, str]) -> Connection:
    """Connect to host 0, which welcomes this host. Raises ConfigError if it is not there in time, or refuses it."""
    where = f"{options.master_addr}, port {options.master_port}"
    deadline = time.monotonic() + options.distributed_timeout_seconds
    logger.info("host %d of %d connects to host 0 at %s", options.node_rank, options.nnodes, where)
    while True:
        try:
            connection, challenge = _open(options)
            break
        except (OSError, ClosedError) as error:  # host 0 may be ending, to be started again
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"host 0 does not answer at {where}, after {options.distributed_timeout_seconds} s "
                    f"(--distributed-timeout-seconds): {error}; start it with --node-rank 0, and see that this host reaches its "
                    "--master-addr"
                ) from error
            time.sleep(_RETRY_SECONDS)
        except WireError as error:
            raise ConfigError(f"what listens at {where} is not host 0 of several hosts: {error}") from error
    try:
        if not isinstance(challenge, Challenge):
            raise WireError("it sent no challenge")
        nonce = new_nonce()
        connection.send(hello(options.node_rank, identity, nonce, challenge))
        answer = connection.receive(FIRST_SECONDS)
    except WireError as error:
        connection.close()
        raise ConfigError(f"what listens at {where} is not host 0 of several hosts, or it ended: {error}") from error
    if isinstance(answer, Welcome) and is_proven(answer.proof, "host 0", nonce):
        return connection
    connection.close()
    if isinstance(answer, Refused):
        raise ConfigError(f"host 0 refuses this host: {answer.reason}")
    raise ConfigError(f"what listens at {where} does not know this host's token (JAXLLM_HOSTS_TOKEN)")
