"""The simulated fleet: the balancer finds cached prefixes, and engines and balancer agree about what is cached."""

import dataclasses
import statistics

import pytest

from scripts.fleet.engine import COSTS, StepCosts
from scripts.fleet.run import Result, simulate
from scripts.fleet.work import Work


def run(policy, num_requests=600, num_replicas=4, num_blocks=COSTS["8b"].num_blocks, rate=60.0, **options) -> Result:
    costs = dataclasses.replace(COSTS["8b"], num_blocks=num_blocks)
    work = Work(kind="chats", requests_per_second=rate, num_requests=num_requests, think_seconds=2.0, num_systems=5)
    result = simulate(policy, num_replicas, work, costs, **options)
    assert result.num_requests == num_requests
    for engine in result.engines:
        assert engine.cache.num_held == 0 and len(engine.cache.content()) <= num_blocks
        for balancer in result.api_servers if policy == "cache_aware" else ():
            bit = 1 << engine.number
            assert {key for key, mask in balancer.index._holders.items() if mask & bit} == engine.cache.content()
    return result


def test_chats_go_where_their_beginning_is_cached():
    aware, loaded = run("cache_aware"), run("least_loaded")
    assert aware.cached_share >= 0.9 * aware.best_share > loaded.cached_share
    assert statistics.median(aware.first_token_seconds) < statistics.median(loaded.first_token_seconds)


def test_small_caches_and_several_api_servers():
    result = run("cache_aware", num_requests=300, num_blocks=1500, num_api_servers=3, report_seconds=0.1)
    assert 0 < result.cached_share < result.best_share
    assert len(result.api_servers) == 3


@pytest.mark.parametrize(
    "rows, tokens, milliseconds", [(1, 0, 4.0), (2, 0, 4.5), (5, 0, 8.0), (7, 0, 11.0), (0, 100, 14.0), (3, 50, 10.0)]
)
def test_the_time_of_a_step(rows, tokens, milliseconds):
    costs = StepCosts((1, 3, 5), (4.0, 5.0, 8.0), 10_000, 10)
    assert 1e3 * costs.seconds(rows, tokens) == pytest.approx(milliseconds)
