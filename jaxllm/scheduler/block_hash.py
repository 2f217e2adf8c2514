"""Names the content of a full block: a hash over its tokens, all before it, and what else shapes their keys and values.

Equal names mean equal cache content, in every process and on every machine.
"""

import functools
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import cbor2

from jaxllm.request import Request

HashAlgorithm = Literal["sha256", "sha256_cbor"]
ExtraKey = tuple[str | int, ...]

HASH_BYTES = 32
cbor = functools.partial(cbor2.dumps, canonical=True)
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


def hashes_of(
    token_ids: Sequence[int],
    block_size: int,
    algorithm: HashAlgorithm = "sha256",
    extra_keys: tuple[ExtraKey, ...] = (),
    parent: bytes = NO_PARENT,
) -> Iterator[bytes]:
    """The names of the full blocks of `token_ids`, each computed when it is asked for. extra_keys: of the first block; its chain
    of parents carries them on."""
    num_tokens = len(token_ids) // block_size * block_size
    if algorithm == "sha256_cbor":
        for start in range(0, num_tokens, block_size):
            parent = hash_block(parent, token_ids[start : start + block_size], () if start else extra_keys, algorithm)
            yield parent
        return
    if extra_keys and num_tokens:
        parent = hash_block(parent, token_ids[:block_size], extra_keys)
        yield parent
        token_ids, num_tokens = token_ids[block_size:], num_tokens - block_size
    # The same as hash_block in half the time.
    packed, size, sha256 = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens]), 4 * block_size, hashlib.sha256
    for start in range(0, len(packed), size):
        parent = sha256(parent + packed[start : start + size]).digest()
        yield parent


def block_hasher(block_size: int, algorithm: HashAlgorithm) -> Callable[[Request], None]:
    """A function that brings `request.block_hashes` up to date with the full blocks of its tokens."""

    def extend_hashes(request: Request) -> None:
        hashes, token_ids = request.block_hashes, request.token_ids
        num_hashed = len(hashes) * block_size
        if len(token_ids) - num_hashed < block_size:
            return
        if hashes:
            hashes += hashes_of(token_ids[num_hashed:], block_size, algorithm, parent=hashes[-1])
        else:
            adapter = request.adapter
            keys = first_keys(request.spec.cache_salt, None if adapter is None else adapter.cache_key)
            hashes += hashes_of(token_ids, block_size, algorithm, keys)

    return extend_hashes


def first_keys(cache_salt: str | None, adapter_key: str | None) -> tuple[ExtraKey, ...]:
    """What shapes the keys and values of a request beside its tokens: its salt, and the `cache_key` of its adapter."""
    keys: tuple[ExtraKey, ...] = () if cache_salt is None else (("cache_salt", cache_salt),)
    return keys if adapter_key is None else (*keys, ("adapter", adapter_key))
