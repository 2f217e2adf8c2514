"""The computation of experts with adapters, against a loop over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.lora.experts import Factors, compute
from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS

T, D, E, F, R, S, K = 40, 32, 4, 32, 3, 2, 2


def arrays(dtype, packed):
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype) / np.sqrt(shape[-1])

    def weight(*shape):
        if not packed:
            return random(*shape)
        blocks = rng.integers(256, size=(*shape[:-1], shape[-1] // 32, 16), dtype=np.uint8)
        exponents = np.full((*shape[:-2], shape[-1] // 32, shape[-2]), 124, np.uint8)
        return mxfp4.Mxfp4(mxfp4.pack(jnp.asarray(blocks)), jnp.asarray(exponents))

    factors = Factors(*(random(S, E, *rest) for rest in ((2, R, D), (2, F, R), (R, F), (D, R))))
    weights = weight(E, 2, F, D), weight(E, D, F)
    choices = np.stack([rng.permutation(2 * E)[:K] for _ in range(T)]).astype(np.int32)
    chosen = jnp.asarray(choices), jnp.asarray(rng.random((T, K)), jnp.float32)
    return random(T, D), *chosen, weights, (random(E, 2, F), random(E, D)), factors, rng.integers(-1, S, T).astype(np.int32)


def token_by_token(x_TD, expert_Tk, weight_Tk, weights, biases, factors, slot_T, activation, first_expert, is_real_T):
    gate_up_E2FD, down_EDF, *others = (np.asarray(each.astype(jnp.float32)) for each in (*weights, *biases, *factors, x_TD))
    gate_up_bias, down_bias, a_gate_up, b_gate_up, a_down, b_down, x_TD = others
    out_TD = np.zeros(x_TD.shape, np.float32)
    for t in np.flatnonzero(is_real_T):
        for global_expert, weight in zip(expert_Tk[t], weight_Tk[t], strict=True):
            e, s = int(global_expert) - first_expert, slot_T[t]
            if not 0 <= e < E:
                continue
            gate_up, down = gate_up_E2FD[e], down_EDF[e]
            if s >= 0:
                gate_up, down = gate_up + b_gate_up[s, e] @ a_gate_up[s, e], down + b_down[s, e] @ a_down[s, e]
            gate, up = gate_up @ x_TD[t] + gate_up_bias[e]
            hidden = np.asarray(ACTIVATIONS[activation](jnp.asarray(gate), jnp.asarray(up)))
            out_TD[t] += weight * (down @ hidden + down_bias[e])
    return out_TD


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, activation, first_expert, packed",
    [("float32", "silu", 0, False), ("bfloat16", "swiglu_clamped", 2, False), ("float32", "gelu_tanh", 3, True)],
)
def test_op(dtype, activation, first_expert, packed):
    x_TD, expert_Tk, weight_Tk, weights, biases, factors, slot_T = arrays(dtype, packed)
    is_real_T = jnp.arange(T) < T - 5
    options = {"activation": activation, "first_expert": first_expert, "is_real_T": is_real_T, "factors": factors}
    options |= dict(zip(("gate_up_bias_E2F", "down_bias_ED"), biases, strict=True))

    def found(slots):
        return compute(x_TD, expert_Tk, weight_Tk, *weights, slot_T=jnp.asarray(slots), **options)

    expected = token_by_token(x_TD, expert_Tk, weight_Tk, weights, biases, factors, slot_T, activation, first_expert, is_real_T)
    np.testing.assert_allclose(found(slot_T).astype(jnp.float32), expected, atol=1e-5 if dtype == "float32" else 0.05)
    # A token does not see which adapters the others have.
    is_kept_T = np.arange(T) % 3 == 0
    others = np.where(is_kept_T, slot_T, (slot_T + 2) % (S + 1) - 1)
    np.testing.assert_array_equal(found(others)[is_kept_T], found(slot_T)[is_kept_T])
