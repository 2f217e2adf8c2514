import logging

import pytest
from prometheus_client import generate_latest

from jaxllm.config import CacheOptions
from jaxllm.metrics.buckets import one_two_five
from jaxllm.metrics.engine_metrics import EngineMetrics, cache_labels
from jaxllm.metrics.metric import Counter, Gauge, Histogram
from jaxllm.metrics.prometheus import exposition, registry
from jaxllm.metrics.stat_logger import StatLogger
from jaxllm.sampling_params import SamplingParams
from tests.helpers.fake_engine_core import fake_stats


def busy_metrics() -> EngineMetrics:
    metrics = EngineMetrics("m", 100)
    metrics.load = fake_stats(num_running=3, num_waiting=4, cache_usage=0.5, prefix_cache_queries=10, prefix_cache_hits=5)
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


def test_times_in_the_core_are_counted_where_the_core_tells_them() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.load = fake_stats()
    metrics.prefill_done(20, 5, 0.03, queue_seconds=0.01, prefill_seconds=0.02)
    ended = {"num_prompt_tokens": 20, "num_generation_tokens": 3, "seconds": 0.5}
    metrics.request_finished("stop", **ended, decode_seconds=0.4, prefill_seconds=0.02, num_preemptions=2)
    metrics.request_finished("abort", **ended, decode_seconds=None)
    metrics.all_answers_finished(3)
    found = {metric.name.removeprefix("jaxllm:"): metric for metric in metrics.snapshot()}

    def total(name: str) -> tuple[int, float]:
        histogram = found[name]
        assert isinstance(histogram, Histogram)
        return histogram.count, round(histogram.sum, 6)

    assert total("request_queue_time_seconds") == (1, 0.01) and total("request_prefill_time_seconds") == (1, 0.02)
    assert total("request_inference_time_seconds") == (1, 0.42)
    assert total("request_num_preemptions") == (2, 2) and total("request_prefill_kv_computed_tokens") == (1, 15)
    assert total("request_max_num_generation_tokens") == (1, 3)


def test_the_cache_is_described_under_vllm_s_names() -> None:
    extra = {"password": "secret"}
    options = CacheOptions(
        kv_cache_dtype="fp8", enable_prefix_caching=True, kv_transfer_config={"kv_connector_extra_config": extra}
    )
    assert "secret" not in str(cache_labels(options))
    metrics = EngineMetrics("m", 100, cache_config=cache_labels(options))
    metrics.load = fake_stats(num_cache_blocks=21, max_concurrency=3.0)
    (info,) = [metric for metric in metrics.snapshot() if metric.name == "jaxllm:cache_config_info"]
    assert (
        info.labels.items()
        >= {
            "model_name": "m",
            "engine": "0",
            "block_size": "16",
            "cache_dtype": "fp8",
            "gpu_memory_utilization": "0.92",
            "enable_prefix_caching": "True",
            "num_gpu_blocks": "21",
            "kv_cache_max_concurrency": "3.0",
            "kv_cache_size_tokens": "300",
        }.items()
    )


def test_the_log_tells_of_host_memory_where_blocks_are_kept_there(caplog: pytest.LogCaptureFixture) -> None:
    metrics, now = EngineMetrics("m", 100), 0.0
    log = StatLogger([metrics], interval_seconds=10, clock=lambda: now)
    host = {"num_running": 1, "num_host_slots": 8, "num_used_host_slots": 4}
    host |= {"external_prefix_cache_queries": 10, "external_prefix_cache_hits": 4}
    told = []
    with caplog.at_level(logging.INFO, "jaxllm"):
        for more in ({"num_loading": 2}, {}):
            metrics.load = fake_stats(**host, **more)
            now += 10
            log.tick()
            told.append(caplog.messages[-1])
    assert told[0].endswith(", host memory 50.0%, its hits 40.0%, loading 2") and told[1].endswith(", host memory 50.0%")


def test_the_log_tells_of_prompts_that_prefill_engines_of_the_server_computed(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = EngineMetrics("m", 100, engine="0"), EngineMetrics("m", 100, engine="1")
    now = 0.0
    log = StatLogger([prefill, decode], interval_seconds=10, clock=lambda: now)
    prefill.prompt_handed_over(95)
    decode.prefill_done(100, 96, 0.03, loaded_tokens={"peer": 96})
    now += 10
    with caplog.at_level(logging.INFO, "jaxllm"):
        log.tick()
    assert caplog.messages[-1].startswith("prompt 9.9 tokens/s, generation 0.0 tokens/s")
    assert not any("handed" in metric.name for metric in prefill.snapshot())


def test_series_that_gateways_add_up_are_always_there() -> None:
    def values(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
        return {
            (metric.name.removeprefix("jaxllm:"), metric.labels.get("source", "")): metric.value
            for metric in metrics.snapshot()
            if isinstance(metric, Counter)
        }

    metrics = EngineMetrics("m", 100)
    absent = {(f"{cache}_{what}", "") for cache in ("external_prefix_cache", "mm_cache") for what in ("queries", "hits")}
    elsewhere = {("prompt_tokens_cached_by_source", source) for source in ("host", "p2p", "disk", "external_unspecified")}
    zero = absent | elsewhere | {("prompt_tokens_by_source", "external_kv_transfer")}
    on_device = ("prompt_tokens_cached_by_source", "device")
    assert values(metrics).items() >= dict.fromkeys(zero | {on_device}, 0).items()
    metrics.prefill_done(20, 5, 0.03)
    assert values(metrics).items() >= {**dict.fromkeys(zero, 0), on_device: 5}.items()


def test_loaded_tokens_are_counted_by_tier_and_add_up_to_the_cached_ones() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.prefill_done(60, 40, 0.03, loaded_tokens={"host": 16, "peer": 8})
    metrics.prefill_done(60, 10, None, loaded_tokens={"disk": 4, "own connector": 2})
    found = [metric for metric in metrics.snapshot() if isinstance(metric, Counter)]

    def by(name: str, *labels: str) -> dict[tuple[str | None, ...], float]:
        own = [metric for metric in found if metric.name == f"jaxllm:{name}"]
        return {tuple(metric.labels.get(label) for label in labels): metric.value for metric in own}

    tiers = {"host": 16, "p2p": 8, "disk": 4, "external_unspecified": 2}
    assert by("prompt_tokens_by_source", "source", "tier") == {
        ("local_compute", ""): 70,
        ("local_cache_hit", ""): 20,
        **{("external_kv_transfer", tier): count for tier, count in tiers.items()},
    }
    cached = by("prompt_tokens_cached_by_source", "source")
    assert cached == {("device",): 20, **{(tier,): count for tier, count in tiers.items()}}
    assert sum(cached.values()) == metrics.prompt_tokens_cached


def test_a_client_leaves_out_what_the_engine_counts_for_all() -> None:
    own = {metric.name for metric in busy_metrics().snapshot(of_engine=False)}
    shared = {metric.name for metric in busy_metrics().snapshot()} - own
    assert "jaxllm:generation_tokens" in own
    assert {"jaxllm:num_requests_running", "jaxllm:prefix_cache_hits", "jaxllm:iteration_tokens_total"} <= shared


def test_the_page_has_the_metrics_and_those_of_the_process() -> None:
    body = exposition(busy_metrics().snapshot())
    assert b"\njaxllm:generation_tokens_total{" in body and b"process_resident_memory_bytes" in body


def test_count_buckets_go_up_to_the_limit() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100] and one_two_five(1) == [1]


def test_the_log_line_comes_once_an_interval_and_not_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    metrics = EngineMetrics("m", 100)
    log = StatLogger([metrics], interval_seconds=10, clock=lambda: now)

    def lines_until(time: float) -> list[str]:
        nonlocal now
        caplog.clear()
        while now < time:
            now += 1
            log.tick()
        return caplog.messages

    with caplog.at_level(logging.INFO, "jaxllm"):
        assert lines_until(20) == []
        metrics.load = fake_stats(num_running=3, num_waiting=4, cache_usage=0.5, prefix_cache_queries=10, prefix_cache_hits=5)
        metrics.prefill_done(20, 5, 0.1)
        metrics.add_generation_tokens(40)
        (line,) = lines_until(30)
        assert "prompt 1.5 tokens/s, generation 4.0 tokens/s, running 3, waiting 4, KV cache 50.0%" in line
        assert "prefix cache hits 50.0%" in line and "preemptions" not in line
        metrics.load = fake_stats(num_running=1, num_preemptions=3, num_rejected_for_tokens=2)
        assert "preemptions 3, turned away 2" in lines_until(40)[0]
        metrics.load = fake_stats()
        drafts = {"num_drafts": 40, "num_draft_tokens": 80, "num_accepted_tokens": 60, "accepted_per_position": (40, 20)}
        metrics.load = fake_stats(num_running=1, **drafts, num_speculative_tokens=2)
        _, line = lines_until(50)
        assert line == (
            "speculative decoding: mean acceptance length 2.50, accepted 6.0 tokens/s, drafted 8.0 tokens/s, acceptance rate 75.0%, "
            "by position 100% 50%, up to 2 drafts a request now"
        )
        drafts |= {"num_drafts": 41, "num_draft_tokens": 82}
        metrics.load = fake_stats(num_running=1, **drafts)
        assert lines_until(60)[1].endswith("acceptance rate 0.0%, by position 0% 0%, off now")
        assert len(lines_until(70)) == 1, "nothing was drafted"
        metrics.load = fake_stats(prefix_cache_queries=10, prefix_cache_hits=5)
        assert len(lines_until(80)) == 1, "the line after the last work"
        assert lines_until(110) == []
    with caplog.at_level(logging.DEBUG, "jaxllm"):
        assert len(lines_until(130)) == 2, "idle lines are for the debug level"
