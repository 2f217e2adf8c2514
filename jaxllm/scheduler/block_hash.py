"""Names the content of a full block: a hash over its tokens, all before it, and what else shapes their keys and values.

Equal names mean equal cache content, in every process and on every machine.
"""

import functools
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import cbor2

from jaxllm.request import EngineCoreRequest, Request

HashAlgorithm = Literal["sha256", "sha256_cbor"]
ExtraKey = tuple[str | int | bytes, ...]
BlockKeys = Mapping[int, tuple[ExtraKey, ...]]
"""Extra keys by the index of a block in its sequence."""
NO_KEYS: BlockKeys = MappingProxyType({})

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
    extra_keys: BlockKeys = NO_KEYS,
    parent: bytes = NO_PARENT,
    first_block: int = 0,
) -> Iterator[bytes]:
    """The names of the full blocks of `token_ids`, each computed when it is asked for. extra_keys: by the index of a block in its
    sequence, where `token_ids` begin with `first_block`; the chain of parents carries them on."""
    num_tokens = len(token_ids) // block_size * block_size
    if algorithm == "sha256_cbor":
        for index, start in enumerate(range(0, num_tokens, block_size), first_block):
            parent = hash_block(parent, token_ids[start : start + block_size], extra_keys.get(index, ()), algorithm)
            yield parent
        return
    # The same as hash_block in half the time.
    packed, size, sha256 = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens]), 4 * block_size, hashlib.sha256
    num_keyed = max(extra_keys, default=-1) + 1 - first_block
    for index, start in enumerate(range(0, min(num_keyed * size, len(packed)), size), first_block):
        keys = extra_keys.get(index)
        parent = sha256(parent + packed[start : start + size] + (cbor(keys) if keys else b"")).digest()
        yield parent
    for start in range(max(0, num_keyed * size), len(packed), size):
        parent = sha256(parent + packed[start : start + size]).digest()
        yield parent


def block_hasher(block_size: int, algorithm: HashAlgorithm) -> Callable[[Request], None]:
    """A function that brings `request.block_hashes` up to date with the full blocks of its tokens."""

    def extend_hashes(request: Request) -> None:
        hashes, token_ids = request.block_hashes, request.token_ids
        num_hashed = len(hashes) * block_size
        if len(token_ids) - num_hashed < block_size:
            return
        adapter_key = None if request.adapter is None else request.adapter.cache_key
        keys = extra_keys_of(request.spec, adapter_key, block_size, len(hashes))
        parent = hashes[-1] if hashes else NO_PARENT
        hashes += hashes_of(token_ids[num_hashed:], block_size, algorithm, keys, parent, len(hashes))

    return extend_hashes


def extra_keys_of(spec: EngineCoreRequest, adapter_key: str | None, block_size: int, first_block: int = 0) -> BlockKeys:
    """Hash keys of a request in addition to its tokens, from block `first_block` on: in the first block its salt and the
    `cache_key` of its adapter, in each block that an item overlaps the item and where it begins, counted from the block's first token.
    """
    found: dict[int, tuple[ExtraKey, ...]] = {}
    if first_block == 0:
        salt = () if spec.options.cache_salt is None else (("cache_salt", spec.options.cache_salt),)
        first: tuple[ExtraKey, ...] = salt if adapter_key is None else (*salt, ("adapter", adapter_key))
        if first:
            found[0] = first
    for item in spec.items:
        for index in range(max(first_block, item.position // block_size), -(-item.end // block_size)):
            key = ("item", item.kind, item.content_hash, item.position - index * block_size)
            found[index] = (*found.get(index, ()), key)
    return found
