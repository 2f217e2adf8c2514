"""Placements over random loads: complete, even, and near the ones before."""

import itertools

import numpy as np
import pytest

from jaxllm.expert_load.balancer import NEARLY, device_loads, place, plan_moves, table_of

CASES = [(8, 0, 2), (8, 2, 2), (8, 4, 4), (12, 12, 4), (64, 16, 8), (128, 0, 8), (5, 1, 3), (4, 4, 2)]
"""Experts, redundant copies, devices."""


def random_tokens(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """A few experts get many tokens, some none."""
    return rng.zipf(1.6, num_experts).clip(0, 200) * rng.integers(0, 50, num_experts)


@pytest.mark.parametrize(("num_experts", "num_redundant", "num_devices"), CASES)
def test_every_expert_has_a_slot_and_the_moves_lead_to_the_placement(num_experts, num_redundant, num_devices) -> None:
    rng = np.random.default_rng(num_experts)
    slots_P = np.arange(num_experts + num_redundant) % num_experts
    for _ in range(20):
        tokens_E = random_tokens(rng, num_experts)
        after_P = place(slots_P, tokens_E, num_devices)
        num_copies_E = np.bincount(after_P, minlength=num_experts)
        assert len(after_P) == len(slots_P) and num_copies_E.min() >= 1 and num_copies_E.max() <= num_devices
        before, after = (device_loads(slots, tokens_E, num_devices) for slots in (slots_P, after_P))
        assert after.sum() == pytest.approx(tokens_E.sum()) and after.max() <= before.max() + 1e-9
        largest = (tokens_E / num_copies_E).max()
        # The least that a placement can reach, and nearly that of one which the greedy choice reaches for sure.
        assert after.max() <= NEARLY**2 * (tokens_E.sum() / num_devices + largest)
        table_EC = table_of(after_P, num_experts, num_devices)
        for expert, (count, *slots) in enumerate(table_EC.tolist()):
            assert sorted(slots[:count]) == np.flatnonzero(after_P == expert).tolist()
        np.testing.assert_array_equal(moved(slots_P, plan_moves(slots_P, after_P, num_devices), num_devices), after_P)
        slots_P = after_P


def moved(slots_P: np.ndarray, moves_2RN: np.ndarray, num_devices: int) -> np.ndarray:
    """The slots after the rounds, which read what was there before all of them."""
    after = slots_P.reshape(num_devices, -1).copy()
    for wanted_N, target_N in zip(*moves_2RN, strict=True):
        for device, (wanted, target) in enumerate(zip(wanted_N, target_N, strict=True)):
            if target < after.shape[1]:
                after[device, target] = slots_P[wanted]
    return after.reshape(-1)


def test_small_placements_are_nearly_the_best() -> None:
    """Compared with all ways to divide six experts between two devices, without copies."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens_E = random_tokens(rng, 6)
        groups = itertools.combinations(range(6), 3)
        best = min(max(tokens_E[list(group)].sum(), tokens_E.sum() - tokens_E[list(group)].sum()) for group in groups)
        found = device_loads(place(np.arange(6), tokens_E, 2), tokens_E, 2).max()
        assert found <= 7 / 6 * NEARLY**2 * best + 1e-9


def test_a_hot_expert_gets_the_copies() -> None:
    tokens_E = np.array([900, 10, 10, 10, 10, 10, 10, 40])
    after_P = place(np.arange(12) % 8, tokens_E, 4)
    assert (after_P == 0).sum() == 4
    assert all(0 in slots for slots in after_P.reshape(4, 3))


def test_experts_stay_where_nothing_is_much_better() -> None:
    rng = np.random.default_rng(3)
    tokens_E = random_tokens(rng, 64)
    slots_P = place(np.arange(80) % 64, tokens_E, 8)
    np.testing.assert_array_equal(place(slots_P, tokens_E * rng.uniform(0.995, 1.005, 64), 8), slots_P)
    np.testing.assert_array_equal(place(slots_P, np.ones(64), 8) >= 0, True)


def test_a_changed_load_moves_few_experts() -> None:
    """Two experts that change their parts move, with one or the other that makes room, not all."""
    tokens_E = np.full(64, 100)
    tokens_E[0] += 50
    before_P = place(np.arange(64), tokens_E, 8)
    tokens_E[[0, 17]] = tokens_E[[17, 0]]
    tokens_E[17] += 40
    after_P = place(before_P, tokens_E, 8)
    assert (after_P != before_P).mean() < 0.3
