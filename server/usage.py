"""Usage in a reply: tokens and, if requested, times."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.acceptance import Acceptance
from jaxllm.outputs import RequestMetrics, RequestOutput
from jaxllm.text.input_processor import ParentRequest


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, over all its prompts and answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None: not reported."""
    loaded_tokens: Mapping[str, int] | None = None
    """The part of these that was not on the devices but loaded, by source."""
    created_cache_tokens: int = 0
    """Prompt tokens that were written to the prefix cache."""
    reasoning_tokens: int | None = None
    """None: the model does not reason."""
    multimodal_tokens: Mapping[str, int] | None = None
    """Prompt tokens that stand for items, by their kind; None: there are no items."""

    def as_dict(self, *, tells_cached: bool = True) -> dict[str, Any]:
        """In OpenAI's format."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if tells_cached and self.cached_tokens is not None:
            found["prompt_tokens_details"] = {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_cache_tokens,
                **({"cached_tokens_by_source": self._by_source()} if self.loaded_tokens else {}),
                **({"audio_tokens": audio} if (audio := (self.multimodal_tokens or {}).get("audio")) else {}),
                **({"multimodal_tokens": dict(self.multimodal_tokens)} if self.multimodal_tokens else {}),
            }
        if self.reasoning_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return found

    def set_cached(self, output: RequestOutput) -> None:
        """Take the cached tokens of the only prompt."""
        self.cached_tokens, self.created_cache_tokens = output.num_cached_tokens, output.num_cache_creation_tokens
        self.loaded_tokens = None if output.metrics is None else output.metrics.loaded_tokens

    def add_cached(self, output: RequestOutput) -> None:
        """Add the cached tokens of a prompt."""
        self.cached_tokens = (self.cached_tokens or 0) + output.num_cached_tokens
        self.created_cache_tokens += output.num_cache_creation_tokens
        if output.metrics is not None and output.metrics.loaded_tokens:
            self.loaded_tokens = Counter(self.loaded_tokens or {}) + Counter(output.metrics.loaded_tokens)

    def _by_source(self) -> dict[str, int]:
        loaded = dict(self.loaded_tokens or {})
        return {"device": (self.cached_tokens or 0) - sum(loaded.values()), **loaded}


def multimodal_tokens(request: ParentRequest) -> Mapping[str, int] | None:
    """The tokens of a prompt's items by their kind."""
    found: dict[str, int] = {}
    for item in request.children[0].items:
        found[item.kind] = found.get(item.kind, 0) + item.num_tokens
    return found or None


def per_request_metrics(metrics: RequestMetrics | None, num_tokens: int) -> dict[str, Any] | None:
    """`metrics` of vLLM's replies for a request with one answer. The time to the first token does not include the wait in the queue;
    the speed is that of all tokens from the first step on."""
    if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
        return None
    decode, queue, prefill = metrics.finished_time - metrics.first_token_time, metrics.queue_seconds, metrics.prefill_seconds
    computed = None if prefill is None else prefill + decode
    return {
        "time_to_first_token_ms": None if prefill is None else 1000 * prefill,
        "generation_time_ms": 1000 * decode,
        "queue_time_ms": None if queue is None else 1000 * queue,
        "mean_itl_ms": 1000 * decode / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / computed if computed else None,
        "speculative_decoding": _acceptance(metrics),
    }


def _acceptance(metrics: RequestMetrics) -> dict[str, Any] | None:
    counts = metrics.accepted_counts
    if counts is None:
        return None
    num_steps, num_accepted = sum(counts), sum(num * count for num, count in enumerate(counts))
    found = Acceptance(num_steps, metrics.num_draft_tokens, num_accepted)
    return {
        "mean_acceptance_length": found.mean_length,
        "draft_acceptance_rate": found.rate,
        "acceptance_histogram": counts,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_tokens": len(counts) - 1,
    }


def timings(metrics: RequestMetrics | None, num_tokens: int) -> Mapping[str, Any] | None:
    """Timings of a request in milliseconds, and its speed in tokens per second."""
    if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
        return None
    decode = metrics.finished_time - metrics.first_token_time
    return {
        "time_to_first_token_ms": round(1000 * (metrics.first_token_time - metrics.arrival_time), 3),
        "decode_ms": round(1000 * decode, 3),
        "total_ms": round(1000 * (metrics.finished_time - metrics.arrival_time), 3),
        "tokens_per_second": round((num_tokens - 1) / decode, 2) if num_tokens > 1 and decode > 0 else None,
        "num_preemptions": metrics.num_preemptions,
    }
