"""A mixture's router for few tokens, from what enters the norm before it: so it need not wait for the norm's kernel.

    score = (x / rms(x) * (norm_weight + weight_offset)) @ router.T + bias

Shapes, common to all implementations:
    x_TD           the sum that the norm is of
    norm_weight_D
    router_ED      in the type of x
    bias_E         float32; None: 0
    is_real_T      bool: whether a token is not padding; None: all are real
    result         scores_TE, float32; those of padding mean nothing, but are finite if x is

The norm is computed in float32 and rounded to the type of x, as what experts get of it.
"""

import importlib

import jax

from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.router_scores.triton",
    "reference": "pallas_kernels.router_scores.reference",
    "xla": "pallas_kernels.router_scores.reference",
}
"""Each module has router_scores and supports(platform, width, interpret)."""

PREFERENCE = ("triton", "xla")
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def router_scores(
    x_TD: jax.Array,
    norm_weight_D: jax.Array,
    router_ED: jax.Array,
    is_real_T: jax.Array | None = None,
    bias_E: jax.Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The scores of each token.

    eps: added to the mean of the squares. weight_offset: added to the norm's weight.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    width = x_TD.shape[1]
    if norm_weight_D.shape != (width,) or router_ED.shape[1:] != (width,):
        raise ValueError(f"weights are {list(norm_weight_D.shape)} and {list(router_ED.shape)} for x {list(x_TD.shape)}")
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), width=width)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of routers' scores; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", width=width, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of routers' scores does not take vectors of {width} values; use 'xla'"
        )
    options = {"eps": eps, "weight_offset": weight_offset, "interpret": interpret}
    return module.router_scores(x_TD, norm_weight_D, router_ED, is_real_T, bias_E, **options)


def candidates(*, platform: str, width: int, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    case = {"platform": platform, "width": width, "interpret": interpret}
    return tuple(name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**case))


def choose(*, platform: str, width: int) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, width=width)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "router_scores")
    return next(name for name in names if trusted or name in PLAIN)
