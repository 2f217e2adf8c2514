"""Fetches the tokens of experts from the devices now and then, and adds them up."""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.device_ops import TakeCounts
from jaxllm.expert_load.layout import Layout, balance_of
from jaxllm.expert_load.rebalancer import Moves, Rebalancer
from jaxllm.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from jaxllm.scheduler_stats import SchedulerStats

INTERVAL_SECONDS = 10.0
"""Seconds between two readings while the engine computes. In this time no count on a device exceeds an int32."""
IDLE_SECONDS = 0.1
"""Least seconds between a reading at the end of all work and the next one."""


class Ops(Moves, Protocol):
    """See `jaxllm.engine.op_queue.OpQueue`."""

    def add(self, op: Any, *, done: Any = None, failed: Any = None) -> Any: ...
    def run_now(self) -> None: ...


class LoadReader:
    """Totals since the start. While the engine computes, counts come with a step's results, so neither the host nor the device waits; when
    all work is done there is nothing to wait for."""

    def __init__(
        self,
        ops: Ops,
        layout: Layout,
        rebalancer: Rebalancer | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """rebalancer: moves experts; None: they stay where they are."""
        self._ops, self._layout, self._rebalancer, self._clock = ops, layout, rebalancer, clock
        self._asked: list[Callable[[np.ndarray], None]] = []
        """Called with the totals of the next reading."""
        self._on_way: deque[list[Callable[[np.ndarray], None]]] = deque()
        """Callbacks of each reading in flight."""
        self._latest: Any = None
        """The latest reading, as `Ops.add` returned it."""
        self._work_began: float | None = None
        """When the first step ended that no reading has counted."""
        self._idle_read_at = -np.inf
        most = max(layout.num_experts, default=0)
        self.tokens_LE = np.zeros((len(layout.layers), most), np.int64)
        """Tokens by mixture and expert."""
        self._even = [0.0] * layout.num_layers
        """By layer of the model, what a device would have got if all had got as many, added up over readings."""
        self._busiest = [0.0] * layout.num_layers
        """By layer of the model, the tokens of the device that got most, added up over readings."""
        self.balance = 1.0
        """Balance of the latest reading: see `balance_of`."""

    def note_step(self, *, is_idle: bool) -> None:
        """A step was read; is_idle: there is nothing else to compute."""
        now = self._clock()
        if self._work_began is None:
            self._work_began = now
        if is_idle and now - self._idle_read_at >= IDLE_SECONDS:
            self._idle_read_at = now
            self.read()
        elif not self._on_way and (self._asked or now - self._work_began >= INTERVAL_SECONDS):
            self._take()
        if self._rebalancer is not None:
            self._rebalancer.note_step(self)

    def read(self) -> None:
        """Count all steps dispatched so far. Waits for them."""
        if not self._on_way or self._latest.is_dispatched:
            self._take()
        self._ops.run_now()

    def ask(self, answer: Callable[[np.ndarray], None]) -> None:
        """Call `answer` with the totals, as `tokens_LE`, of all steps dispatched so far, once they are here."""
        self._asked.append(answer)

    def forget_places(self) -> None:
        """The weights are lost; they will be where they are loaded to."""
        if self._rebalancer is not None:
            self._rebalancer.forget_places()

    def table(self) -> dict[str, Any]:
        """The layers with a mixture, and for each the tokens of every expert so far."""
        self.read()
        rows = zip(self.tokens_LE.tolist(), self._layout.num_experts, strict=True)
        return {"layers": list(self._layout.layers), "tokens": [tokens[:size] for tokens, size in rows]}

    def add_stats(self, stats: "SchedulerStats") -> None:
        """Set the expert fields of the stats."""
        stats.even_expert_load, stats.busiest_expert_load = tuple(self._even), tuple(self._busiest)
        stats.expert_balance = self.balance

    def _take(self) -> None:
        self._on_way.append(self._asked)
        self._asked, self._work_began = [], None
        self._latest = self._ops.add(TakeCounts(), done=self._arrive)

    def _arrive(self, result: ModelRunnerOutput | None) -> None:
        """Add up the first reading that is on its way. None: it is lost, with its counts; who asked for it asks for the next."""
        answers = self._on_way.popleft()
        if result is None:
            self._asked = [*answers, *self._asked]
            return
        self._add(result.expert_counts)
        for answer in answers:
            answer(self.tokens_LE.copy())

    def _add(self, counts: dict[int, np.ndarray]) -> None:
        tokens_LE = np.zeros_like(self.tokens_LE)
        for tokens_E, layer, size in zip(tokens_LE, self._layout.layers, self._layout.num_experts, strict=True):
            tokens_E[:size] = counts[layer][:size]
        if not tokens_LE.any():
            return
        self.tokens_LE += tokens_LE
        loads = [self._layout.loads(i, tokens_E) for i, tokens_E in enumerate(tokens_LE)]
        for layer, load in zip(self._layout.layers, loads, strict=True):
            self._even[layer] += float(load.mean())
            self._busiest[layer] += float(load.max())
        self.balance = balance_of(loads)
