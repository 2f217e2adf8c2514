"""The index finds what a set of blocks for each replica would find."""

import random

import numpy as np
import pytest

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.routing.prefix_index import PrefixIndex


def packed(keys) -> bytes:
    return b"".join(key.to_bytes(KEY_BYTES, "little") for key in keys)


def prefix(has, prompt, skipped=0) -> int:
    """Leading blocks in a set, up to the last one that is not skipped."""
    length = 0
    for index, key in enumerate(prompt, 1):
        if key & skipped:
            continue
        if key not in has:
            break
        length = index
    return length


@pytest.mark.parametrize("num_replicas, max_blocks", [(1, 10**6), (3, 10**6), (70, 10**6), (5, 40)])
def test_random_events(num_replicas, max_blocks):
    rng = random.Random(num_replicas + max_blocks)
    index = PrefixIndex(num_replicas, max_blocks)
    sets = [set() for _ in range(num_replicas)]
    # Prompts share beginnings, and keys are as hashes are.
    trunk = [rng.getrandbits(64) for _ in range(12)]
    prompts = [trunk[: rng.randrange(13)] + [rng.getrandbits(64) for _ in range(rng.randrange(8))] for _ in range(30)]
    for _ in range(1500):
        replica, prompt = rng.randrange(num_replicas), rng.choice(prompts)
        kind = rng.random()
        if kind < 0.5:
            stored = set(prompt[: rng.randrange(21)])
            removed = set(rng.sample(sorted(sets[replica]), len(sets[replica]) // 3)) - stored
            sets[replica] = sets[replica] - removed | stored
            index.apply(replica, CacheEvents(False, packed(stored), packed(removed)))
        elif kind < 0.55:
            sets[replica] = set(prompt)
            index.apply(replica, CacheEvents(True, packed(prompt)))
        elif kind < 0.6:
            sets[replica] = set()
            index.forget(replica)
        skipped = round(1 / index.share) - 1
        if max_blocks < 10**6:  # what was dropped when it was full is not known again: follow the index
            sets = [{key for key in has if not key & skipped} for has in sets]
        for prompt in rng.sample(prompts, 3):
            assert index.prefixes(iter(prompt)).tolist() == [prefix(has, prompt, skipped) for has in sets]
        assert len(index) <= max_blocks
    assert index.share == 1 if max_blocks == 10**6 else index.share < 1
    for replica in range(num_replicas):
        index.forget(replica)
    assert not any(index.prefixes(trunk))


def test_a_walk_asks_for_no_more_keys_than_it_needs():
    index = PrefixIndex(2)
    index.apply(0, CacheEvents(stored=packed([1, 2])))
    keys = iter([1, 2, 3, 4, 5])
    assert index.prefixes(keys).tolist() == [2, 0]
    assert next(keys) == 4


def test_memory_for_a_block():
    import tracemalloc

    events = [CacheEvents(stored=np.random.default_rng(replica).bytes(8 * 20_000)) for replica in range(20)]
    index = PrefixIndex(20)
    tracemalloc.start()
    for replica, record in enumerate(events):
        index.apply(replica, record)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 400_000 and size / len(index) < 150
