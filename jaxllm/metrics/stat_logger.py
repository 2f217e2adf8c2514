"""Logs a line at intervals: speed and load of the engine, and a second one for the acceptance of drafts."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from jaxllm.acceptance import Acceptance, percentages
from jaxllm.log import logger
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.scheduler_stats import SchedulerStats, total

INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class _Totals:
    """Totals since the start; the line reports their differences."""

    computed: int
    """Prompt tokens not taken from the cache."""
    generated: int
    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    rejections: int = 0
    drafts: Acceptance = Acceptance()
    even_expert_load: float = 0.0
    busiest_expert_load: float = 0.0
    external_queries: int = 0
    external_hits: int = 0

    def __sub__(self, earlier: "_Totals") -> "_Totals":
        return _Totals(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)))


class StatLogger:
    """Logs what an engine, or several together, did. Call `tick` often; it logs once per interval, below "info" if nothing happened
    in this interval and the one before."""

    def __init__(
        self,
        metrics: Sequence[EngineMetrics],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._metrics = metrics
        self._interval = interval_seconds
        self._clock = clock
        self._start = clock()
        self._before = self._totals()
        self._was_idle = True

    def tick(self) -> None:
        """Log, if it is time."""
        seconds = self._clock() - self._start
        if seconds < self._interval:
            return
        now = self._totals()
        change = now - self._before
        self._start, self._before = self._clock(), now
        load = self._load()
        is_idle = not (change.computed or change.generated or (load is not None and load.num_running + load.num_waiting))
        logger.log(logging.DEBUG if is_idle and self._was_idle else logging.INFO, "%s", self._line(change, seconds))
        if load is not None and change.drafts.num_drafts > 0:
            logger.info("%s", _line_of_drafts(change.drafts, load.num_speculative_tokens, seconds))
        self._was_idle = is_idle

    def _line(self, change: _Totals, seconds: float) -> str:
        parts = [f"prompt {change.computed / seconds:.1f} tokens/s", f"generation {change.generated / seconds:.1f} tokens/s"]
        if (load := self._load()) is not None:
            parts += [f"running {load.num_running}", f"waiting {load.num_waiting}"]
            parts += [f"preemptions {change.preemptions}"] if change.preemptions else []
            parts += [f"turned away {change.rejections}"] if change.rejections else []
            parts.append(f"KV cache {load.cache_usage:.1%}")
            parts += [f"prefix cache hits {change.hits / change.queries:.1%}"] if change.queries else []
            if load.num_host_slots:
                parts.append(f"host memory {load.num_used_host_slots / load.num_host_slots:.1%}")
                parts += [f"its hits {change.external_hits / change.external_queries:.1%}"] if change.external_queries else []
                parts += [f"loading {load.num_loading}"] if load.num_loading else []
            busiest = change.busiest_expert_load
            parts += [f"balance of experts {change.even_expert_load / busiest:.2f}"] if busiest else []
        return ", ".join(parts)

    def _load(self) -> SchedulerStats | None:
        loads = [metrics.load for metrics in self._metrics if metrics.load is not None]
        return total(loads) if loads else None

    def _totals(self) -> _Totals:
        load = self._load()
        computed = sum(
            metrics.prompt_tokens - metrics.prompt_tokens_cached + metrics.prompt_tokens_handed_over
            for metrics in self._metrics
        )
        generated = sum(metrics.generation_tokens for metrics in self._metrics)
        if load is None:
            return _Totals(computed, generated)
        return _Totals(
            computed,
            generated,
            load.prefix_cache_queries,
            load.prefix_cache_hits,
            load.num_preemptions,
            load.num_rejected_for_requests + load.num_rejected_for_tokens + load.num_rejected_for_images,
            Acceptance.of(load),
            sum(load.even_expert_load),
            sum(load.busiest_expert_load),
            load.external_prefix_cache_queries,
            load.external_prefix_cache_hits,
        )


def _line_of_drafts(drafts: Acceptance, most_now: int, seconds: float) -> str:
    return (
        f"speculative decoding: mean acceptance length {drafts.mean_length:.2f}, "
        f"accepted {drafts.num_accepted_tokens / seconds:.1f} tokens/s, drafted {drafts.num_draft_tokens / seconds:.1f} tokens/s, "
        f"acceptance rate {drafts.rate:.1%}, by position {percentages(drafts.rates_per_position)}, "
        + (f"up to {most_now} drafts a request now" if most_now else "off now")
    )
