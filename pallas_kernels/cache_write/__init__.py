"""Writes new keys and values into a paged cache, in place when the caches are donated.

k_pages_PKSH, v_pages_PKSH   the pools of pages      k_TKH, v_TKH   one key and value per token
slot_T   int32: page * S + offset of each token; a negative slot is dropped (padding), written nowhere
"""

import importlib

import jax

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
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The caches with the tokens written into their slots. No slot may appear twice, the result there would be either token."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no cache writer {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.write_cache(k_pages_PKSH, v_pages_PKSH, k_TKH, v_TKH, slot_T, interpret=interpret)
