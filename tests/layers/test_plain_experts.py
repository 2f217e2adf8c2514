"""Experts in plain JAX against a loop over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.plain_experts import plain_experts


@pytest.mark.parametrize("clamp", [None, 0.3])
def test_gated_experts_with_and_without_limits(clamp):
    rng = np.random.default_rng(0)
    x_TD, up_E2FD, down_EDF = (rng.normal(size=shape) for shape in ((5, 6), (3, 2, 4, 6), (3, 6, 4)))
    expert_Tk, weight_Tk = rng.permuted(np.tile(np.arange(3), (5, 1)), axis=1)[:, :2], rng.random((5, 2))
    expected = np.zeros((5, 6))
    for token, (experts, weights) in enumerate(zip(expert_Tk, weight_Tk, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = up_E2FD[expert] @ x_TD[token]
            gate = gate / (1 + np.exp(-gate))
            if clamp is not None:
                gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
            expected[token] += weight * (down_EDF[expert] @ (gate * up))
    given = (jnp.asarray(array, jnp.float32) for array in (x_TD, expert_Tk, weight_Tk, up_E2FD, down_EDF))
    x, expert, weight, up, down = given
    found = plain_experts(x, expert.astype(jnp.int32), weight, up, down, activation="silu", clamp=clamp)
    np.testing.assert_allclose(found, expected, atol=1e-5)
