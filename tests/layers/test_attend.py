import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.layers.attend import Projection
from jaxllm.layers.norm import Normalization
from jaxllm.model_parts import Norm
from pallas_kernels.rope_cache_write.xla import apply_rope


def test_finished_heads_are_normed_as_the_layer_does_and_then_rotated():
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = jax.random.normal(keys[0], (5, 2, 5, 8), jnp.bfloat16)
    q_norm, k_norm = (jax.random.normal(key, (8,), jnp.bfloat16) for key in keys[1:3])
    angles = jax.random.normal(keys[3], (5, 4))
    angles = (jnp.cos(angles), jnp.sin(angles))
    projection = Projection(qkv, *angles, q_norm, k_norm, None, eps=1e-5)

    def layer_norm(x, weight):
        graph, state = nnx.split(Normalization(Norm("norm", 1e-5), 8, "head", "bfloat16"))
        return nnx.merge(graph, jax.tree.map(lambda _: weight, state))(x)

    @jax.jit
    def step_by_step():
        q, k = layer_norm(qkv[:, :, :3], q_norm), layer_norm(qkv[:, :, 3], k_norm)
        return apply_rope(q, angles), apply_rope(k, angles), qkv[:, :, 4]

    for one, right in zip(jax.jit(Projection.finished)(projection), step_by_step(), strict=True):
        np.testing.assert_array_equal(one, right)
