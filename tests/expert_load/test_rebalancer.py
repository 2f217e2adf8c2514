"""When experts move, and by which tokens. Without a device."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.device_ops import MoveExperts
from jaxllm.expert_load.layout import Layout
from jaxllm.expert_load.rebalancer import Rebalancer
from jaxllm.log import logger
from jaxllm.options.eplb import EplbConfig


class Engine:
    """Two layers of four experts on two devices, which get what `tokens` says in each step."""

    def __init__(self, **options: int | bool):
        self.layout = Layout(layers=(0, 2), num_experts=(4, 4), num_layers=3, num_devices=2)
        self.rebalancer = Rebalancer(self, self.layout, EplbConfig.of(options))
        self.totals_LE = np.zeros((2, 4), np.int64)
        self.moved: list[tuple[int, int]] = []
        """Step and layer."""
        self.num_steps = 0
        self._answers: list[Callable[[np.ndarray], None]] = []

    def ask(self, answer: Callable[[np.ndarray], None]) -> None:
        self._answers.append(answer)

    def add(self, op: MoveExperts, *, failed: Callable[[Exception], None]) -> None:
        self.moved.append((self.num_steps, op.layer))
        self.failed = failed
        assert np.array(op.moves).shape[::2] == (2, 2) and [row[0] for row in op.table] == [1] * 4

    def step(self, tokens: list[int], count: int = 1) -> None:
        """Readings arrive with the next step."""
        for _ in range(count):
            self.num_steps += 1
            self.totals_LE += np.array(tokens)
            answers, self._answers = self._answers, []
            for answer in answers:
                answer(self.totals_LE.copy())
            self.rebalancer.note_step(self)


FIRST_TWO, LAST_TWO, ODD = [9, 9, 0, 0], [0, 0, 9, 9], [9, 1, 9, 1]


def test_a_layer_moves_in_each_step_after_the_window() -> None:
    engine = Engine(step_interval=20, window_size=10)
    engine.step(FIRST_TWO, 19)
    assert [layer for _, layer in engine.moved] == [0, 2] and engine.moved[1][0] - engine.moved[0][0] == 1
    assert all(set(slots[:2].tolist()) not in ({0, 1}, {2, 3}) for slots in engine.layout.slots)
    engine.step(FIRST_TWO, 60)
    assert len(engine.moved) == 2, "the load is as before, and even now"


def test_experts_whose_move_failed_are_where_they_were() -> None:
    engine = Engine(step_interval=20, window_size=10)
    engine.step(FIRST_TWO, 11)
    assert engine.moved == [(11, 0)] and engine.layout.slots[0].tolist() != [0, 1, 2, 3]
    engine.failed(RuntimeError("the device is broken"))
    assert engine.layout.slots[0].tolist() == [0, 1, 2, 3]


def test_tokens_before_the_window_do_not_matter() -> None:
    engine = Engine(step_interval=20, window_size=5)
    engine.step(ODD, 12)  # even from the start: the first window comes at once
    assert not engine.moved
    engine.step(FIRST_TWO, 6)
    engine.step(ODD, 14)
    assert not engine.moved
    engine.step(FIRST_TWO, 20)
    assert len(engine.moved) == 2


def test_weights_that_are_loaded_anew_are_in_their_first_places() -> None:
    engine = Engine(step_interval=4, window_size=4)
    engine.step(LAST_TWO, 8)
    assert engine.moved
    engine.rebalancer.forget_places()
    assert [slots.tolist() for slots in engine.layout.slots] == [[0, 1, 2, 3]] * 2
    engine.step(LAST_TWO, 12)
    assert len(engine.moved) == 4


@pytest.mark.parametrize("log_balancedness", [False, True])
def test_the_balance_is_logged_if_that_is_asked_for(caplog: pytest.LogCaptureFixture, log_balancedness: bool) -> None:
    logger.propagate = True
    caplog.set_level(logging.INFO, logger.name)
    Engine(step_interval=4, log_balancedness=log_balancedness).step(FIRST_TWO, 9)
    assert ("balance of experts 0.50, expected 1.00 after" in caplog.text) == log_balancedness
