"""Where segments begin and end."""

import jax
import jax.numpy as jnp
from jax import lax


def bounds(segment_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each patch, the first patch of its segment and the one behind the last, int32 [P]; for padding both 0.

    The same argument gives the same HLO, so XLA computes this once for all layers of a model.
    """
    num_patches = segment_P.shape[0]
    patch_P = jnp.arange(num_patches, dtype=jnp.int32)
    changes = segment_P[1:] != segment_P[:-1]
    edge = jnp.ones(1, bool)
    start_P = lax.cummax(jnp.where(jnp.concatenate([edge, changes]), patch_P, 0))
    end_P = lax.cummin(jnp.where(jnp.concatenate([changes, edge]), patch_P + 1, num_patches), reverse=True)
    is_real_P = segment_P >= 0
    return jnp.where(is_real_P, start_P, 0), jnp.where(is_real_P, end_P, 0)


def tile_keys(start_P: jax.Array, end_P: jax.Array, tile: int) -> jax.Array:
    """For each tile of so many patches with these `bounds`, the keys that it sees: int32 [ceil(P / tile), 3].

    The first key that any of its patches sees, the one behind the last, and 1 if every patch sees all of these (else 0). A tile of
    padding sees none. Patches beyond the last, in the last tile, count as padding.
    """
    num_patches = len(start_P)
    num_tiles = -(-num_patches // tile)
    padding = (0, num_tiles * tile - num_patches)
    start_NM, end_NM = (jnp.pad(x, padding).reshape(num_tiles, tile) for x in (start_P, end_P))
    first_N, end_N = start_NM[:, 0], end_NM.max(axis=1)  # starts ascend up to the padding, whose ends are 0
    sees_all_N = (start_NM == first_N[:, None]).all(axis=1) & (end_NM == end_N[:, None]).all(axis=1)
    return jnp.stack([first_N, end_N, sees_all_N.astype(jnp.int32)], axis=1)
