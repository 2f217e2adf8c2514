"""Fetches the tokens of experts from the devices now and then, and adds them up."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.expert_load.layout import Layout
from jaxllm.log import logger

if TYPE_CHECKING:
    from jaxllm.scheduler_stats import SchedulerStats

INTERVAL_SECONDS = 10.0
"""Between two readings while the engine computes. In this time no count on a device exceeds an int32."""
IDLE_SECONDS = 0.1
"""At least so long after a reading at the end of all work there is another."""


class PendingCounts(Protocol):
    """See `jaxllm.engine.executor.PendingCounts`."""

    def is_ready(self) -> bool: ...
    def result(self) -> np.ndarray: ...


class Counter(Protocol):
    """What a reader uses of an executor."""

    def take_expert_tokens(self) -> PendingCounts: ...


class LoadReader:
    """Totals since the start. While the engine computes, a reading is on its way during later steps, so neither the host nor the device
    waits; when all work is done there is nothing to wait for."""

    def __init__(self, counter: Counter, layout: Layout, *, clock: Callable[[], float] = time.monotonic):
        self._counter, self._layout, self._clock = counter, layout, clock
        self._pending: PendingCounts | None = None
        self._work_began: float | None = None
        """When the first step ended that no reading has counted."""
        self._idle_read_at = -np.inf
        most = max(layout.num_experts, default=0)
        self.tokens_LE = np.zeros((len(layout.layers), most), np.int64)
        """By mixture and expert."""
        self._even = [0.0] * layout.num_layers
        """By layer of the model, what a device would have got if all had got as many, added up over readings."""
        self._busiest = [0.0] * layout.num_layers
        """The same of the device that got most."""
        self.balance = 1.0
        """Of the latest reading: see `balance_of`."""

    def note_step(self, *, is_idle: bool) -> None:
        """A step was read; is_idle: there is nothing else to compute."""
        now = self._clock()
        if self._pending is not None and self._pending.is_ready():
            self._finish()
        if self._work_began is None:
            self._work_began = now
        if is_idle and now - self._idle_read_at >= IDLE_SECONDS:
            self._idle_read_at = now
            self.read()
        elif self._pending is None and now - self._work_began >= INTERVAL_SECONDS:
            self._take()

    def read(self) -> None:
        """Count all steps dispatched so far. Waits for them."""
        self._finish()
        self._take()
        self._finish()

    def forget(self) -> None:
        """The counts on the devices are lost."""
        self._pending = self._work_began = None

    def table(self) -> dict[str, Any]:
        """The layers with a mixture, and for each the tokens of every expert so far."""
        self.read()
        rows = zip(self.tokens_LE.tolist(), self._layout.num_experts, strict=True)
        return {"layers": list(self._layout.layers), "tokens": [tokens[:size] for tokens, size in rows]}

    def add_stats(self, stats: "SchedulerStats") -> None:
        """Set what the stats tell of experts."""
        stats.even_expert_load, stats.busiest_expert_load = tuple(self._even), tuple(self._busiest)
        stats.expert_balance = self.balance

    def _take(self) -> None:
        self._pending, self._work_began = self._counter.take_expert_tokens(), None

    def _finish(self) -> None:
        """Add up the reading that is on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            tokens_LE = pending.result()
        except Exception as error:  # of a step before, whose own results tell it
            logger.debug("the tokens of experts cannot be read: %s", error)
            return
        self._add(tokens_LE.astype(np.int64))

    def _add(self, tokens_LE: np.ndarray) -> None:
        if not tokens_LE.any():
            return
        self.tokens_LE += tokens_LE
        loads = [self._layout.loads(i, tokens_E) for i, tokens_E in enumerate(tokens_LE)]
        for layer, load in zip(self._layout.layers, loads, strict=True):
            self._even[layer] += float(load.mean())
            self._busiest[layer] += float(load.max())
        self.balance = balance_of(loads)


def balance_of(loads: list[np.ndarray]) -> float:
    """The mean load over the largest, both summed over layers: the share of the time of experts in which a device computes, if the
    busiest is waited for in each layer. loads: of each layer, those of its devices."""
    busiest = sum(float(load.max()) for load in loads)
    return sum(float(load.mean()) for load in loads) / busiest if busiest else 1.0
