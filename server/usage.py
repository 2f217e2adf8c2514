"""Usage in a reply: tokens and, if requested, times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.outputs import RequestMetrics


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, over all its prompts and answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None: not reported."""
    reasoning_tokens: int | None = None
    """None: the model does not reason."""

    def as_dict(self, *, tells_cached: bool = True) -> dict[str, Any]:
        """In OpenAI's format."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if tells_cached and self.cached_tokens is not None:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return found


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
