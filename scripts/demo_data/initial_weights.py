"""Random weights as the start of a training."""

import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import parameters, state_of
from jaxllm.loaders.dummy import STANDARD_DEVIATION


def init_params(model: CausalLM, key: Array) -> nnx.State:
    """Float32: norm weights 1, biases 0, all others normal, scaled down by √(2 layers) where they add to the residual stream."""
    arrays = {}
    for path, variable in parameters(model):
        shape, init = variable.shape, variable.get_metadata("init")
        if init == "normal":
            deviation = STANDARD_DEVIATION / (math.sqrt(2 * len(model.blocks)) if path[-2] in ("out", "down") else 1)
            own_key = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            arrays[path] = deviation * jax.random.normal(own_key, shape, jnp.float32)
        else:
            arrays[path] = jnp.full(shape, init == "ones", jnp.float32)
    return state_of(model, arrays)
