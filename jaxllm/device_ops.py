"""Work on the devices that a step's plan carries in addition to its rows. Does not import JAX."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

PAGE_TOKENS = 64
"""Embeddings in a page of the slab on the device, which keeps those of items."""


class DeviceOp(msgspec.Struct, frozen=True, tag_field="op"):
    """An operation that every rank, stage and host runs before a plan's forward pass, after all steps dispatched before."""


class WriteAdapter(DeviceOp, frozen=True):
    """Write an adapter into a slot. After an error the contents of all slots are lost, and zeros once the executor has started over."""

    slot: int
    staged: int
    """The handle that it was staged under, which is released."""


class DropStaged(DeviceOp, frozen=True):
    """Release what was staged under a handle, wherever it arrived."""

    staged: int


class TakeCounts(DeviceOp, frozen=True):
    """Read the tokens that each expert got since the last time: `ModelRunnerOutput.expert_counts`."""


class MoveExperts(DeviceOp, frozen=True):
    """Move a layer's experts between devices. An error changes nothing."""

    layer: int
    moves: list[list[list[int]]]
    """[2][rounds][devices]: in round r, device n gets what was in the slot moves[0][r][n] before all rounds, counted over all devices, and
    writes it to its own slot moves[1][r][n]; its number of slots means no move."""
    table: list[list[int]]
    """[experts]: how many copies each expert has then, and the slots of these."""


class RankOp(DeviceOp, frozen=True):
    """An operation on the devices of one data-parallel rank."""

    rank: int
    """The position of these devices on the mesh's axis `data`. A rank's scheduler does not know it and plans 0; `RanksPlan` sets it."""


class EncodeItem(RankOp, frozen=True):
    """Encode an item of a prompt, and write its embeddings into pages of the slab, in order, `PAGE_TOKENS` to each."""

    payload: bytes
    """See `PromptItem`."""
    pages: list[int]
    num_parts: int = 1
    """Run so many of its parts (`EncoderSizes.num_parts`). `EncodeParts` follows for the others, unless the next item replaces it."""
    request_id: str = ""
    """The request that waits for it, if the plan computes no token of it."""


class EncodeParts(RankOp, frozen=True):
    """Run the next parts of the item that the rank began last."""

    num_parts: int
    request_id: str = ""
    """See EncodeItem."""


class UseItem(RankOp, frozen=True):
    """The step behind computes tokens of a request's item. Their embeddings are in these pages, which `EncodeItem` wrote."""

    request_id: str
    position: int
    """Index of the item's first token in the prompt."""
    pages: list[int]


class EncodeAudio(RankOp, frozen=True):
    """Encode the audio of a request. The layers keep what they need of it with the request's row, which the step behind gives it."""

    request_id: str
    payload: bytes
    """See `PromptItem`."""


class CopyBlocks(DeviceOp, frozen=True):
    """A copy between blocks and slots of host memory, one for each block. Returns at once; when it is over, a `FinishedCopy` has its
    number."""

    number: int
    block_ids: list[int]
    slots: list[int]


class GatherBlocks(CopyBlocks, frozen=True):
    """Read blocks into a staging buffer, and copy that to slots during the steps that follow."""

    staging: int
    """The staging buffer on the devices, which nothing else uses meanwhile."""


class LoadBlocks(CopyBlocks, frozen=True):
    """Copy slots into blocks once all steps dispatched before and all other operations of the plan are done, during its step and those that
    follow: none of these uses the blocks until the copy is over. A device leaves a block as it is whose part was damaged on its way."""


class StoreState(DeviceOp, frozen=True):
    """Write what layers keep of a request's row into blocks, as it is before the step behind, which computes more tokens of the request.
    Read as keys and values they may be NaN, which does no harm: no step reads a slot before it wrote it."""

    request_id: str
    block_ids: list[int]


class LoadState(DeviceOp, frozen=True):
    """Read back what `StoreState` wrote, into the row that the step behind gives a request."""

    request_id: str
    block_ids: list[int]


class FinishedCopy(NamedTuple):
    """The end of a `CopyBlocks`."""

    number: int
    is_right: Sequence[bool] = ()
    """After `LoadBlocks`: whether each block has its content."""
    seconds: float = 0.0
    """Time of the copy between host and devices."""
    error: Exception | None = None
    """Why it failed: nothing is known of what it wrote."""


AnyDeviceOp = (
    WriteAdapter
    | DropStaged
    | TakeCounts
    | MoveExperts
    | EncodeItem
    | EncodeParts
    | UseItem
    | EncodeAudio
    | GatherBlocks
    | LoadBlocks
    | StoreState
    | LoadState
)
"""All kinds, as other hosts decode them."""


class DeviceOpError(Exception):
    """An operation of a plan failed. Those before it were run, it and those behind it were not."""

    def __init__(self, number: int, op: DeviceOp, cause: Exception):
        super().__init__(f"{type(op).__name__} failed: {type(cause).__name__}: {cause}")
        self.number, self.cause = number, cause
        """Its index among the plan's operations, and the original error."""


def run_ops(ops: Sequence[DeviceOp], run: Callable[[DeviceOp], Iterable[T]]) -> list[T]:
    """Run operations in order. Returns all that `run` returns for them. Raises DeviceOpError."""
    found: list[T] = []
    for number, op in enumerate(ops):
        try:
            found += run_op(op, run)
        except Exception as error:
            raise DeviceOpError(number, op, error) from error
    return found


def run_op(op: DeviceOp, run: Callable[[DeviceOp], Iterable[T]]) -> Iterable[T]:
    """Run one operation; faults are injected here."""
    return run(op)
