"""The gated delta rule over the tokens of several rows, each with a state that lives on between steps. Source: arXiv:2412.06464.

A state is a matrix [H, V] for each value head, which maps keys to values. A token with key k and value v changes it so:

    state *= exp(log_decay)
    state += outer(k, beta * (v - k @ state))
    out    = q @ state

Shapes, common to all implementations:
    q_TKH, k_TKH    queries and keys of all rows, one after the other: normalised, and queries scaled
    v_TKGV          values: G value heads for each key head
    log_decay_TKG   float32, not positive; beta_TKG float32
    state_NKGHV     float32: the states of all rows; the last takes the writes of padding
    row_R           int32[R]: row of the state; of padding rows the last
    is_new_R        bool[R]: the row begins with a state of zeros, whatever the array holds
    query_start_R1  int32[R + 1]: row r owns tokens query_start[r]:query_start[r + 1]; tokens after the last are padding. None: token i is
                    the only one of row i
    result          out_TKGV in the type of v, and the states after the step

Outputs of padding tokens mean nothing. What the array holds for a new row is not used, not even a NaN.

Dimension letters besides those of the package: N rows of the state, G value heads for each of K key heads, H width of a key, V width
of a value, C tokens of a chunk.
"""

import importlib
from types import ModuleType

import jax

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.gated_delta.triton",
    "reference": "pallas_kernels.gated_delta.reference",
    "xla": "pallas_kernels.gated_delta.xla",
}
"""Each module has gated_delta, and gated_delta_decode for rows of one token."""
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def gated_delta(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKGV: jax.Array,
    log_decay_TKG: jax.Array,
    beta_TKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    query_start_R1: jax.Array | None,
    *,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs of a ragged batch of tokens, and the states after it.

    implementation: a key of IMPLEMENTATIONS. interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together.
    """
    tokens = (q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG)
    module = _resolve(implementation, *tokens, state_NKGHV)
    if query_start_R1 is None:
        return module.gated_delta_decode(*tokens, state_NKGHV, row_R, is_new_R, interpret=interpret)
    return module.gated_delta(*tokens, state_NKGHV, row_R, is_new_R, query_start_R1, interpret=interpret)


def _resolve(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> ModuleType:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of the gated delta rule; there are {', '.join(IMPLEMENTATIONS)}"
        )
    T, K, G, V = v.shape
    expected = {
        "q": (q, (T, K, q.shape[-1])),
        "k": (k, q.shape),
        "log_decay": (log_decay, (T, K, G)),
        "beta": (beta, (T, K, G)),
    }
    expected["state"] = (state, (state.shape[0], K, G, q.shape[-1], V))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for values {list(v.shape)}")
    return importlib.import_module(IMPLEMENTATIONS[implementation])
