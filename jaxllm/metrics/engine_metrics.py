"""Counts what an engine does. Plain numbers in one thread: recording must cost almost nothing per token."""

from collections.abc import Mapping
from dataclasses import asdict

from jaxllm.config import CacheOptions
from jaxllm.metrics import buckets
from jaxllm.metrics.collect import Collected
from jaxllm.metrics.engine_load import add_load
from jaxllm.metrics.media_counts import MediaCounts
from jaxllm.metrics.metric import Metric
from jaxllm.observations import Observations
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_stats import SchedulerStats

DEVICE = "device"
TIER_LABELS = {"host": "host", "peer": "p2p", "disk": "disk"}
OTHER_TIER = "external_unspecified"
TIERS = (*TIER_LABELS.values(), OTHER_TIER)
"""vLLM's names of the places that cached tokens are loaded from. All are always there, because gateways add them up."""


def cache_labels(options: CacheOptions) -> dict[str, str]:
    """The options of the KV cache under vLLM's names, without objects, which a user-defined store reads."""
    values = {name: value for name, value in asdict(options).items() if name != "kv_transfer_config"}
    return {name.replace("kv_cache_dtype", "cache_dtype"): str(value) for name, value in values.items()}


class EngineMetrics:
    """The counters of one engine, or of one API server's part of it. Times are in seconds of the caller's clock."""

    def __init__(
        self, model_name: str, max_model_len: int, *, engine: str = "0", cache_config: Mapping[str, str] | None = None
    ):
        self._labels = {"model_name": model_name, "engine": engine}
        self._cache_config = dict(cache_config or {})
        self._max_model_len = max_model_len
        token_counts = buckets.one_two_five(max_model_len)
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.prompt_tokens_loaded = dict.fromkeys(TIERS, 0)
        """The part of the cached ones that tiers loaded."""
        self.prompt_tokens_handed_over = 0
        """Prompt tokens that it computed for decode engines of the same server, for the log: their requests count there."""
        self.generation_tokens = 0
        self._finished = dict.fromkeys(map(str, FinishReason), 0)
        self._first_token_seconds = Observations(buckets.FIRST_TOKEN_SECONDS)
        self._inter_token_seconds = Observations(buckets.TOKEN_SECONDS)
        self._request_seconds = Observations(buckets.REQUEST_SECONDS)
        self._queue_seconds = Observations(buckets.PHASE_SECONDS)
        self._prefill_seconds = Observations(buckets.PHASE_SECONDS)
        self._decode_seconds = Observations(buckets.REQUEST_SECONDS)
        self._inference_seconds = Observations(buckets.REQUEST_SECONDS)
        self._seconds_per_token = Observations(buckets.TOKEN_SECONDS)
        self._request_prompt_tokens = Observations(token_counts)
        self._request_computed_tokens = Observations(token_counts)
        self._request_generation_tokens = Observations(token_counts)
        self._longest_generation_tokens = Observations(token_counts)
        self._request_max_tokens = Observations(token_counts)
        self._request_n = Observations(buckets.ANSWERS)
        self._request_preemptions = Observations(buckets.PREEMPTIONS)
        self.load: SchedulerStats | None = None
        """Store the engine core's own numbers, after the latest step."""
        self.programs_compiled_after_warmup = 0
        self.media_kinds: tuple[str, ...] = ()
        """Store the kinds of items that the model takes with text, and the numbers of their preparation."""
        self.media_counts = MediaCounts()

    def request_arrived(self, params: SamplingParams) -> None:
        """A prompt was accepted."""
        self._request_n.add(params.n)
        if params.max_tokens is not None:
            self._request_max_tokens.add(params.max_tokens)

    def prefill_done(
        self,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        seconds: float | None,
        *,
        loaded_tokens: Mapping[str, int] | None = None,
        queue_seconds: float | None = None,
        prefill_seconds: float | None = None,
    ) -> None:
        """Record a sequence's first token, or a prompt's vectors (`seconds` None): time since arrival, the part of the cached tokens that
        tiers loaded, and queue and compute times, if the core reported them."""
        if seconds is not None:
            self._first_token_seconds.add(seconds)
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        for source, count in (loaded_tokens or {}).items():
            self.prompt_tokens_loaded[TIER_LABELS.get(source, OTHER_TIER)] += count
        self._request_computed_tokens.add(num_prompt_tokens - num_cached_tokens)
        if queue_seconds is not None:
            self._queue_seconds.add(queue_seconds)
        if prefill_seconds is not None:
            self._prefill_seconds.add(prefill_seconds)

    def prompt_handed_over(self, num_computed_tokens: int) -> None:
        """A prompt was computed for a decode engine of the same server, where its request counts."""
        self.prompt_tokens_handed_over += num_computed_tokens

    def tokens_done(self, seconds: float, count: int) -> None:
        """Record a later token of this many sequences, and the time since the one before it."""
        self._inter_token_seconds.add(seconds, count)

    def add_generation_tokens(self, count: int) -> None:
        """Count tokens."""
        self.generation_tokens += count

    def request_finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_generation_tokens: int,
        seconds: float,
        decode_seconds: float | None,
        prefill_seconds: float | None = None,
        num_preemptions: int = 0,
    ) -> None:
        """Record a sequence's end, `seconds` after its arrival, `decode_seconds` after its first token (None: it had none)."""
        self._finished[reason] += 1
        self._request_seconds.add(seconds)
        self._request_prompt_tokens.add(num_prompt_tokens)
        self._request_generation_tokens.add(num_generation_tokens)
        self._request_preemptions.add(num_preemptions)
        if decode_seconds is not None:
            self._decode_seconds.add(decode_seconds)
            if num_generation_tokens > 1:
                self._seconds_per_token.add(decode_seconds / (num_generation_tokens - 1))
            if prefill_seconds is not None:
                self._inference_seconds.add(prefill_seconds + decode_seconds)

    def all_answers_finished(self, num_longest_tokens: int) -> None:
        """Record that all answers to a prompt have ended; the longest has this many tokens."""
        self._longest_generation_tokens.add(num_longest_tokens)

    def snapshot(self, *, of_engine: bool = True) -> list[Metric]:
        """The current value of every metric, with or without those that the engine core counts for all API servers together."""
        found = Collected(self._labels)
        if of_engine:
            self._add_engine(found)
        self._add_counters(found)
        self._add_histograms(found)
        return found.metrics

    def _add_engine(self, found: Collected) -> None:
        cache_config = self._cache_config
        if self.load is not None:
            add_load(found, self.load)
            cache_config = cache_config and cache_config | self._cache_size(self.load)
        found.counter("programs_compiled_after_warmup", self.programs_compiled_after_warmup, "programs compiled while serving")
        if cache_config:
            found.gauge("cache_config_info", 1, "options and size of the KV cache, as labels", **cache_config)
        asked, loaded = (
            (0, 0) if self.load is None else (self.load.external_prefix_cache_queries, self.load.external_prefix_cache_hits)
        )
        looked_up = "tokens that the devices did not have, looked up in host memory (--kv-offloading-size) and behind it"
        found.counter("external_prefix_cache_queries", asked, looked_up)
        found.counter("external_prefix_cache_hits", loaded, "those of them that were loaded from there")
        queries, hits = (self.load.item_cache_queries, self.load.item_cache_hits) if self.load is not None else (0, 0)
        found.counter(
            "mm_cache_queries", queries, "images and clips of audio of prompts, each when its first token was computed"
        )
        found.counter("mm_cache_hits", hits, "those of them that the encoder cache had; the others were encoded")

    def _cache_size(self, load: SchedulerStats) -> dict[str, str]:
        return {
            "num_gpu_blocks": str(load.num_cache_blocks),
            "kv_cache_max_concurrency": str(load.max_concurrency),
            "kv_cache_size_tokens": str(int(load.max_concurrency * self._max_model_len)),
        }

    def _add_counters(self, found: Collected) -> None:
        found.counter(
            "prompt_tokens", self.prompt_tokens, "prompt tokens of requests that got their first token or their vector"
        )
        found.counter("prompt_tokens_cached", self.prompt_tokens_cached, "those of them that came from the prefix cache")
        by_source = "prompt tokens by where they came from: computed, found on the devices, or loaded, these by tier"
        cached_in = "cached prompt tokens by where they were kept when their request asked for them"
        computed = self.prompt_tokens - self.prompt_tokens_cached
        on_device = self.prompt_tokens_cached - sum(self.prompt_tokens_loaded.values())
        found.counter("prompt_tokens_by_source", computed, by_source, source="local_compute", tier="")
        found.counter("prompt_tokens_by_source", on_device, by_source, source="local_cache_hit", tier="")
        found.counter("prompt_tokens_cached_by_source", on_device, cached_in, source=DEVICE)
        for tier, count in self.prompt_tokens_loaded.items():
            found.counter("prompt_tokens_by_source", count, by_source, source="external_kv_transfer", tier=tier)
            found.counter("prompt_tokens_cached_by_source", count, cached_in, source=tier)
        found.counter("generation_tokens", self.generation_tokens, "output tokens")
        for reason, count in self._finished.items():
            found.counter("request_success", count, "ended sequences", finished_reason=reason)
        for kind in self.media_kinds:
            found.counter("mm_items", self.media_counts.num_items[kind], "items of prompts that were prepared", kind=kind)
        if self.media_kinds:
            fetched = "bytes of items that were fetched from http(s) addresses, or read from files that requests name"
            found.counter("mm_fetched_bytes", self.media_counts.fetched_bytes, fetched)

    def _add_histograms(self, found: Collected) -> None:
        histogram = found.histogram
        histogram("time_to_first_token_seconds", self._first_token_seconds, "from arrival to the first token")
        histogram("inter_token_latency_seconds", self._inter_token_seconds, "between tokens of a sequence")
        histogram("e2e_request_latency_seconds", self._request_seconds, "from arrival to the end")
        histogram("request_queue_time_seconds", self._queue_seconds, "from the engine core's queue to the first step")
        histogram("request_prefill_time_seconds", self._prefill_seconds, "from the first step to the first token or the vector")
        histogram("request_decode_time_seconds", self._decode_seconds, "from the first token to the last")
        histogram("request_inference_time_seconds", self._inference_seconds, "from the first step to the last token")
        histogram("request_time_per_output_token_seconds", self._seconds_per_token, "mean time per token after the first")
        histogram("request_prompt_tokens", self._request_prompt_tokens, "prompt tokens of ended sequences")
        histogram("request_prefill_kv_computed_tokens", self._request_computed_tokens, "prompt tokens that were not cached")
        histogram("request_generation_tokens", self._request_generation_tokens, "output tokens of ended sequences")
        histogram("request_max_num_generation_tokens", self._longest_generation_tokens, "output tokens of the longest answer")
        histogram("request_params_n", self._request_n, "answers asked for")
        histogram("request_params_max_tokens", self._request_max_tokens, "most output tokens asked for")
        histogram("request_num_preemptions", self._request_preemptions, "times that an ended sequence lost its place")
        if self.media_kinds:
            prepared = "preparing an item of a prompt, of a transcription each clip; one that was kept is only hashed"
            histogram("mm_preparation_time_seconds", self.media_counts.seconds, prepared)
