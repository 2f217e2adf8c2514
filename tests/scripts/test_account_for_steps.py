"""Where the time of many requests goes, by hand for two."""

import argparse

import pytest

from scripts.account_for_steps import account, planned_steps


def test_steps_of_two_requests():
    steps = planned_steps([(400, 3), (20, 1)], 8, 256)
    # A chunk; the rest with the other prompt; then the first request's tokens behind its prompt, each step with one less to come.
    assert [(is_decode, tokens) for is_decode, tokens, _ in steps] == [(False, 256), (False, 164), (True, 1), (True, 1)]
    assert [context for *_, context in steps] == [256, 420, 401, 402]
    rates = {
        "gflop": 10.0,
        "product": 1.0,
        "weight_gb": 8.0,
        "copy": 4.0,
        "context_bytes": 1e6,
        "attention": 1.0,
        "others": 0.5,
    }
    found = account(steps, argparse.Namespace(running=8, step_tokens=256, **rates))
    # 0.01 s for each token, but no step takes less than the 0.002 s that the weights take; programs have 256 and 8 tokens.
    assert found["products"] == pytest.approx(2.56 + 1.64 + 0.01 + 0.01)
    assert found["padding"] == pytest.approx(0 + 0.92 + 0.07 + 0.07)
    assert found["attention"] == pytest.approx((256 + 420 + 401 + 402) * 1e-6)
    assert found["others"] == pytest.approx((2.56 + 2.56 + 0.08 + 0.08) / 2)
