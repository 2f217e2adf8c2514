"""Simulates replicas behind API servers, with the real balancer, to compare policies and to see what routing costs.

    python scripts/simulate_fleet.py                                  # 4 replicas: chats, common prompts, nothing shared, bursts
    python scripts/simulate_fleet.py --replicas 1000 --requests 1000000 --work chats --policies cache_aware

Engines have real prefix caches of blocks (LRU) and no model: a step takes as long as it was measured to take on one NVIDIA H200
(scripts/fleet/engine.py). Not simulated: HTTP, tokenizing, messages on their way, preemption. "of best" compares with one cache that never
forgets and that all replicas share.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.routing.balancer import RoutingPolicy
from scripts.fleet.engine import COSTS
from scripts.fleet.run import Result, simulate
from scripts.fleet.work import KINDS, Work

HEADS = (
    "work",
    "policy",
    "cached",
    "of best",
    "TTFT ms",
    "p99",
    "TPOT ms",
    "p99",
    "out tok/s",
    "route µs",
    "events µs",
    "load µs",
    "requests/s",
)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row_of(name: str, result: Result) -> list[str]:
    """A line of the table."""
    count = result.num_requests
    routing, events, load = (
        1e6 * seconds / count for seconds in (result.routing_seconds, result.event_seconds, result.load_seconds)
    )
    return [
        name,
        result.policy,
        f"{result.cached_share:.3f}",
        f"{result.cached_share / result.best_share:.3f}" if result.best_share else "–",
        f"{1e3 * statistics.median(result.first_token_seconds):.1f}",
        f"{1e3 * percentile(result.first_token_seconds, 0.99):.0f}",
        f"{1e3 * statistics.median(result.token_seconds):.2f}",
        f"{1e3 * percentile(result.token_seconds, 0.99):.1f}",
        f"{result.num_output_tokens / result.seconds:.0f}",
        f"{routing:.0f}",
        f"{events:.0f}",
        f"{load:.0f}",
        f"{1e6 / (routing + events + load):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second for each replica")
    parser.add_argument("--work", nargs="+", choices=[*KINDS, "bursts"], default=[*KINDS, "bursts"])
    parser.add_argument("--policies", nargs="+", choices=get_args(RoutingPolicy), default=get_args(RoutingPolicy))
    parser.add_argument("--model", choices=COSTS, default="8b")
    parser.add_argument("--blocks", type=int, help="blocks of each prefix cache (default: what an H200 has left)")
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--report-ms", type=float, default=10.0, help="shortest time between two reports of an engine")
    parser.add_argument("--indexed-blocks", type=int, default=4_000_000, help="most blocks that a balancer remembers")
    parser.add_argument("--burst", type=float, default=5.0, help="how many times as many arrivals a burst has")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs = COSTS[arguments.model]
    if arguments.blocks:
        costs = dataclasses.replace(costs, num_blocks=arguments.blocks)
    gc.disable()  # millions of live objects, hardly a cycle
    print(("{:8}  {:12}" + "  {:>9}" * (len(HEADS) - 2)).format(*HEADS))
    for name in arguments.work:
        work = Work(
            kind="chats" if name == "bursts" else name,
            requests_per_second=arguments.rate * arguments.replicas,
            num_requests=arguments.requests,
            burst=arguments.burst if name == "bursts" else 1.0,
        )
        for policy in arguments.policies:
            began = time.perf_counter()
            result = simulate(
                policy,
                arguments.replicas,
                work,
                costs,
                num_api_servers=arguments.api_servers,
                report_seconds=arguments.report_ms / 1e3,
                max_indexed_blocks=arguments.indexed_blocks,
                seed=arguments.seed,
            )
            print(("{:8}  {:12}" + "  {:>9}" * (len(HEADS) - 2)).format(*row_of(name, result)))
            print(
                f"          {result.seconds:.0f} s simulated in {time.perf_counter() - began:.0f} s; optimum {result.best_share:.3f}; "
                f"{result.num_event_blocks / result.num_requests:.0f} blocks in events and {result.num_reports / result.num_requests:.2f} "
                f"reports a request; the index has every {1 / result.index_share:.0f}. block",
                flush=True,
            )


if __name__ == "__main__":
    main()
