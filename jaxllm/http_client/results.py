"""Computes the results of a load test, under the names of vLLM's benchmark."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.acceptance import report_lines
from jaxllm.http_client.load import LoadRun, Outcome

METRICS: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
MAX_KINDS_OF_ERROR = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Timing:
    """The latencies of one answered request, in seconds."""

    first: float
    whole: float
    gaps: list[float]
    num_output_tokens: int

    @property
    def per_token(self) -> float | None:
        """Mean time of each token after the first; None where there is only one."""
        return (self.whole - self.first) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def timing_of(outcome: Outcome) -> Timing:
    """The latencies of an answered request. Without usage from the server each chunk counts as one token."""
    times = outcome.token_times
    first = times[0] if times else outcome.start
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    num_tokens = len(times) if outcome.num_output_tokens is None else outcome.num_output_tokens
    return Timing(first - outcome.start, outcome.end - outcome.start, gaps, num_tokens)


def summary(
    run: LoadRun, *, percentiles: Sequence[float] = (99,), goodput_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Throughput, latencies and errors of a run. `goodput_ms` holds the latency limits of a good request."""
    answered = [outcome for outcome in run.outcomes if outcome.succeeded]
    timings = [timing_of(outcome) for outcome in answered]
    num_input = sum(outcome.num_prompt_tokens or 0 for outcome in answered)
    num_output = sum(timing.num_output_tokens for timing in timings)
    seconds = run.seconds
    report: dict[str, Any] = {
        "duration": seconds,
        "completed": len(answered),
        "failed": len(run.outcomes) - len(answered),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answered) / seconds,
        "request_goodput": None if goodput_ms is None else sum(_is_good(timing, goodput_ms) for timing in timings) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": _peak_tokens_per_second(answered, timings),
        "max_concurrent_requests": _peak_concurrency(run.outcomes),
        "error_kinds": _kinds([outcome.error for outcome in run.outcomes if outcome.error]),
    }
    series = {
        "ttft": [timing.first for timing in timings],
        "tpot": [each for timing in timings if (each := timing.per_token) is not None],
        "itl": [gap for timing in timings for gap in timing.gaps],
        "e2el": [timing.whole for timing in timings],
    }
    for name, values in series.items():
        report |= _statistics(name, values, percentiles)
    return report


def _kinds(errors: Sequence[str]) -> dict[str, int]:
    """Counts of the most frequent errors, each with its first text: those of a full queue differ in their numbers alone."""
    as_told: dict[str, str] = {}
    for error in errors:
        as_told.setdefault(_NUMBER.sub("0", error), error)
    counts = Counter(_NUMBER.sub("0", error) for error in errors)
    return {as_told[kind]: count for kind, count in counts.most_common(MAX_KINDS_OF_ERROR)}


def details(run: LoadRun) -> dict[str, Any]:
    """The fields that `--save-detailed` adds: one entry per request, failed ones too."""
    timings = [timing_of(outcome) for outcome in run.outcomes]
    return {
        "input_lens": [outcome.num_prompt_tokens or 0 for outcome in run.outcomes],
        "output_lens": [timing.num_output_tokens for timing in timings],
        "start_times": [outcome.start for outcome in run.outcomes],
        "ttfts": [timing.first for timing in timings],
        "itls": [timing.gaps for timing in timings],
        "generated_texts": [outcome.text for outcome in run.outcomes],
        "errors": [outcome.error or "" for outcome in run.outcomes],
    }


def as_text(report: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The summary as readable text."""
    rows: list[tuple[str, str]] = [
        ("successful requests", str(report["completed"])),
        ("failed requests", str(report["failed"])),
        ("duration", f"{report['duration']:.2f} s"),
        ("input tokens", str(report["total_input_tokens"])),
        ("output tokens", str(report["total_output_tokens"])),
        ("requests/s", f"{report['request_throughput']:.2f}"),
    ]
    if report["request_goodput"] is not None:
        rows.append(("good requests/s", f"{report['request_goodput']:.2f}"))
    rows += [
        ("output tokens/s", f"{report['output_throughput']:.2f}"),
        ("tokens/s in all", f"{report['total_token_throughput']:.2f}"),
        ("peak output tokens/s", f"{report['max_output_tokens_per_s']:.0f}"),
        ("peak concurrent requests", str(report["max_concurrent_requests"])),
    ]
    rows += report_lines(report)
    lines = [f"{name:<28}{value:>14}" for name, value in rows]
    columns = ["mean", "median", "std", *(percentile_key(percent) for percent in percentiles)]
    lines.append("\n" + f"{'milliseconds':<40}" + "".join(f"{column:>11}" for column in columns))
    for name in metrics:
        figures = (report[f"{column}_{name}_ms"] for column in columns)
        lines.append(f"{METRICS[name]:<40}" + "".join(f"{figure:>11.2f}" for figure in figures))
    if report["error_kinds"]:
        lines.append("\nerrors:")
        lines += [f"{count:>6} × {error}" for error, count in report["error_kinds"].items()]
    return "\n".join(lines)


def percentile_key(percent: float) -> str:
    """`p99`, `p99.9`"""
    return f"p{percent:g}"


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    ms = np.asarray(values or [0.0]) * 1000
    found = {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": ms.std()}
    found |= {f"{percentile_key(percent)}_{name}_ms": np.percentile(ms, percent) for percent in percentiles}
    return {key: float(value) for key, value in found.items()}


def _is_good(timing: Timing, limits_ms: Mapping[str, float]) -> bool:
    values = {"ttft": timing.first, "tpot": timing.per_token or 0.0, "e2el": timing.whole}
    return all(values[name] * 1000 <= limit for name, limit in limits_ms.items())


def _peak_tokens_per_second(answered: Sequence[Outcome], timings: Sequence[Timing]) -> float:
    """Most output tokens in one second of the run. The tokens of a request are spread evenly over its chunks."""
    if not any(outcome.token_times for outcome in answered):
        return 0.0
    began = min(outcome.start for outcome in answered)
    seconds = max(outcome.end for outcome in answered) - began
    counts = np.zeros(int(seconds) + 1)
    for outcome, timing in zip(answered, timings, strict=True):
        if outcome.token_times:
            places = (np.asarray(outcome.token_times) - began).astype(int)
            np.add.at(counts, places, timing.num_output_tokens / len(outcome.token_times))
    return float(counts.max())


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Maximum number of concurrent requests."""
    answered = [outcome for outcome in outcomes if outcome.token_times]
    changes = sorted([(outcome.end, -1) for outcome in answered] + [(outcome.start, 1) for outcome in answered])
    current = peak = 0
    for _, change in changes:
        current += change
        peak = max(peak, current)
    return peak
