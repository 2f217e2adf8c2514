import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.acceptance import Acceptance
from jaxllm.http_client.scrape import Scrape, acceptance, quantile, read_scrape, view
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.metrics.prometheus import exposition
from jaxllm.sampling_params import SamplingParams
from tests.helpers.fake_engine_core import fake_stats

VLLM_PAGE = """
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:generation_tokens_total{engine="0",model_name="m"} %d
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} %d
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 7.0
"""


def test_vllm_s_metrics_are_read_and_engines_added_up() -> None:
    found = view(read_scrape(VLLM_PAGE % (100, 4), 10.0), read_scrape(VLLM_PAGE % (300, 5), 12.0))
    assert (found["models"], found["num_requests_running"], found["num_requests_waiting"]) == (["m"], 5, 0)
    assert found["kv_cache_usage"] == pytest.approx(0.3)
    assert found["generation_tokens_per_second"] == 100.0
    assert found["prefix_cache_hit_rate"] is None, "nothing was looked up meanwhile"
    assert found["finished"] == {"stop": {"total": 5, "new": 1}} and found["http"] == {"2xx": {"total": 7, "new": 0}}


def test_our_own_metrics_give_rates_and_percentiles() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.load = fake_stats(num_running=3, num_waiting=4, cache_usage=0.5, prefix_cache_queries=10, prefix_cache_hits=5)
    before = read_scrape(exposition(metrics.snapshot()).decode(), 0.0)
    for _ in range(10):
        metrics.request_arrived(SamplingParams())
        metrics.prefill_done(20, 5, 0.03)
        metrics.add_generation_tokens(4)
    found = view(before, read_scrape(exposition(metrics.snapshot()).decode(), 2.0))
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (3, 4)
    assert (found["prompt_tokens_per_second"], found["generation_tokens_per_second"]) == (100, 20)
    first = found["latency_ms"]["ttft"]
    assert 20 <= first["p50"] <= first["p90"] <= first["p99"] <= 40
    assert found["latency_ms"]["itl"] is None


def test_a_server_that_started_again_counts_from_zero() -> None:
    found = view(read_scrape(VLLM_PAGE % (1000, 4), 0.0), read_scrape(VLLM_PAGE % (50, 1), 1.0))
    assert found["generation_tokens_per_second"] == 50.0 and found["finished"]["stop"]["new"] == 1


def test_acceptance_between_two_readings() -> None:
    metrics = EngineMetrics("m", 100)

    def reading(**drafts: object) -> Scrape:
        metrics.load = fake_stats(**drafts)
        return read_scrape(exposition(metrics.snapshot()).decode(), 0.0)

    none = reading()
    assert acceptance(none, none) is None and view(none, none)["drafts"] is None
    positions = tuple(range(12, 0, -1))
    before = reading(num_drafts=1, num_draft_tokens=12, num_accepted_tokens=0, accepted_per_position=(0,) * 12)
    now = reading(num_drafts=13, num_draft_tokens=156, num_accepted_tokens=78, accepted_per_position=positions)
    assert acceptance(before, now) == Acceptance(12, 144, 78, positions)
    assert acceptance(now, before) == Acceptance(1, 12, 0, (0,) * 12), "the server started again"
    assert view(before, now)["drafts"]["spec_decode_acceptance_length"] == 7.5


@pytest.mark.parametrize("page", ["", "<html>", "go_threads 5\n", "vllm:x{ 5\n"])
def test_another_page_is_refused(page: str) -> None:
    with pytest.raises(ValueError):
        read_scrape(page, 0.0)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], fraction: float) -> None:
    bounds = [0.5, 1.0, 2.0, 5.0, math.inf]
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    true = sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
    found = quantile(buckets, fraction)
    upper = min(bound for bound in bounds if bound >= true)
    lower = max([0.0, *(bound for bound in bounds if bound < true)])
    assert found is not None and lower <= found <= upper + 1e-9


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile({}, 0.5) is None and quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
