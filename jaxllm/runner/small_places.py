"""Free places in a GPU's memory for steps' inputs and results, which keep a step's temporary arrays at the same addresses."""

from collections.abc import Callable

import jax
import numpy as np

from jaxllm.parallel.arrays import delete

NUM_SMALL_PLACES, SMALL_PLACE_BYTES = 48, 128 << 10
"""Number and size of the places kept free: more than all steps in flight need, each as large as the buffer of any decode."""


def reserve_small_places(put: Callable[[np.ndarray], jax.Array]) -> list[jax.Array]:
    """Reserve free places of SMALL_PLACE_BYTES between small arrays. Returns these arrays; the caller must keep them.

    JAX's pool then places each step's input and result there, and the step's temporary arrays at the beginning of the
    large free region: at the same addresses in every step. Before relaunching a CUDA graph, XLA writes changed addresses
    into its nodes, and nine of ten nodes of a decode read or write temporary arrays.

    put: a host array on each device.
    """
    places, spacers = [], []
    for _ in range(NUM_SMALL_PLACES):
        places.append(put(np.zeros(SMALL_PLACE_BYTES // 4, np.int32)))
        spacers.append(put(np.zeros(1, np.int32)))
    jax.block_until_ready((places, spacers))
    delete(places)
    return spacers
