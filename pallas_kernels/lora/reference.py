"""The plain truth: slot by slot, every token in float32, and those of other slots are not changed."""

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
    """Nothing is rounded before the result."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    module_N = parts.modules()
    for slot in range(len(a_SQD)):
        change_TN = jnp.zeros(y_TN.shape, jnp.float32)
        for module in range(parts.num_modules):
            rank = b_SRN.shape[1]
            z_TR = product(x_TD, a_SQD[slot, module * rank : (module + 1) * rank].T)
            change_TN = jnp.where(module_N == module, product(z_TR, b_SRN[slot]), change_TN)
        y_TN = jnp.where((groups.slot_T == slot)[:, None], (y_TN + change_TN).astype(y_TN.dtype), y_TN)
    return y_TN
