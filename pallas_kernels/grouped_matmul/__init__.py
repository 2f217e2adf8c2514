"""The experts of a mixture: each token goes through a few gated MLPs, and their results are summed with the routing weights.

Shapes, common to all implementations:
    x_TD          [T, D] activations
    expert_Tk     int32 [T, k]: the experts chosen for each token, numbered over all devices
    weight_Tk     float32 [T, k]: their routing weights
    gate_up_E2FD  [E, 2, F, D], down_EDF [E, D, F]: this device's experts, output dimension first, as checkpoints hold them;
                  both arrays, both in 4 bits: `mxfp4.Mxfp4`, or both `packed.PackedExperts`, with F and D padded
    gate_up_bias_E2F, down_bias_ED: or None
    is_real_T     bool [T]: False for padding, which is routed nowhere and costs nothing; None: all are real, or chose no expert (-1)
    result        [T, D] in the type of x

Products are accumulated in float32, the hidden values [F] and each expert's result [D] rounded to the type of x, and the
weighted sum computed in float32; of few tokens, hidden values may be multiplied by the routing weight before they are rounded,
and all is summed in float32. A choice outside of [first_expert, first_expert + E) adds nothing: its expert is another
device's. Where each device has a share of F, results are summands; give `down_bias_ED` to one device alone.

Dimension letters besides those of the package: k choices of a token, E experts, F hidden width of an expert on this device,
D model width, P = T * k pairs of token and choice, N tiles of pairs.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from pallas_kernels.grouped_matmul.packed import PackedExperts, is_packed_type, padded
from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "mosaic": "pallas_kernels.grouped_matmul.mosaic",
    "triton": "pallas_kernels.grouped_matmul.triton",
    "xla": "pallas_kernels.grouped_matmul.xla",
    "reference": "pallas_kernels.grouped_matmul.reference",
}
"""Each module has experts and supports(platform, dtype, weight_dtype, width, hidden, interpret)."""

_FOR_4_BITS = "pallas_kernels.grouped_matmul.mxfp4_triton"
"""Computes with weights of 4 bits in place of a kernel of `IMPLEMENTATIONS`."""

_FOR_PACKED = "pallas_kernels.grouped_matmul.packed_mosaic"
"""Computes with packed weights in place of "mosaic"."""

PREFERENCE = ("mosaic", "triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: jax.Array | Mxfp4 | PackedExperts,
    down_EDF: jax.Array | Mxfp4 | PackedExperts,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The weighted sum [T, D] of the chosen experts' results.

    activation: a key of ACTIVATIONS. first_expert: the number of this device's first expert.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r} of experts; there are {', '.join(ACTIVATIONS)}")
    case: dict[str, Any] = {"dtype": x_TD.dtype, "weight_dtype": gate_up_E2FD.dtype}
    case |= {"width": x_TD.shape[1], "hidden": down_EDF.shape[2]}
    width = x_TD.shape[1]
    if isinstance(down_EDF, PackedExperts):
        x_TD = padded(x_TD, down_EDF.shape[1])
        gate_up_bias_E2F = None if gate_up_bias_E2F is None else padded(gate_up_bias_E2F, down_EDF.shape[2])
        down_bias_ED = None if down_bias_ED is None else padded(down_bias_ED, down_EDF.shape[1])
    _check_shapes(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF, is_real_T, gate_up_bias_E2F, down_bias_ED)
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of experts; there are {', '.join(IMPLEMENTATIONS)}")
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not _supports(implementation, platform="gpu", interpret=interpret, **case):
        raise ValueError(
            f"implementation {implementation!r} of experts does not take experts of width {case['hidden']} in a model of width "
            f"{case['width']}, activations in {x_TD.dtype} and weights in {gate_up_E2FD.dtype}; use 'xla'"
        )
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    if isinstance(down_EDF, Mxfp4) and implementation not in PLAIN:
        assert isinstance(gate_up_E2FD, Mxfp4)
        if mxfp4.is_few(expert_Tk.size, len(down_EDF)):
            module = importlib.import_module(_FOR_4_BITS)
        else:
            widened = importlib.import_module(_FOR_4_BITS).widened
            gate_up_E2FD, down_EDF = widened(x_TD, gate_up_E2FD, down_EDF, interpret=interpret)
    if isinstance(down_EDF, PackedExperts) and implementation not in PLAIN:
        module = importlib.import_module(_FOR_PACKED)
    result_TD = module.experts(
        x_TD,
        expert_Tk,
        weight_Tk,
        gate_up_E2FD,
        down_EDF,
        is_real_T=is_real_T,
        gate_up_bias_E2F=gate_up_bias_E2F,
        down_bias_ED=down_bias_ED,
        activation=activation,
        first_expert=first_expert,
        interpret=interpret,
    )
    return result_TD if result_TD.shape[1] == width else result_TD[:, :width]


def candidates(
    *, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike, width: int, hidden: int, interpret: bool = False
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case.

    width: D. hidden: F on one device.
    """
    case: dict[str, Any] = {"dtype": dtype, "weight_dtype": weight_dtype, "width": width, "hidden": hidden}
    return tuple(name for name in PREFERENCE if _supports(name, platform=platform, interpret=interpret, **case))


def _supports(name: str, **case: Any) -> bool:
    """Whether an implementation takes a case. MXFP4 has a kernel of its own, which leaves many pairs to the named one; packed weights
    have one for the name "mosaic"."""
    if name not in PLAIN and is_packed_type(case["weight_dtype"]):
        return name == "mosaic" and importlib.import_module(_FOR_PACKED).supports(**case)
    if name not in PLAIN and jnp.dtype(case["weight_dtype"]) == mxfp4.DTYPE:
        if not importlib.import_module(_FOR_4_BITS).supports(**case):
            return False
        case["weight_dtype"] = case["dtype"]
    return importlib.import_module(IMPLEMENTATIONS[name]).supports(**case)


def choose(*, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike, width: int, hidden: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, dtype=dtype, weight_dtype=weight_dtype, width=width, hidden=hidden)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "grouped_matmul")
    return next(name for name in names if trusted or name in PLAIN)


def _check_shapes(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: jax.Array | Mxfp4 | PackedExperts,
    down_EDF: jax.Array | Mxfp4 | PackedExperts,
    is_real_T: jax.Array | None,
    gate_up_bias_E2F: jax.Array | None,
    down_bias_ED: jax.Array | None,
) -> None:
    """Raise ValueError for the first array whose shape does not fit x_TD, expert_Tk and down_EDF."""
    (T, D), (E, _, F) = x_TD.shape, down_EDF.shape
    k = expert_Tk.shape[1]
    for kind in (Mxfp4, PackedExperts):
        if isinstance(gate_up_E2FD, kind) != isinstance(down_EDF, kind):
            raise ValueError("gate_up_E2FD and down_EDF must both be arrays or both be in 4 bits, or both packed")
    expected: dict[str, tuple[jax.Array | Mxfp4 | PackedExperts | None, tuple[int, ...]]] = {
        "expert_Tk": (expert_Tk, (T, k)),
        "weight_Tk": (weight_Tk, (T, k)),
        "gate_up_E2FD": (gate_up_E2FD, (E, 2, F, D)),
        "down_EDF": (down_EDF, (E, D, F)),
        "is_real_T": (is_real_T, (T,)),
        "gate_up_bias_E2F": (gate_up_bias_E2F, (E, 2, F)),
        "down_bias_ED": (down_bias_ED, (E, D)),
    }
    if isinstance(gate_up_E2FD, Mxfp4) and isinstance(down_EDF, Mxfp4):
        expected["exponents of gate_up_E2FD"] = gate_up_E2FD.exponents, (E, 2, D // mxfp4.BLOCK, F)
        expected["exponents of down_EDF"] = down_EDF.exponents, (E, F // mxfp4.BLOCK, D)
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}, expected {list(shape)} for x_TD {list(x_TD.shape)}")
