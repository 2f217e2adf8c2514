"""Messages between a decode engine and a prefill engine, whose blocks it fetches.

The decode engine connects and begins with `Hello`; both answer each other's with `Proof`. Then it sends `Attach`, `Follow`, `Pull`,
`Renew`, `Done` and `Map`, of which only `Renew` and `Done` are not answered. Nothing is encrypted. If both have a token, each proves that
it knows it, without sending it.
"""

import hashlib
import hmac
import secrets

import msgspec

from jaxllm.framing import Accepted, Message

PROTOCOL = 3
"""Version of these messages."""
FIRST_BYTES = 16 << 10
"""Most bytes of a message before the other end is authenticated."""
MAX_BYTES = 8 << 20
"""Most bytes of a later message: the names of a prompt of a million tokens take 3 MB."""


class Hello(Message, tag="hello"):
    """The first message of both ends. nonce: goes into the proof of the other end. The decode engine names the prefill engine that it
    wants in `engine_id`, because another may have its port by now."""

    protocol: int
    engine_id: str
    facts: dict[str, str]
    """See Identity."""
    block_bytes: int
    """Bytes of a block's content."""
    nonce: bytes


class Proof(Message, tag="proof"):
    """Proves that this end has the token."""

    hmac: bytes


class Refused(Message, tag="refused"):
    """The answer to what cannot be done. code: `Code`, for programs."""

    code: str
    text: str


class Attach(Message, tag="attach"):
    """Use a lease, which lives as long as this connection and is renewed."""

    lease: str


class Attached(Message, tag="attached"):
    """The names of the contents that are kept under a lease."""

    lease: str
    names: list[bytes]
    is_complete: bool
    """Whether all can be fetched that ever can be; otherwise `Follow` tells which can be."""


class Follow(Message, tag="follow"):
    """Wait until leases grow: how many stored and lost contents this end knows of each, and whether it is computed. `Grown` answers, soon
    even if none does."""

    leases: dict[str, tuple[int, int, bool]]


class Change(msgspec.Struct, array_like=True):
    """See Growth."""

    stored: list[bytes]
    lost: list[bytes]
    is_computing: bool
    is_complete: bool


class Grown(Message, tag="grown"):
    """The leases that have grown, or are complete; None: it has ended."""

    leases: dict[str, Change | None]


class Pull(Message, tag="pull"):
    """Fetch contents. Each name is answered once, in any order: by `Block`, `Slots` or `Missing`."""

    lease: str
    names: list[bytes]


class Block(Message, tag="block"):
    """A content, whose bytes follow this message."""

    name: bytes
    length: int
    sums: bytes
    """Its checksums, as the device computed them."""


class Slots(Message, tag="slots"):
    """Contents in the memory that `Map` gave, as many as are there."""

    names: list[bytes]
    offsets: list[int]
    sums: list[bytes]


class Missing(Message, tag="missing"):
    """These contents are not kept, or not any more."""

    names: list[bytes]


class Map(Message, tag="map"):
    """Share the memory with the contents, on the same host. `Mapped` answers."""


class Mapped(Message, tag="mapped"):
    """The memory, whose descriptor follows this message with one byte."""

    num_bytes: int


class Renew(Message, tag="renew"):
    """These leases are still needed."""

    leases: list[str]


class Done(Message, tag="done"):
    """A lease is no longer needed."""

    lease: str


class Code:
    """Reasons of `Refused`."""

    PROTOCOL = "protocol"
    ENGINE = "engine"
    TOKEN = "token"
    DIFFERS = "differs"
    LEASE = "lease"


FIRST_OF_DECODE = Accepted(Hello | Proof, FIRST_BYTES)
FIRST_OF_PREFILL = Accepted(Hello | Proof | Refused, FIRST_BYTES)
OF_DECODE = Accepted(Attach | Follow | Pull | Map | Renew | Done, MAX_BYTES)
OF_PREFILL = Accepted(Attached | Grown | Block | Slots | Missing | Mapped | Refused, MAX_BYTES)


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def proof(of: str, token: bytes, own_nonce: bytes, other_nonce: bytes) -> bytes:
    """The proof of an end with this role that it knows the token; the role keeps it from being sent back to its sender."""
    return hmac.new(token, b"\0".join((of.encode(), own_nonce, other_nonce)), hashlib.sha256).digest()


def is_proven(found: bytes, of: str, token: bytes, own_nonce: bytes, other_nonce: bytes) -> bool:
    """Whether an end with this role, and these nonces as it sees them, knows this end's token: none is one too."""
    return hmac.compare_digest(found, proof(of, token, own_nonce, other_nonce))
