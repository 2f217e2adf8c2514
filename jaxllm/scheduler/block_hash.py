"""Names the content of a full block: a hash over its tokens, all before it, and what else shapes their keys and values.

Equal names mean equal cache content, in every process and on every machine.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Literal

from jaxllm.request import Request

HashAlgorithm = Literal["sha256", "sha256_cbor"]
ExtraKey = tuple[str | int, ...]

NO_PARENT = hashlib.sha256(b"the beginning of a sequence").digest()
"""Stands for the parent of a first block."""


def hash_block(
    parent: bytes, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = (), algorithm: HashAlgorithm = "sha256"
) -> bytes:
    """The name of a block after the block named `parent`."""
    if algorithm == "sha256_cbor":
        return hashlib.sha256(cbor([parent, list(token_ids), list(extra_keys) or None])).digest()
    # The parent and the tokens have fixed lengths, so what follows them cannot be mistaken for them.
    content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    if extra_keys:
        content += cbor(extra_keys)
    return hashlib.sha256(content).digest()


def block_hasher(block_size: int, algorithm: HashAlgorithm) -> Callable[[Request], None]:
    """A function that brings `request.block_hashes` up to date with the full blocks of its tokens."""

    def extend_hashes(request: Request) -> None:
        hashes, token_ids = request.block_hashes, request.token_ids
        num_hashed = len(hashes) * block_size
        if len(token_ids) - num_hashed < block_size:
            return
        parent = hashes[-1] if hashes else NO_PARENT
        for start in range(num_hashed, len(token_ids) - block_size + 1, block_size):
            end = start + block_size
            # The chain of parents carries what the first block has.
            keys: tuple[ExtraKey, ...] = () if start else _first_keys(request)
            parent = hash_block(parent, token_ids[start:end], keys, algorithm)
            hashes.append(parent)

    return extend_hashes


def _first_keys(request: Request) -> tuple[ExtraKey, ...]:
    """What shapes a request's keys and values beside its tokens."""
    salt, adapter = request.spec.cache_salt, request.adapter
    keys: tuple[ExtraKey, ...] = () if salt is None else (("cache_salt", salt),)
    return keys if adapter is None else (*keys, ("adapter", adapter.cache_key))


def cbor(value: object) -> bytes:
    """Canonical CBOR (RFC 8949, section 4.2) of None, integers, bytes, text and sequences of these."""
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if value is None:
        return b"\xf6"
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, (list, tuple)):
        return _cbor_head(4, len(value)) + b"".join(map(cbor, value))
    raise TypeError(f"no CBOR form for {type(value).__name__}")


def _cbor_head(major: int, number: int) -> bytes:
    """The kind of an item with its value or length, in the fewest bytes."""
    kind = major << 5
    if number < 24:
        return bytes((kind | number,))
    if number < 1 << 8:
        return bytes((kind | 24, number))
    if number < 1 << 16:
        return struct.pack(">BH", kind | 25, number)
    if number < 1 << 32:
        return struct.pack(">BI", kind | 26, number)
    if number < 1 << 64:
        return struct.pack(">BQ", kind | 27, number)
    raise ValueError(f"{number} does not fit 64 bits")
