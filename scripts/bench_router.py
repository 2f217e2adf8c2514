"""Measures the cost of choosing among replicas: python scripts/bench_router.py

For each number of replicas the median CPU time of choosing for a prompt and taking note of its end, in microseconds, where no replica,
one or all have the first part of the prompt in their caches; with the prompt's hashes. Also the time to process a load report,
and cache events per block.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.cache_events import KEY_BYTES, CacheEvents
from jaxllm.request import EngineCoreRequest
from jaxllm.routing.balancer import Balancer
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_hash import hashes_of
from jaxllm.scheduler_stats import SchedulerStats

BLOCK_SIZE = 16


def stats_of(rng: random.Random) -> SchedulerStats:
    return SchedulerStats(
        num_running=rng.randrange(200),
        num_waiting=0,
        cache_usage=rng.random() * 0.5,
        num_preemptions=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        resumed_prefix_cache_queries=0,
        resumed_prefix_cache_hits=0,
        num_cache_blocks=50_000,
        num_queued_tokens=rng.randrange(20_000),
    )


def microseconds(call: Callable[[int], object], repeats: int) -> float:
    """The median CPU time of `call(0)` … `call(repeats - 1)`."""
    times = []
    for number in range(repeats):
        start = time.thread_time_ns()
        call(number)
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1e3


def measure(num_replicas: int, num_tokens: int, cached_blocks: int, *, blocks_each: int, repeats: int) -> dict[str, float]:
    rng = random.Random(1)
    balancer = Balancer(num_replicas, block_size=BLOCK_SIZE, max_num_seqs=256)
    requests = [
        EngineCoreRequest(
            request_id=f"request-{number}",
            prompt_token_ids=[rng.randrange(100_000) for _ in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=100),
        )
        for number in range(repeats)
    ]
    for replica in range(num_replicas):
        balancer.set_up(replica)
        balancer.note_events(replica, CacheEvents(stored=rng.randbytes(KEY_BYTES * blocks_each)))
        balancer.note_load(replica, stats_of(rng))

    def choose(number: int) -> None:
        balancer.choose(requests[number])
        balancer.ended(requests[number].request_id)

    found = {"none cached": microseconds(choose, repeats)}
    for name, replicas in (("one has it", [0]), ("all have it", range(num_replicas))):
        for number, request in enumerate(requests):
            blocks = [key[:KEY_BYTES] for key in hashes_of(request.prompt_token_ids, BLOCK_SIZE)][:cached_blocks]
            for replica in replicas if name == "all have it" else [number % num_replicas]:
                balancer.note_events(replica, CacheEvents(stored=b"".join(blocks)))
        found[name] = microseconds(choose, repeats)
    reports = [stats_of(rng) for _ in range(repeats)]
    found["a report"] = microseconds(lambda number: balancer.note_load(number % num_replicas, reports[number]), repeats)
    events = [CacheEvents(stored=rng.randbytes(KEY_BYTES * 100)) for _ in range(repeats)]
    found["stored"] = microseconds(lambda number: balancer.note_events(number % num_replicas, events[number]), repeats) / 100
    gone = [CacheEvents(removed=record.stored) for record in events]
    found["removed"] = microseconds(lambda number: balancer.note_events(number % num_replicas, gone[number]), repeats) / 100
    found["blocks"] = len(balancer.index)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 1000])
    parser.add_argument("--tokens", type=int, default=1000, help="length of the prompts")
    parser.add_argument("--cached-blocks", type=int, default=10_000, help="most blocks of a prompt that are cached")
    parser.add_argument("--blocks", type=int, default=3000, help="blocks that each replica has in its cache beside")
    parser.add_argument("--repeats", type=int, default=500)
    arguments = parser.parse_args()
    gc.disable()
    print("replicas  blocks known  none cached µs  one has it µs  all have it µs  a report µs  stored, removed µs a block")
    for num_replicas in arguments.replicas:
        found = measure(
            num_replicas, arguments.tokens, arguments.cached_blocks, blocks_each=arguments.blocks, repeats=arguments.repeats
        )
        print(
            f"{num_replicas:8}  {found['blocks']:12.0f}  {found['none cached']:14.1f}  {found['one has it']:13.1f}  "
            f"{found['all have it']:14.1f}  {found['a report']:11.2f}  {found['stored']:7.3f} {found['removed']:8.3f}"
        )


if __name__ == "__main__":
    main()
