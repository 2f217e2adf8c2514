"""Two products in plain JAX, with the matrices of all slots side by side: what belongs to other slots is 0 in between."""

import jax
import jax.numpy as jnp

from pallas_kernels.lora.groups import Groups
from pallas_kernels.lora.parts import Parts


def supports(**_: object) -> bool:
    return True


def add(
    y_TN: jax.Array,
    x_TD: jax.Array,
    a_SQD: jax.Array,
    b_SRN: jax.Array,
    groups: Groups,
    *,
    parts: Parts,
    interpret: bool = False,
) -> jax.Array:
    num_tokens, (num_slots, rank, _) = len(x_TD), b_SRN.shape
    dtype, slot_T = x_TD.dtype, groups.slot_T
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, a, b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)

    z_TSQ = product("td,sqd->tsq", x_TD, a_SQD)
    is_own_TS11 = (slot_T[:, None] == jnp.arange(num_slots))[:, :, None, None]
    z_TSMR = jnp.where(is_own_TS11, z_TSQ.reshape(num_tokens, num_slots, parts.num_modules, rank), 0).astype(dtype)
    b_SRPCA = b_SRN.reshape(num_slots, rank, parts.before, sum(parts.sizes), parts.after)
    changes, first = [], 0
    for module, size in enumerate(parts.sizes):
        b_SRPCA_of_module = b_SRPCA[:, :, :, first : first + size]
        changes.append(product("tsr,srpca->tpca", z_TSMR[:, :, module], b_SRPCA_of_module))
        first += size
    change_TPCA = changes[0] if len(changes) == 1 else jnp.concatenate(changes, axis=2)
    changed_TN = (y_TN + change_TPCA.reshape(y_TN.shape)).astype(y_TN.dtype)
    return jnp.where((slot_T >= 0)[:, None], changed_TN, y_TN)
