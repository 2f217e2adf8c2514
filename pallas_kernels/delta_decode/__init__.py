"""All that linear attention by the gated delta rule computes between its products, for rows of one token. Source: arXiv:2412.06464.

For each row, with x the product's values of a key head that go through the convolution, and with J inputs that it sees:

    y          = silu(sum over j of conv_weight[j] * the row's last J inputs, x the last of them)
    q, k, v    = parts of y, q and k divided by their norms, and q by the root of its width
    decay      = exp(-exp(log_rate) * softplus(a + rate_bias)), beta = sigmoid(b)
    state     *= decay
    state     += outer(k, beta * (v - k @ state))
    out        = rms_norm(q @ state) * norm_weight * gate(z)

Shapes, common to all implementations:
    qkvz_RKC          of each key head a query and a key, H values each, then G values and G gates z, V each
    ba_RKC            of each key head G values b, then G values a
    conv_weight_KCJ   C without the gates
    log_rate_KG, rate_bias_KG   float32
    norm_weight_V
    conv_state_NKjC   the last j = J - 1 inputs of each row before the step
    state_NKGHV       float32: the states of all rows; the last takes the writes of padding, as does that of the convolution
    row_R             int32[R]: row of the states; of padding rows the last
    is_new_R          bool[R]: the row begins with states of zeros, whatever the arrays hold
    result            out_RKGV in the type of qkvz, and both states after the step

All is computed in float32. Outputs of padding rows mean nothing, but are finite if the states are. What the arrays hold for a new row is
not used, not even a NaN. Dimension letters are those of `pallas_kernels.gated_delta`.
"""

import importlib
from typing import Literal

import jax

from pallas_kernels.verified import is_verified

Gate = Literal["silu", "sigmoid"]

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.delta_decode.triton",
    "reference": "pallas_kernels.delta_decode.reference",
    "xla": "pallas_kernels.delta_decode.reference",
}
"""Each module has delta_decode and supports(platform, key_dim, value_dim, interpret)."""

PREFERENCE = ("triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def delta_decode(
    qkvz_RKC: jax.Array,
    ba_RKC: jax.Array,
    conv_weight_KCJ: jax.Array,
    log_rate_KG: jax.Array,
    rate_bias_KG: jax.Array,
    norm_weight_V: jax.Array,
    conv_state_NKjC: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    gate: Gate,
    eps: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The outputs of rows of one token each, and the states after them.

    eps: added to the mean of the squares in the norm of outputs.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    arrays = (qkvz_RKC, ba_RKC, conv_weight_KCJ, log_rate_KG, rate_bias_KG, norm_weight_V, conv_state_NKjC, state_NKGHV)
    _check_shapes(*arrays)
    shape = {"key_dim": state_NKGHV.shape[3], "value_dim": state_NKGHV.shape[4]}
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **shape)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of decodes of linear attention; there are {', '.join(IMPLEMENTATIONS)}"
        )
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", interpret=interpret, **shape):
        raise ValueError(
            f"implementation {implementation!r} of decodes of linear attention does not take states of {shape['key_dim']} × "
            f"{shape['value_dim']} values; use 'xla'"
        )
    return module.delta_decode(*arrays, row_R, is_new_R, gate=gate, eps=eps, interpret=interpret)


def candidates(*, platform: str, key_dim: int, value_dim: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    case = {"platform": platform, "key_dim": key_dim, "value_dim": value_dim, "interpret": interpret}
    return tuple(name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**case))


def choose(*, platform: str, key_dim: int, value_dim: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, key_dim=key_dim, value_dim=value_dim)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "delta_decode")
    return next(name for name in names if trusted or name in PLAIN)


def _check_shapes(
    qkvz: jax.Array,
    ba: jax.Array,
    conv_weight: jax.Array,
    log_rate: jax.Array,
    rate_bias: jax.Array,
    norm_weight: jax.Array,
    conv_state: jax.Array,
    state: jax.Array,
) -> None:
    """Raise ValueError for the first array whose shape does not fit the states, the number of rows, and what the convolution sees."""
    N, K, G, H, V = state.shape
    R, C, J = len(qkvz), 2 * H + G * V, conv_weight.shape[2]
    expected = {
        "qkvz": (qkvz, (R, K, C + G * V)),
        "ba": (ba, (R, K, 2 * G)),
        "conv_weight": (conv_weight, (K, C, J)),
        "log_rate": (log_rate, (K, G)),
        "rate_bias": (rate_bias, (K, G)),
        "norm_weight": (norm_weight, (V,)),
        "conv_state": (conv_state, (N, K, J - 1, C)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for states {list(state.shape)}")
