"""Names of block contents."""

import hashlib
import subprocess
import sys

import pytest

from jaxllm.request import EngineCoreRequest, Request
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_hash import NO_PARENT, block_hasher, hash_block

ALGORITHMS = ["sha256", "sha256_cbor"]


def hashes(tokens, algorithm="sha256", **fields):
    spec = EngineCoreRequest(
        request_id=fields.pop("request_id", "r"), prompt_token_ids=tokens, sampling_params=SamplingParams(), **fields
    )
    return Request(spec, extend_hashes=block_hasher(4, algorithm)).block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_are_named_and_names_form_a_chain(algorithm):
    names = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], algorithm)
    first = hash_block(NO_PARENT, [1, 2, 3, 4], algorithm=algorithm)
    assert names == [first, hash_block(first, [5, 6, 7, 8], algorithm=algorithm)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_change_in_a_block_changes_all_later_names(algorithm):
    a = hashes(list(range(16)), algorithm)
    b = hashes([*range(5), 99, *range(6, 16)], algorithm)
    assert a[0] == b[0] and all(x != y for x, y in zip(a[1:], b[1:], strict=True))


def test_output_tokens_extend_the_names():
    request = Request(
        EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams()),
        extend_hashes=block_hasher(4, "sha256"),
    )
    assert request.block_hashes == []
    request.append_output(4)
    assert request.block_hashes == hashes([1, 2, 3, 4])
    for token in (5, 6, 7, 8):
        request.append_output(token)
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_salt_enters_through_the_first_block_only(algorithm):
    first = hash_block(NO_PARENT, range(4), (("cache_salt", "s"),), algorithm)
    assert hashes(list(range(8)), algorithm, cache_salt="s") == [first, hash_block(first, range(4, 8), (), algorithm)]
    plain, salted = hashes(list(range(12)), algorithm), hashes(list(range(12)), algorithm, cache_salt="s")
    assert not set(plain) & set(salted)
    assert salted == hashes(list(range(12)), algorithm, cache_salt="s", request_id="other")
    assert not set(salted) & set(hashes(list(range(12)), algorithm, cache_salt="t"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_names_are_the_same_in_another_process_and_need_no_jax(algorithm):
    code = f"""
import sys
import jaxllm.scheduler.scheduler
from jaxllm.scheduler.block_hash import NO_PARENT, hash_block
assert not {{"jax", "flax", "torch"}} & set(sys.modules)
print(hash_block(NO_PARENT, [1, 2, 3], (("cache_salt", "s"),), {algorithm!r}).hex())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == hash_block(NO_PARENT, [1, 2, 3], (("cache_salt", "s"),), algorithm).hex()


def test_a_name_is_the_hash_of_the_published_form():
    """RFC 8949, section 4.2: items in the fewest bytes. vLLM hashes the same form of (parent, tokens, extra keys)."""
    head = bytes.fromhex("83 5820") + NO_PARENT  # three items, of which the first has 32 bytes
    tokens = bytes.fromhex("85 00 17 1818 190100 1a00010000")
    plain = hashlib.sha256(head + tokens + b"\xf6").digest()
    assert hash_block(NO_PARENT, [0, 23, 24, 256, 65536], algorithm="sha256_cbor") == plain
    keys = bytes.fromhex("81 82") + b"\x6acache_salt" + b"\x62\xc3\xbc"
    salted = hash_block(NO_PARENT, [0, 23, 24, 256, 65536], (("cache_salt", "\u00fc"),), "sha256_cbor")
    assert salted == hashlib.sha256(head + tokens + keys).digest()
    assert hash_block(NO_PARENT, [1], (("cache_salt", "\u00fc"),)) == hashlib.sha256(NO_PARENT + b"\1\0\0\0" + keys).digest()
