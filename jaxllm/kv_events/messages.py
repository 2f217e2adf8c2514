"""Messages for subscribers: vLLM 0.33's events about the prefix cache, as msgpack. Fields keep vLLM's names and order."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from jaxllm.scheduler.block_hash import HASH_BYTES

Medium = Literal["GPU", "CPU", "STORAGE"]
BlockHash = int | bytes


class Block(msgspec.Struct, frozen=True, gc=False):
    """A block's content. The garbage collector does not look at the many that there are: they refer to nothing that refers to them."""

    name: bytes
    """Its hash, and the suffix of its group."""
    parent: bytes | None = None
    """Hash of the block before it in the sequence; None for the first."""
    token_ids: Sequence[int] = ()
    """Empty: only the name is known."""
    adapter: tuple[int, str] | None = None
    """Number and name of its adapter."""
    extra_keys: tuple[object, ...] | None = None
    """Hashed in addition to tokens, without the salt: the adapter's name, and (hash, offset) of each item that it overlaps."""
    session_id: str | None = None
    """The session of the request that computed it."""

    @property
    def group(self) -> int:
        """Index of the group of layers whose keys and values it has."""
        return int.from_bytes(self.name[HASH_BYTES:], "little")


class Change(msgspec.Struct, frozen=True, gc=False):
    """A content came to a medium, or left it."""

    block: Block
    medium: Medium
    is_stored: bool


class Batch(NamedTuple):
    """The changes of a step."""

    time: float
    """Seconds since 1970."""
    changes: Sequence[Change]
    is_whole: bool = False
    """Whether they are all there is: what was said before is void."""


class Group(NamedTuple):
    """A group of layers."""

    kind: str
    """As vLLM calls it: full_attention, mla_attention, sliding_window."""
    window: int | None = None


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Blocks that follow each other in a sequence have come to a medium."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    """One element per block, see Block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Blocks have left a medium."""

    block_hashes: list[BlockHash]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """No medium has any block."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class BatchEncoder:
    """Makes payloads of batches."""

    def __init__(self, groups: Sequence[Group], *, block_size: int, rank: int, int_hashes: bool):
        """groups: of layers, by index. int_hashes: hashes are their last 64 bits as an integer, not all their bytes."""
        self._groups, self._block_size, self._rank, self._int_hashes = groups, block_size, rank, int_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: Batch) -> bytes:
        """The payload of a batch."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()] if batch.is_whole else []
        events += [self._event(*run) for run in _runs(batch.changes)]
        return self._encoder.encode(EventBatch(batch.time, events, self._rank))

    def _event(self, medium: Medium, is_stored: bool, blocks: list[Block]) -> BlockStored | BlockRemoved:
        hashes, first = [self._hash(block.name) for block in blocks], blocks[0]
        if not is_stored:
            return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=first.group)
        lora_id, lora_name = first.adapter or (None, None)
        group = self._groups[first.group]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if first.parent is None else self._hash(first.parent),
            token_ids=[token_id for block in blocks for token_id in block.token_ids],
            block_size=self._block_size if first.token_ids else 0,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=[block.extra_keys for block in blocks] if first.token_ids else None,
            group_idx=first.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            session_id=first.session_id,
        )

    def _hash(self, name: bytes) -> BlockHash:
        return int.from_bytes(name[HASH_BYTES - 8 : HASH_BYTES], "big") if self._int_hashes else name[:HASH_BYTES]


def _runs(changes: Iterable[Change]) -> Iterable[tuple[Medium, bool, list[Block]]]:
    """Group changes that fit into one event each, in an order with the same result."""
    runs: list[tuple[Medium, bool, list[Block]]] = []
    stored: dict[tuple[Medium, int], list[Block]] = {}
    """The latest run of each medium and group since the latest removal."""
    for change in changes:
        block, medium = change.block, change.medium
        if not change.is_stored:
            stored.clear()
            if not (runs and runs[-1][:2] == (medium, False) and runs[-1][2][0].group == block.group):
                runs.append((medium, False, []))
            runs[-1][2].append(block)
            continue
        run = stored.get((medium, block.group))
        if run is None or not _follows(run[-1], block):
            run = stored[medium, block.group] = []
            runs.append((medium, True, run))
        run.append(block)
    return runs


def _follows(block: Block, other: Block) -> bool:
    """Whether one event can hold both blocks, the second after the first."""
    is_next = other.parent == block.name[:HASH_BYTES] and bool(block.token_ids)
    return is_next and other.adapter == block.adapter and other.session_id == block.session_id
