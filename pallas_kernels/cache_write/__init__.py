"""Writes new keys and values into a paged cache, in place when the caches are donated.

k_pages_PKSH, v_pages_PKSH   the pools of pages      k_TKH, v_TKH   one key and value per token
slot_T   int32: page * S + offset of each token; a negative slot is dropped (padding), written nowhere
"""

import importlib

import jax
from jax.typing import ArrayLike

IMPLEMENTATIONS = {
    "xla": "pallas_kernels.cache_write.xla",
    "triton": "pallas_kernels.cache_write.triton",
}
"""Each module has write_cache and supports(platform, dtype, head_dim, interpret)."""


def write_cache(
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The caches with the tokens written into their slots. No slot may appear twice, the result there would be either token.

    k_scale, v_scale: float32 scalars that keys and values are divided by; None: nothing. A float8_e4m3fn cache gets the nearest
    value, and the largest, 448, for what lies beyond it.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no cache writer {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.write_cache(
        k_pages_PKSH, v_pages_PKSH, k_TKH, v_TKH, slot_T, k_scale=k_scale, v_scale=v_scale, interpret=interpret
    )
