"""Payloads, byte by byte as msgpack has them, written by hand from vLLM 0.33's structs."""

import struct

import msgspec
import pytest
from msgspec.structs import replace

from jaxllm.kv_events.messages import Batch, BatchEncoder, Block, Change, Group

PARENT = bytes(24) + bytes([0, 0, 0, 0, 0, 0, 0, 7])
FIRST = b"\xff" * 24 + bytes([1, 2, 3, 4, 5, 6, 7, 8])
SECOND = b"\xee" * 24 + bytes([0x80, 0, 0, 0, 0, 0, 0, 1])
IN_WINDOW = (1).to_bytes(2, "little")
"""Suffix of names in the second group."""
GROUPS = (Group("full_attention"), Group("sliding_window", 300))


def text(value: str) -> bytes:
    """A str of at most 255 bytes."""
    head = bytes([0xA0 | len(value)]) if len(value) < 32 else bytes([0xD9, len(value)])
    return head + value.encode()


def payload(*events: bytes, rank: int = 0, time: float = 1.5) -> bytes:
    """[ts, events, data_parallel_rank]"""
    return b"\x93" + b"\xcb" + struct.pack(">d", time) + bytes([0x90 | len(events)]) + b"".join(events) + bytes([rank])


STORED = (
    b"\x8b" + text("type") + text("BlockStored")
    + text("block_hashes") + b"\x92" + b"\xcf\x01\x02\x03\x04\x05\x06\x07\x08" + b"\xcf\x80\0\0\0\0\0\0\x01"
    + text("parent_block_hash") + b"\xc0"
    + text("token_ids") + b"\x94\x05\xcd\x01\x00\x06\x07"
    + text("block_size") + b"\x02"
    + text("lora_id") + b"\xc0"
    + text("medium") + text("GPU")
    + text("lora_name") + b"\xc0"
    + text("extra_keys") + b"\x92\xc0\xc0"
    + text("group_idx") + b"\x00"
    + text("kv_cache_spec_kind") + text("full_attention")
)  # fmt: skip
ADAPTED = (
    b"\x8d" + text("type") + text("BlockStored")
    + text("block_hashes") + b"\x91" + b"\xcf\x01\x02\x03\x04\x05\x06\x07\x08"
    + text("parent_block_hash") + b"\x07"
    + text("token_ids") + b"\x92\x05\x06"
    + text("block_size") + b"\x02"
    + text("lora_id") + b"\x03"
    + text("medium") + text("CPU")
    + text("lora_name") + text("sql")
    + text("extra_keys") + b"\x91\x92" + text("sql") + b"\x92" + text("abcd") + b"\xff"
    + text("group_idx") + b"\x01"
    + text("kv_cache_spec_kind") + text("sliding_window")
    + text("kv_cache_spec_sliding_window") + b"\xcd\x01\x2c"
    + text("session_id") + text("s")
)  # fmt: skip
REMOVED = (
    b"\x84" + text("type") + text("BlockRemoved")
    + text("block_hashes") + b"\x91" + b"\xc4\x20" + FIRST
    + text("medium") + text("STORAGE")
    + text("group_idx") + b"\x00"
)  # fmt: skip
CLEARED = b"\x81" + text("type") + text("AllBlocksCleared")
PLAIN = [Block(FIRST, None, [5, 256]), Block(SECOND, FIRST, [6, 7])]


def encoder(*, rank: int = 0, int_hashes: bool = True) -> BatchEncoder:
    return BatchEncoder(GROUPS, block_size=2, rank=rank, int_hashes=int_hashes)


def test_blocks_that_follow_each_other_are_one_event() -> None:
    batch = Batch(1.5, [Change(block, "GPU", True) for block in PLAIN])
    assert encoder(rank=2).encode(batch) == payload(STORED, rank=2)


def test_all_fields() -> None:
    block = Block(FIRST + IN_WINDOW, PARENT, [5, 6], (3, "sql"), ("sql", ("abcd", -1)), "s")
    assert encoder().encode(Batch(1.5, [Change(block, "CPU", True)])) == payload(ADAPTED)


def test_hashes_as_bytes_and_an_empty_cache() -> None:
    assert encoder(int_hashes=False).encode(Batch(1.5, [Change(PLAIN[0], "STORAGE", False)])) == payload(REMOVED)
    assert encoder().encode(Batch(0.0, [], is_whole=True)) == payload(CLEARED, time=0.0)


def runs(*changes: tuple[Block, str, bool]) -> list[tuple[str, str, list[bytes]]]:
    """Each event of a batch: what, where, which blocks."""
    found = encoder(int_hashes=False).encode(Batch(0.0, [Change(*change) for change in changes]))
    events = msgspec.msgpack.decode(found)[1]
    return [(event["type"], f"{event['medium']} {event['group_idx']}", event["block_hashes"]) for event in events]


def test_what_cannot_be_told_in_one_event_has_several() -> None:
    first, second = PLAIN
    in_window = [replace(block, name=block.name + IN_WINDOW) for block in PLAIN]
    interleaved = [(block, "GPU", True) for pair in zip(PLAIN, in_window, strict=True) for block in pair]
    assert runs(*interleaved) == [
        ("BlockStored", "GPU 0", [FIRST, SECOND]),
        ("BlockStored", "GPU 1", [FIRST, SECOND]),
    ]
    assert [event[2] for event in runs((second, "GPU", True), (first, "GPU", True))] == [[SECOND], [FIRST]]
    assert len(runs((first, "GPU", True), (replace(second, session_id="s"), "GPU", True))) == 2
    assert len(runs((first, "GPU", True), (replace(second, adapter=(1, "a")), "GPU", True))) == 2
    assert len(runs((first, "GPU", True), (second, "CPU", True))) == 2
    assert runs((first, "GPU", False), (second, "GPU", False), (in_window[0], "GPU", False)) == [
        ("BlockRemoved", "GPU 0", [FIRST, SECOND]),
        ("BlockRemoved", "GPU 1", [FIRST]),
    ]


def test_a_block_that_leaves_and_returns_is_there_at_the_end() -> None:
    first, second = PLAIN
    changes = [(first, "GPU", True), (second, "GPU", True), (second, "GPU", False), (second, "GPU", True)]
    assert [(event[0], event[2]) for event in runs(*changes)] == [
        ("BlockStored", [FIRST, SECOND]),
        ("BlockRemoved", [SECOND]),
        ("BlockStored", [SECOND]),
    ]


def test_a_name_alone_has_no_tokens() -> None:
    """As vLLM's placeholder: a tier may have blocks that were stored by another engine."""
    bare = Block(FIRST)
    (event,) = msgspec.msgpack.decode(encoder().encode(Batch(0.0, [Change(bare, "STORAGE", True)])))[1]
    assert event["token_ids"] == [] and event["block_size"] == 0 and event["parent_block_hash"] is None
    assert "extra_keys" not in event
    assert len(runs((bare, "STORAGE", True), (Block(SECOND), "STORAGE", True))) == 2


@pytest.mark.parametrize("value", [0, 2**31])
def test_token_ids_of_any_size(value: int) -> None:
    batch = Batch(0.0, [Change(Block(FIRST, None, [value, 1]), "GPU", True)])
    assert msgspec.msgpack.decode(encoder().encode(batch))[1][0]["token_ids"] == [value, 1]
