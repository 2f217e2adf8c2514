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

import jax

from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.gated_delta.triton",
    "reference": "pallas_kernels.gated_delta.reference",
    "xla": "pallas_kernels.gated_delta.xla",
}
"""Each module has gated_delta, gated_delta_decode for rows of one token, and supports(platform, key_dim, interpret)."""

PREFERENCE = ("triton", "xla")
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
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs of a ragged batch of tokens, and the states after it.

    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    tokens = (q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG)
    _check_shapes(*tokens, state_NKGHV)
    key_dim = q_TKH.shape[-1]
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), key_dim=key_dim)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of the gated delta rule; there are {', '.join(IMPLEMENTATIONS)}"
        )
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", key_dim=key_dim, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of the gated delta rule does not take keys of width {key_dim}; use 'xla'"
        )
    if query_start_R1 is None:
        return module.gated_delta_decode(*tokens, state_NKGHV, row_R, is_new_R, interpret=interpret)
    return module.gated_delta(*tokens, state_NKGHV, row_R, is_new_R, query_start_R1, interpret=interpret)


def candidates(*, platform: str, key_dim: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    return tuple(name for name in PREFERENCE if modules[name].supports(platform=platform, key_dim=key_dim, interpret=interpret))


def choose(*, platform: str, key_dim: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, key_dim=key_dim)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "gated_delta")
    return next(name for name in names if trusted or name in PLAIN)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array) -> None:
    """Raise ValueError for the first array whose shape does not fit v, the width of q, and the rows of the state."""
    T, K, G, V = v.shape
    H, N = q.shape[-1], state.shape[0]
    expected = {
        "q": (q, (T, K, H)),
        "k": (k, (T, K, H)),
        "log_decay": (log_decay, (T, K, G)),
        "beta": (beta, (T, K, G)),
        "state": (state, (N, K, G, H, V)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for values {list(v.shape)}")
