import jax, jax.numpy as jnp
from pallas_kernels.lora.parts import Parts
def group(slot_T, num_slots): return slot_T
def add(y_TN, x_TD, a_SQD, b_SRN, groups, *, parts, implementation, interpret=False):
    S, Q, D = a_SQD.shape; R=b_SRN.shape[1]; M=Q//R
    one = jax.nn.one_hot(groups, S, dtype=x_TD.dtype)
    z = jnp.einsum("td,sqd->tsq", x_TD, a_SQD.astype(x_TD.dtype)) * one[:, :, None]
    z = z.reshape(len(x_TD), S, M, R)
    b = b_SRN.reshape(S, R, parts.before, sum(parts.sizes), parts.after).astype(x_TD.dtype)
    out=[]; first=0
    for m, size in enumerate(parts.sizes):
        out.append(jnp.einsum("tsr,srbja->tbja", z[:, :, m], b[:, :, :, first:first+size])); first+=size
    return y_TN + jnp.concatenate(out, 2).reshape(y_TN.shape)
