"""Attention in both directions within segments of a packed sequence: the patches of images, or of an image's windows.

Shapes, common to all implementations:
    q_PHd, k_PHd, v_PHd     patches of all segments, one after the other, and padding behind them
    segment_P               int32[P]: the segment of each patch; a segment's patches are consecutive, ids ascend, padding is -1
    out_PHd                 in the type of q; of padding zeros

A patch sees all patches of its own segment. What padding holds cannot reach another result: it may be NaN.
Products accumulate in float32, float32 operands are multiplied in full precision, the softmax is float32.

Dimension letters, other than those of the package: P patches, H heads, d head width; where needed M patches of a tile, k keys of a chunk.
"""

import importlib

import jax
from jax.typing import DTypeLike

from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.segment_attention.reference",
    "xla": "pallas_kernels.segment_attention.xla",
    "triton": "pallas_kernels.segment_attention.triton",
    "mosaic": "pallas_kernels.segment_attention.mosaic",
    "cudnn": "pallas_kernels.segment_attention.cudnn",
}
"""Each module has segment_attention and supports(platform, dtype, head_dim, interpret)."""

PREFERENCE = ("mosaic", "cudnn", "triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def segment_attention(
    q_PHd: jax.Array,
    k_PHd: jax.Array,
    v_PHd: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention within segments -> out_PHd.

    scale: what scores are multiplied with, positive.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for arrays that do not fit together and for what the implementation does not take.
    """
    for name, array in (("k", k_PHd), ("v", v_PHd)):
        if (array.shape, array.dtype) != (q_PHd.shape, q_PHd.dtype):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {q_PHd.dtype}{list(q_PHd.shape)}, as q is")
    if segment_P.shape != q_PHd.shape[:1]:
        raise ValueError(f"segment_P is {list(segment_P.shape)}, expected [P] for q {list(q_PHd.shape)}")
    dtype, head_dim = q_PHd.dtype, q_PHd.shape[2]
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), dtype=dtype, head_dim=head_dim)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of segment attention; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", dtype=dtype, head_dim=head_dim, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of segment attention does not take heads of width {head_dim} in {dtype} "
            "here; use 'xla'"
        )
    return module.segment_attention(q_PHd, k_PHd, v_PHd, segment_P, scale=scale, interpret=interpret)


def candidates(*, platform: str, dtype: DTypeLike, head_dim: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    case = {"platform": platform, "dtype": dtype, "head_dim": head_dim, "interpret": interpret}
    return tuple(name for name in PREFERENCE if modules[name].supports(**case))


def choose(*, platform: str, dtype: DTypeLike, head_dim: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, dtype=dtype, head_dim=head_dim)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "segment_attention")
    return next(name for name in names if trusted or name in PLAIN)
