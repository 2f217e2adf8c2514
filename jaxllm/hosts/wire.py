"""Messages between the hosts of an engine, after the handshake. Does not import JAX.

A follower sends `Facts`, `Done`, `Result`, `Failed` and `Beat`; host 0 sends `Begin`, `AllFacts`, the calls, `End` and `Beat`.
"""

from typing import Any

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.engine.messages import Fault
from jaxllm.framing import Accepted, Beat
from jaxllm.framing import Message as _Message
from jaxllm.options.hosts import MAX_PLAN_BYTES
from jaxllm.scheduler_output import SchedulerOutput

MAX_MESSAGE_BYTES = MAX_PLAN_BYTES
"""A longer message ends its connection. The plan of a step with images, or with long new prompts, is the longest."""
PIECE_BYTES = 4 << 20
"""Staged data and results are sent in pieces of this size, so that steps need not wait for a whole one."""


# From a follower


class Facts(_Message, tag="facts"):
    """Facts of this host in a phase of the start. Answered by AllFacts once every host has sent its own."""

    phase: str
    facts: dict[str, Any]


class Done(_Message, tag="done"):
    """A numbered call has been run, or failed."""

    number: int
    fault: Fault | None = None


class Result(_Message, tag="result"):
    """Results of this host's data-parallel ranks for the next step that was sampled. Long ones come in pieces."""

    data: bytes
    is_last: bool


class Failed(_Message, tag="failed"):
    """This host cannot go on."""

    fault: Fault


# From host 0


class Begin(_Message, tag="begin"):
    """All hosts are there. `coordinator_port`: where `jax.distributed` listens on host 0."""

    coordinator_port: int


class AllFacts(_Message, tag="all_facts"):
    """The facts of all hosts in a phase of the start, in the order of their ranks."""

    phase: str
    facts: list[dict[str, Any]]


class Dispatch(_Message, tag="dispatch"):
    """Run a step."""

    plan: SchedulerOutput


class DispatchRanks(_Message, tag="dispatch_ranks"):
    """Run a step that has these parts, one for each data-parallel rank. Answered by Result once it is sampled."""

    ranks: list[SchedulerOutput]
    step_id: int
    ops: tuple[AnyDeviceOp, ...]


class Sample(_Message, tag="sample"):
    """Sample the latest step under its first masks; those of the other requests allow every token. mask: int32[R, V / 32], row by row."""

    num_rows: int
    mask: bytes


class SampledTokens(_Message, tag="sampled_tokens"):
    """The tokens that the next step sampled, in the order of its requests. Of a pipeline, whose first stage lies on another host."""

    tokens: list[int]


class Piece(_Message, tag="piece"):
    """A part of what is staged under a handle, `size` bytes in all, from the byte `start` on. The last one is answered by Done."""

    number: int
    handle: int
    size: int
    start: int
    data: memoryview


class Do(_Message, tag="do"):
    """Call a method of the runner, one of `follower.CALLS`. Answered by Done."""

    number: int
    method: str
    arguments: list[str] = []


class End(_Message, tag="end"):
    """The engine ends: with a reason after a failure, with none if it is shut down."""

    reason: str = ""


FROM_FOLLOWER = Accepted(Facts | Done | Result | Failed | Beat, MAX_MESSAGE_BYTES)
FROM_HOST_0 = Accepted(
    Begin | AllFacts | Dispatch | DispatchRanks | Sample | SampledTokens | Piece | Do | End | Beat, MAX_MESSAGE_BYTES
)
