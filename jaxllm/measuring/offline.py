"""The results of `jaxllm bench throughput` and `latency`: runs of all requests at once, and their rates or times."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.acceptance import report_lines
from jaxllm.http_client.datasets import LoadPrompt
from jaxllm.llm import LLM
from jaxllm.lora_request import LoRARequest
from jaxllm.measuring.runs import time_generation
from jaxllm.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


class OfflineRun(NamedTuple):
    """One timed run. The two lists have one number per request, if the engine recorded statistics."""

    seconds: float
    first_token_seconds: Sequence[float]
    per_token_seconds: Sequence[float]
    """Mean time of each output token after the first."""


def run_offline(
    llm: LLM, prompts: Sequence[LoadPrompt], params: Sequence[SamplingParams], loras: Sequence[LoRARequest] | None
) -> OfflineRun:
    """Run all prompts of token ids once, with an empty prefix cache. Raises ConfigError if one gets fewer tokens than it should."""
    llm.reset_prefix_cache()
    seconds, outputs = time_generation(llm, [{"prompt_token_ids": prompt.prompt} for prompt in prompts], params, loras)
    first, each = [], []
    for output in outputs:
        times, num_written = output.metrics, len(output.outputs[0].token_ids)
        if times is None or times.first_token_time is None or times.finished_time is None:
            continue
        first.append(times.first_token_time - times.arrival_time)
        if num_written > 1:
            each.append((times.finished_time - times.first_token_time) / (num_written - 1))
    return OfflineRun(seconds, first, each)


def throughput_report(prompts: Sequence[LoadPrompt], runs: Sequence[OfflineRun]) -> dict[str, Any]:
    """Rates at the median time of the timed runs."""
    seconds = statistics.median(run.seconds for run in runs)
    num_prompt = sum(prompt.num_prompt_tokens or 0 for prompt in prompts)
    num_output = sum(prompt.num_output_tokens for prompt in prompts)
    return {
        "num_requests": len(prompts),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "elapsed_seconds": seconds,
        "all_elapsed_seconds": [run.seconds for run in runs],
        "requests_per_second": len(prompts) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
        **_per_request(runs),
    }


def latency_report(prompts: Sequence[LoadPrompt], runs: Sequence[OfflineRun]) -> dict[str, Any]:
    """Average and percentiles of the time of a whole batch."""
    seconds = [run.seconds for run in runs]
    return {
        "batch_size": len(prompts),
        "input_len": prompts[0].num_prompt_tokens,
        "output_len": prompts[0].num_output_tokens,
        "avg_latency_seconds": statistics.fmean(seconds),
        "percentiles_seconds": {str(percent): float(np.percentile(seconds, percent)) for percent in PERCENTILES},
        "all_latencies_seconds": seconds,
        **_per_request(runs),
    }


def as_text(report: Mapping[str, Any]) -> str:
    """A report as readable text."""
    lines = []
    for name, value in report.items():
        if name.startswith(("all_", "spec_decode_")):
            continue
        if isinstance(value, Mapping):
            lines += [f"{'p' + percent:<36}{seconds:.4f} s" for percent, seconds in value.items()]
            continue
        unit = " s" if name.endswith("_seconds") else ""
        number = f"{value:.4f}" if unit else f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name.removesuffix('_seconds').replace('_', ' '):<36}{number}{unit}")
    lines += [f"{name:<36}{text}" for name, text in report_lines(report)]
    return "\n".join(lines)


def _per_request(runs: Sequence[OfflineRun]) -> dict[str, float]:
    report = {}
    if first := [value for run in runs for value in run.first_token_seconds]:
        report["median_time_to_first_token_seconds"] = statistics.median(first)
    if each := [value for run in runs for value in run.per_token_seconds]:
        report["median_time_per_output_token_seconds"] = statistics.median(each)
    return report
