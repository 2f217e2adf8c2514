"""Names of block contents."""

import hashlib
import subprocess
import sys

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.request import EngineCoreRequest, PromptItem, Request
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_hash import NO_PARENT, block_hasher, hash_block

ALGORITHMS = ["sha256", "sha256_cbor"]
PLAIN = "c6bdb50533f24785ba04865daf7f99798b1ac735315b48f1f408da5c0adc7564"
SALTED = "596ff27a0b38d0d5525dbd64bcf67805ca96693062d125d1c22631cbfc284d39"
SALTED_CBOR = "1f053bb9beb3aa05007db9d57acef401c75086790bc62a4ed52a32000bf3aad3"
"""Second block of the tokens 0 to 7, in blocks of 4."""


def hashes(tokens, algorithm="sha256", *, request_id="r", items=(), **options):
    spec = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        items=items,
        sampling_params=SamplingParams(),
        options=RequestOptions(**options),
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


def test_names_of_text_are_those_that_other_versions_and_hosts_give_it():
    assert hashes(list(range(8)))[-1].hex() == PLAIN
    assert hashes(list(range(8)), cache_salt="s")[-1].hex() == SALTED
    assert hashes(list(range(8)), "sha256_cbor", cache_salt="s")[-1].hex() == SALTED_CBOR


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_item_enters_each_block_that_it_overlaps_with_the_offset_of_its_beginning(algorithm):
    image = PromptItem("image", b"dog", position=6, num_tokens=8)
    names = hashes(list(range(20)), algorithm, items=(image,), cache_salt="s")
    chain = hash_block(NO_PARENT, range(4), (("cache_salt", "s"),), algorithm)
    expected = [chain]
    for start, offset in ((4, 2), (8, -2), (12, -6), (16, None)):
        keys = () if offset is None else (("item", "image", b"dog", offset),)
        chain = hash_block(chain, range(start, start + 4), keys, algorithm)
        expected.append(chain)
    assert names == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_before_an_item_are_shared_and_those_from_it_on_only_with_the_same_item(algorithm):
    def of(item, **fields):
        return hashes(list(range(20)), algorithm, items=(item,), **fields)

    dog = of(PromptItem("image", b"dog", 6, 3, b"pixels"))
    assert dog == of(PromptItem("image", b"dog", 6, 3), request_id="other")
    for other in (("image", b"cat", 6, 3), ("audio", b"dog", 6, 3), ("image", b"dog", 7, 2)):
        names = of(PromptItem(*other))
        assert names[0] == dog[0] and not set(names[1:]) & set(dog[1:])


def test_outputs_extend_the_names_of_a_prompt_that_ends_with_an_item():
    item, tokens = PromptItem("image", b"dog", 3, 7), list(range(18))
    spec = EngineCoreRequest(request_id="r", prompt_token_ids=tokens[:10], sampling_params=SamplingParams(), items=(item,))
    request = Request(spec, extend_hashes=block_hasher(4, "sha256"))
    for token in tokens[10:]:
        request.append_output(token)
    assert request.block_hashes == hashes(tokens, items=(item,))


@pytest.mark.parametrize("places", [[(-1, 2)], [(4, 0)], [(9, 2)], [(4, 2), (5, 1)], [(4, 2), (1, 2)], [(1, 1 << 62)]], ids=str)
def test_items_outside_the_prompt_or_each_other_are_refused(places):
    items = tuple(PromptItem("image", b"dog", position, count) for position, count in places)
    with pytest.raises(InvalidRequestError, match="10 tokens and an item of kind 'image' at"):
        hashes(list(range(10)), items=items)


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
