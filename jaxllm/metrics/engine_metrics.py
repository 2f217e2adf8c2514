"""Counts what an engine does. Plain numbers in one thread: recording must cost next to nothing per token."""

import bisect
from collections.abc import Sequence
from typing import Protocol

from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams

PREFIX = "jaxllm:"
FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ANSWERS = (1, 2, 5, 10, 20)


class LoadStats(Protocol):
    """What `EngineCore.stats()` tells. Totals count from the start."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def cache_usage(self) -> float: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...


class _Observations:
    """A histogram while it grows."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def snapshot(self, name: str, labels: dict[str, str], help: str) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(name, labels, help, total, self.sum, buckets)


class EngineMetrics:
    """The record of one engine. Times are in seconds; the clock of the caller is used throughout."""

    def __init__(self, model_name: str, max_model_len: int, *, engine: str = "0"):
        self._labels = {"model_name": model_name, "engine": engine}
        token_counts = one_two_five(max_model_len)
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self._finished = dict.fromkeys(map(str, FinishReason), 0)
        self._first_token_seconds = _Observations(FIRST_TOKEN_SECONDS)
        self._inter_token_seconds = _Observations(TOKEN_SECONDS)
        self._request_seconds = _Observations(REQUEST_SECONDS)
        self._decode_seconds = _Observations(REQUEST_SECONDS)
        self._seconds_per_token = _Observations(TOKEN_SECONDS)
        self._request_prompt_tokens = _Observations(token_counts)
        self._request_generation_tokens = _Observations(token_counts)
        self._request_max_tokens = _Observations(token_counts)
        self._request_n = _Observations(ANSWERS)
        self.load: LoadStats | None = None
        """The engine core's own numbers, after the latest step."""
        self.programs_compiled_after_warmup = 0

    def request_arrived(self, params: SamplingParams) -> None:
        """A prompt was accepted."""
        self._request_n.add(params.n)
        if params.max_tokens is not None:
            self._request_max_tokens.add(params.max_tokens)

    def prefill_done(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None:
        """The first token of a sequence came, so long after its arrival."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        self._first_token_seconds.add(seconds)

    def tokens_done(self, seconds: float, count: int) -> None:
        """A later token came for so many sequences, so long after the one before it."""
        self._inter_token_seconds.add(seconds, count)

    def add_generation_tokens(self, count: int) -> None:
        """Tokens came."""
        self.generation_tokens += count

    def request_finished(
        self, reason: str, *, num_prompt_tokens: int, num_generation_tokens: int, seconds: float, decode_seconds: float | None
    ) -> None:
        """A sequence ended, `seconds` after its arrival and `decode_seconds` after its first token (None: it had none)."""
        self._finished[reason] += 1
        self._request_seconds.add(seconds)
        self._request_prompt_tokens.add(num_prompt_tokens)
        self._request_generation_tokens.add(num_generation_tokens)
        if decode_seconds is not None:
            self._decode_seconds.add(decode_seconds)
            if num_generation_tokens > 1:
                self._seconds_per_token.add(decode_seconds / (num_generation_tokens - 1))

    def snapshot(self, *, of_engine: bool = True) -> list[Metric]:
        """Every metric as it is now, with or without those that the engine core counts for all fronts together."""
        found: list[Metric] = []

        def gauge(name: str, value: float, help: str) -> None:
            found.append(Gauge(PREFIX + name, self._labels, help, value))

        def counter(name: str, value: int, help: str, **labels: str) -> None:
            found.append(Counter(PREFIX + name, {**self._labels, **labels}, help, value))

        def histogram(name: str, observations: _Observations, help: str) -> None:
            found.append(observations.snapshot(PREFIX + name, self._labels, help))

        if of_engine and (load := self.load) is not None:
            gauge("num_requests_running", load.num_running, "requests in the running batch")
            gauge("num_requests_waiting", load.num_waiting, "requests waiting for a place in the batch")
            gauge("kv_cache_usage_perc", load.cache_usage, "fraction of the KV cache in use, 0 to 1")
            counter("prefix_cache_queries", load.prefix_cache_queries, "tokens looked up in the prefix cache")
            counter("prefix_cache_hits", load.prefix_cache_hits, "tokens found in the prefix cache")
            counter("num_preemptions", load.num_preemptions, "times that a running request lost its place")
        if of_engine:
            counter("programs_compiled_after_warmup", self.programs_compiled_after_warmup, "programs compiled while serving")
        counter("prompt_tokens", self.prompt_tokens, "prompt tokens of requests that got their first token")
        counter("prompt_tokens_cached", self.prompt_tokens_cached, "those of them that came from the prefix cache")
        counter("generation_tokens", self.generation_tokens, "output tokens")
        for reason, count in self._finished.items():
            counter("request_success", count, "ended sequences", finished_reason=reason)
        histogram("time_to_first_token_seconds", self._first_token_seconds, "from arrival to the first token")
        histogram("inter_token_latency_seconds", self._inter_token_seconds, "between tokens of a sequence")
        histogram("e2e_request_latency_seconds", self._request_seconds, "from arrival to the end")
        histogram("request_decode_time_seconds", self._decode_seconds, "from the first token to the last")
        histogram("request_time_per_output_token_seconds", self._seconds_per_token, "mean time per token after the first")
        histogram("request_prompt_tokens", self._request_prompt_tokens, "prompt tokens of ended sequences")
        histogram("request_generation_tokens", self._request_generation_tokens, "output tokens of ended sequences")
        histogram("request_params_n", self._request_n, "answers asked for")
        histogram("request_params_max_tokens", self._request_max_tokens, "most output tokens asked for")
        return found


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to the limit."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [decade * step for step in (1, 2, 5) if decade * step <= limit]
        decade *= 10
    return bounds
