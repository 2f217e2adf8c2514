import logging

import pytest
from prometheus_client import generate_latest

from jaxllm.metrics.buckets import one_two_five
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.metrics.metric import Counter, Gauge, Histogram
from jaxllm.metrics.prometheus import registry
from jaxllm.metrics.stat_logger import StatLogger
from jaxllm.sampling_params import SamplingParams
from tests.helpers.fake_engine_core import FakeStats


def busy_metrics() -> EngineMetrics:
    metrics = EngineMetrics("m", 100)
    metrics.load = FakeStats(num_running=3, num_waiting=4, cache_usage=0.5, prefix_cache_queries=10, prefix_cache_hits=5)
    metrics.request_arrived(SamplingParams(n=2))
    metrics.prefill_done(20, 5, 0.03)
    metrics.tokens_done(0.02, 1)
    metrics.add_generation_tokens(2)
    metrics.request_finished("stop", num_prompt_tokens=20, num_generation_tokens=2, seconds=0.05, decode_seconds=0.02)
    return metrics


def test_a_snapshot_has_what_was_recorded() -> None:
    found = {
        metric.name: metric for metric in busy_metrics().snapshot() if metric.labels.get("finished_reason", "stop") == "stop"
    }
    assert found["jaxllm:num_requests_running"] == Gauge(
        "jaxllm:num_requests_running", {"model_name": "m", "engine": "0"}, "requests in the running batch", 3
    )
    first_token = found["jaxllm:time_to_first_token_seconds"]
    assert isinstance(first_token, Histogram) and (first_token.count, first_token.sum) == (1, 0.03)
    assert (first_token.buckets["0.02"], first_token.buckets["0.04"], first_token.buckets["+Inf"]) == (0, 1, 1)
    success = found["jaxllm:request_success"]
    assert isinstance(success, Counter) and success.value == 1 and success.labels["finished_reason"] == "stop"
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_hits",
        "num_preemptions",
        "programs_compiled_after_warmup",
    ):
        assert isinstance(found[f"jaxllm:{name}"], Counter)


def test_prometheus_reads_the_same_numbers() -> None:
    metrics = busy_metrics()
    own = registry(metrics.snapshot)
    text = generate_latest(own).decode()
    assert 'jaxllm:generation_tokens_total{engine="0",model_name="m"} 2.0' in text
    assert 'jaxllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0' in text
    assert 'jaxllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 0.0' in text
    assert 'jaxllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="m"} 1.0' in text
    metrics.add_generation_tokens(3)
    assert 'generation_tokens_total{engine="0",model_name="m"} 5.0' in generate_latest(own).decode()


def test_count_buckets_go_up_to_the_limit() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100] and one_two_five(1) == [1]


def test_the_log_line_comes_once_an_interval_and_not_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    metrics = EngineMetrics("m", 100)
    log = StatLogger(metrics, interval_seconds=10, clock=lambda: now)

    def lines_until(time: float) -> list[str]:
        nonlocal now
        caplog.clear()
        while now < time:
            now += 1
            log.tick()
        return caplog.messages

    with caplog.at_level(logging.INFO, "jaxllm"):
        assert lines_until(20) == []
        metrics.load = FakeStats(num_running=3, num_waiting=4, cache_usage=0.5, prefix_cache_queries=10, prefix_cache_hits=5)
        metrics.prefill_done(20, 5, 0.1)
        metrics.add_generation_tokens(40)
        (line,) = lines_until(30)
        assert "prompt 1.5 tokens/s, generation 4.0 tokens/s, running 3, waiting 4, KV cache 50.0%" in line
        assert "prefix cache hits 50.0%" in line
        metrics.load = FakeStats()
        metrics.load = FakeStats(prefix_cache_queries=10, prefix_cache_hits=5)
        assert len(lines_until(40)) == 1, "the line after the last work"
        assert lines_until(80) == []
