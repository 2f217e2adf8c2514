"""Mamba-2's state-space recurrence over the tokens of several rows, each with a state that lives on between steps.

Source: arXiv:2405.21060. A state is a matrix [P, S] for each head. A token with value x, input vector b and output vector c changes it so:

    state *= exp(log_decay)
    state += outer(dt * x, b)
    out    = state @ c + skip * x

Shapes, common to all implementations:
    x_TKGP          values of all rows, one after the other: G heads for each of K groups
    b_TKS, c_TKS    a group's vectors
    dt_TKG          float32; log_decay_TKG float32, not positive
    skip_KG         float32
    state_NKGPS     float32: the states of all rows; the last takes the writes of padding
    row_R           int32[R]: row of the state; of padding rows the last
    is_new_R        bool[R]: the row begins with a state of zeros, whatever the array holds
    query_start_R1  int32[R + 1]: row r owns tokens query_start[r]:query_start[r + 1]; tokens after the last are padding. None: token i is
                    the only one of row i
    result          out_TKGP in the type of x, and the states after the step

Outputs of padding tokens mean nothing. What the array holds for a new row is not used, not even a NaN.

Dimension letters besides those of the package: N rows of the state, G heads for each of K groups, P values of a head, S values of an
input or output vector, C tokens of a chunk.
"""

import importlib

import jax

from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.state_space.triton",
    "reference": "pallas_kernels.state_space.reference",
    "xla": "pallas_kernels.state_space.xla",
}
"""Each module has state_space, state_space_decode for rows of one token, and supports(platform, head_dim, state_size, interpret)."""

PREFERENCE = ("triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def state_space(
    x_TKGP: jax.Array,
    b_TKS: jax.Array,
    c_TKS: jax.Array,
    dt_TKG: jax.Array,
    log_decay_TKG: jax.Array,
    skip_KG: jax.Array,
    state_NKGPS: jax.Array,
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
    tokens = (x_TKGP, b_TKS, c_TKS, dt_TKG, log_decay_TKG)
    _check_shapes(*tokens, skip_KG, state_NKGPS)
    shape = {"head_dim": x_TKGP.shape[-1], "state_size": b_TKS.shape[-1]}
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **shape)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of the state-space recurrence; there are {', '.join(IMPLEMENTATIONS)}"
        )
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", interpret=interpret, **shape):
        raise ValueError(
            f"implementation {implementation!r} of the state-space recurrence does not take states of {shape['head_dim']} × "
            f"{shape['state_size']} values; use 'xla'"
        )
    if query_start_R1 is None:
        return module.state_space_decode(*tokens, skip_KG, state_NKGPS, row_R, is_new_R, interpret=interpret)
    return module.state_space(*tokens, skip_KG, state_NKGPS, row_R, is_new_R, query_start_R1, interpret=interpret)


def candidates(*, platform: str, head_dim: int, state_size: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    case = {"platform": platform, "head_dim": head_dim, "state_size": state_size, "interpret": interpret}
    return tuple(name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**case))


def choose(*, platform: str, head_dim: int, state_size: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, head_dim=head_dim, state_size=state_size)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "state_space")
    return next(name for name in names if trusted or name in PLAIN)


def _check_shapes(
    x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, log_decay: jax.Array, skip: jax.Array, state: jax.Array
) -> None:
    """Raise ValueError for the first array whose shape does not fit x, the width of b, and the rows of the state."""
    T, K, G, P = x.shape
    S, N = b.shape[-1], state.shape[0]
    expected = {
        "b": (b, (T, K, S)),
        "c": (c, (T, K, S)),
        "dt": (dt, (T, K, G)),
        "log_decay": (log_decay, (T, K, G)),
        "skip": (skip, (K, G)),
        "state": (state, (N, K, G, P, S)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for values {list(x.shape)}")
