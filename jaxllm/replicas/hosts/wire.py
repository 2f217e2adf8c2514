"""Messages between hosts that have replicas each, after the handshake.

Host 0 sends `Greet`, `Leave`, `Frame`, `Beat` and `End`, the other `Frame`, `Ended`, `Stopping`, `Failed` and `Beat`.
"""

from jaxllm.engine import messages
from jaxllm.framing import Accepted, Beat
from jaxllm.framing import Message as _Message

MAX_MESSAGE_BYTES = messages.MAX_MESSAGE_BYTES + 1024
"""A Frame with the longest message between an API server and an engine process."""


class Greet(_Message, tag="greet"):
    """An API server opens a connection to a replica. Repeated until the replica's engine has answered it."""

    replica: int
    client: str


class Leave(_Message, tag="leave"):
    """An API server closes its connection to a replica."""

    replica: int
    client: str


class Frame(_Message, tag="frame"):
    """A message between an API server and a replica's engine."""

    replica: int
    client: str
    data: bytes


class Ended(_Message, tag="ended"):
    """A replica's engine process has ended, and with it the requests of these API servers."""

    replica: int
    clients: list[str]
    reason: str


class Stopping(_Message, tag="stopping"):
    """This host ends once the requests of its replicas have, or their time is over."""


class Failed(_Message, tag="failed"):
    """This host ends."""

    reason: str


class End(_Message, tag="end"):
    """Host 0 ends: with a reason after a failure, with none if it is shut down."""

    reason: str = ""


FROM_OTHER = Accepted(Frame | Ended | Stopping | Failed | Beat, MAX_MESSAGE_BYTES)
FROM_HOST_0 = Accepted(Greet | Leave | Frame | Beat | End, MAX_MESSAGE_BYTES)
