import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.http_client import plot, results
from jaxllm.http_client.load import LoadRun, Outcome

VLLM_NAMES = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
)


def outcome(start: float, *times: float, tokens: int | None = None, prompt: int | None = 10) -> Outcome:
    return Outcome(start, prompt, len(times) if tokens is None else tokens, list(times), ["x"] * len(times))


def run() -> LoadRun:
    failed = Outcome(0.0, 10, error="HTTP 500: broken")
    return LoadRun([outcome(0.0, 0.1, 0.3, 0.5), outcome(1.0, 1.4, 2.4), outcome(2.0, 2.2, tokens=1), failed], 4.0)


def test_rates_count_what_was_answered() -> None:
    found = results.summary(run())
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6)
    assert (found["request_throughput"], found["output_throughput"]) == (0.75, 1.5)
    assert found["total_token_throughput"] == 9.0
    assert found["error_kinds"] == {"HTTP 500: broken": 1}


def test_refusals_that_differ_in_their_numbers_are_one_kind_of_error() -> None:
    told = [
        f"HTTP 503: the engine is overloaded: 10000 requests wait already; try again in {seconds} s" for seconds in range(9)
    ]
    found = results.summary(LoadRun([*run().outcomes, *(Outcome(0.0, 10, error=text) for text in told)], 4.0))
    assert found["error_kinds"] == {told[0]: 9, "HTTP 500: broken": 1}


def test_latencies_are_as_defined() -> None:
    found = results.summary(run(), percentiles=(25, 99))
    assert found["mean_ttft_ms"] == pytest.approx((100 + 400 + 200) / 3)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx((200 + 1000) / 2), "a single token has no time per later token"
    assert found["median_itl_ms"] == pytest.approx(200) and found["p99_itl_ms"] == pytest.approx(
        np.percentile([200, 200, 1000], 99)
    )
    assert found["mean_e2el_ms"] == pytest.approx((500 + 1400 + 200) / 3)
    assert found["p25_e2el_ms"] == pytest.approx(350)


def test_a_chunk_of_several_tokens_counts_them_all() -> None:
    found = results.summary(LoadRun([outcome(0.0, 1.0, 2.0, tokens=11)], 2.0))
    assert found["mean_tpot_ms"] == pytest.approx(100) and found["mean_itl_ms"] == pytest.approx(1000)
    assert found["max_output_tokens_per_s"] == 5.5


def test_a_server_without_usage_is_taken_to_send_a_token_a_chunk() -> None:
    assert results.timing_of(Outcome(0.0, None, None, [1.0, 2.0, 3.0])).num_output_tokens == 3


def test_goodput_counts_requests_within_all_limits() -> None:
    assert results.summary(run())["request_goodput"] is None
    assert results.summary(run(), goodput_ms={"ttft": 250})["request_goodput"] == 0.5
    assert results.summary(run(), goodput_ms={"ttft": 250, "tpot": 100})["request_goodput"] == 0.25


def test_peaks() -> None:
    overlapping = [outcome(0.0, 1.0, 3.0), outcome(0.5, 2.5), outcome(2.6, 2.7), outcome(3.0, 3.5)]
    found = results.summary(LoadRun(overlapping, 4.0))
    assert found["max_concurrent_requests"] == 2 and found["max_output_tokens_per_s"] == 2.0


def test_names_are_those_of_vllm_and_everything_is_json() -> None:
    found = json.loads(json.dumps(results.summary(run()) | results.details(run())))
    assert set(VLLM_NAMES) <= set(found)
    assert found["errors"] == ["", "", "", "HTTP 500: broken"] and found["itls"][0] == pytest.approx([0.2, 0.2])


def test_a_run_without_any_answer_has_figures_too() -> None:
    found = results.summary(LoadRun([Outcome(0.0, error="x")], 1.0))
    assert found["completed"] == 0 and found["p99_ttft_ms"] == 0.0 and found["max_concurrent_requests"] == 0
    assert "1 × x" in results.as_text(found, ("ttft",), (99,))


def test_the_text_has_the_metrics_and_percentiles_asked_for() -> None:
    text = results.as_text(results.summary(run(), percentiles=(50, 99.9)), ("ttft", "e2el"), (50, 99.9))
    assert "time to first token" in text and "inter-token" not in text and "p99.9" in text


@pytest.mark.plot
def test_a_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    plot.draw(run(), "a run", str(tmp_path / "run.svg"))
    assert "<svg" in (tmp_path / "run.svg").read_text()
    with pytest.raises(ConfigError, match="cannot write the plot"):
        plot.draw(run(), "a run", str(tmp_path / "run.nonsense"))
