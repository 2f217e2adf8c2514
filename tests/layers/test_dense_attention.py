import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.attend import Projection
from jaxllm.layers.dense_attention import dense_attend

T, K, G, H = 9, 2, 3, 4


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((T, K, G, H), (T, K, H), (T, K, H))
    return [np.asarray(jax.random.normal(key, shape)) for key, shape in zip(keys, shapes, strict=True)]


def project(q, k, v):
    """Already finished: no norms, and angles of zero."""
    qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
    return Projection(qkv, jnp.ones((T, H // 2)), jnp.zeros((T, H // 2)), None, None, None, eps=0.0)


def naive(q, k, v, visible, soft_cap=None, sinks=None):
    out = np.zeros_like(q)
    for t in range(T):
        for head in range(K * G):
            kv, group = divmod(head, G)
            seen = [s for s in range(T) if visible(t, s)]
            scores = np.array([q[t, kv, group] @ k[s, kv] for s in seen], np.float64) * 0.5
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[kv, group])))
            out[t, kv, group] = (weights / total) @ v[seen, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, None), (2.0, None), (None, np.linspace(-3, 3, K * G).reshape(K, G))])
def test_matches_loops_over_one_sequence(window, soft_cap, sinks):
    q, k, v = arrays()
    attend = dense_attend(jnp.arange(T))
    expected = naive(q, k, v, lambda t, s: s <= t and (window is None or t - s < window), soft_cap, sinks)
    options = {"scale": 0.5, "window": window, "soft_cap": soft_cap, "sinks_KG": sinks}
    got = jax.jit(lambda *qkv: attend(0, project(*qkv), **options))(q, k, v)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_packed_sequences_do_not_see_each_other():
    q, k, v = arrays()
    segments = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    positions = np.array([0, 1, 2, 3, 0, 1, 2, 0, 1])
    attend = dense_attend(jnp.asarray(positions), jnp.asarray(segments))
    expected = naive(q, k, v, lambda t, s: s <= t and segments[s] == segments[t])
    np.testing.assert_allclose(attend(0, project(q, k, v), scale=0.5, window=None, soft_cap=None), expected, atol=1e-5)
