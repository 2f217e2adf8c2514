"""Moves experts between devices by the tokens of a window of steps: a layer between two steps, so that no step waits for long."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from jaxllm.device_ops import MoveExperts
from jaxllm.expert_load.balancer import device_loads, place, plan_moves, table_of
from jaxllm.expert_load.layout import Layout, balance_of
from jaxllm.log import logger
from jaxllm.options.eplb import EplbConfig


class Moves(Protocol):
    """See `jaxllm.engine.op_queue.OpQueue`."""

    def add(self, op: MoveExperts, *, failed: Callable[[Exception], None]) -> Any: ...


class Counts(Protocol):
    """Tells the tokens of all experts."""

    def ask(self, answer: Callable[[np.ndarray], None]) -> None:
        """Call `answer` with the totals, int64 [mixtures, experts], of all steps dispatched so far, once they are here."""


class Rebalancer:
    """Counts steps. Every `step_interval` it has the tokens of the last `window_size` read, and then moves one layer a step."""

    def __init__(self, ops: Moves, layout: Layout, config: EplbConfig):
        self._ops, self._layout, self._config = ops, layout, config
        self._num_steps = config.step_interval - config.window_size
        """Since places were last chosen; the first window opens at once."""
        self._is_asked = False
        self._opened_LE: np.ndarray | None = None
        """The totals at the beginning of the window; None before it."""
        self._waiting: deque[tuple[int, np.ndarray]] = deque()
        """Mixtures to place anew, with their tokens in the window."""
        self._loads: list[tuple[np.ndarray, np.ndarray]] = []
        """Tokens of each device in the last window, before and after, for each mixture placed since."""
        self._num_moved = 0
        """Slots that got another expert since."""

    def note_step(self, counts: Counts) -> None:
        """A step was read."""
        self._num_steps += 1
        if self._waiting:
            self._place(*self._waiting.popleft())
            if not self._waiting:
                self._report()
        elif not self._is_asked:
            interval = self._config.step_interval
            if self._opened_LE is None and self._num_steps >= interval - self._config.window_size:
                self._is_asked = True
                counts.ask(self._open)
            elif self._opened_LE is not None and self._num_steps >= interval:
                self._is_asked = True
                counts.ask(self._close)

    def forget_places(self) -> None:
        """The weights are loaded anew, each expert to its first place."""
        self._layout.start_over()
        self._waiting.clear()
        self._loads.clear()
        self._opened_LE, self._num_moved = None, 0

    def _open(self, totals_LE: np.ndarray) -> None:
        self._is_asked, self._opened_LE = False, totals_LE

    def _close(self, totals_LE: np.ndarray) -> None:
        self._is_asked = False
        if self._opened_LE is None:  # forgotten meanwhile
            return
        self._waiting.extend(enumerate(totals_LE - self._opened_LE))
        self._opened_LE, self._num_steps = None, 0

    def _place(self, mixture: int, tokens_E: np.ndarray) -> None:
        layout = self._layout
        num_experts, before_P, num_devices = layout.num_experts[mixture], layout.slots[mixture], layout.num_devices
        tokens_E = tokens_E[:num_experts]
        if not tokens_E.any():
            return
        after_P = place(before_P, tokens_E, num_devices)
        self._loads.append((device_loads(before_P, tokens_E, num_devices), device_loads(after_P, tokens_E, num_devices)))
        if np.array_equal(before_P, after_P):
            return
        moves_2RN = plan_moves(before_P, after_P, num_devices)
        table_EC = table_of(after_P, num_experts, layout.num_copies)
        op = MoveExperts(layout.layers[mixture], moves_2RN.tolist(), table_EC.tolist())
        self._ops.add(op, failed=partial(self._put_back, mixture, before_P))
        layout.slots[mixture] = after_P
        self._num_moved += int((before_P != after_P).sum())

    def _put_back(self, mixture: int, before_P: np.ndarray, error: Exception) -> None:
        """The experts did not move."""
        self._layout.slots[mixture] = before_P

    def _report(self) -> None:
        if self._loads:
            log = logger.info if self._config.log_balancedness else logger.debug
            before, after = (balance_of(list(loads)) for loads in zip(*self._loads, strict=True))
            log("balance of experts %.2f, expected %.2f after %d moves between places", before, after, self._num_moved)
        self._loads.clear()
        self._num_moved = 0
