"""A line in the log now and then: how fast the engine is and how full."""

import time
from collections.abc import Callable

from jaxllm.log import logger
from jaxllm.metrics.engine_metrics import EngineMetrics

INTERVAL_SECONDS = 10.0


class StatLogger:
    """Call `tick` often; it logs once per interval, unless nothing happened in this one and the one before."""

    def __init__(
        self, metrics: EngineMetrics, *, interval_seconds: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic
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
        prompt, generation, queries, hits = (new - old for new, old in zip(now, self._before, strict=True))
        self._start, self._before = self._clock(), now
        load = self._metrics.load
        is_idle = not (prompt or generation or (load is not None and load.num_running + load.num_waiting))
        if not (is_idle and self._was_idle):
            line = f"prompt {prompt / seconds:.1f} tokens/s, generation {generation / seconds:.1f} tokens/s"
            if load is not None:
                line += f", running {load.num_running}, waiting {load.num_waiting}, KV cache {load.cache_usage:.1%}"
                line += f", prefix cache hits {hits / queries:.1%}" if queries else ""
            logger.info(line)
        self._was_idle = is_idle

    def _totals(self) -> tuple[int, int, int, int]:
        metrics, load = self._metrics, self._metrics.load
        computed = metrics.prompt_tokens - metrics.prompt_tokens_cached
        queries, hits = (0, 0) if load is None else (load.prefix_cache_queries, load.prefix_cache_hits)
        return computed, metrics.generation_tokens, queries, hits
