"""The choice of a token's experts from the logits of a mixture's router.

Shapes, common to all implementations:
    logits_TE     float32 [T, E]
    bias_E        float32 [E]: the correction bias, added to the scores for the choice, not for the weights; or None
    is_real_T     bool [T]: False for padding; None: all tokens are real
    expert_Tk     int32 [T, k]: the experts of each token, the best first; of equals the lowest number first; -1 for padding
    weight_Tk     float32 [T, k]: their weights

Where logits are NaN, experts are still in [0, E), and weights are NaN. Weights of padding may be anything. Sources:
arXiv:2401.04088, arXiv:2412.19437 (groups and bias), arXiv:2409.12136 (sparsemixer).

Dimension letters besides those of the package: k choices of a token, E experts, G groups of e experts.
"""

import importlib

import jax

from pallas_kernels.expert_choice.rule import SCORINGS, Rule
from pallas_kernels.verified import is_verified

__all__ = ["IMPLEMENTATIONS", "PLAIN", "PREFERENCE", "Rule", "candidates", "choose", "choose_experts"]

IMPLEMENTATIONS = {
    "triton": "pallas_kernels.expert_choice.triton",
    "xla": "pallas_kernels.expert_choice.xla",
}
"""Each module has choose_experts and supports(platform, num_experts, rule, interpret). `reference` is in NumPy, for the host."""

PREFERENCE = ("triton", "xla")
PLAIN = ("xla",)
"""Implementations in plain JAX."""


def choose_experts(
    logits_TE: jax.Array,
    bias_E: jax.Array | None = None,
    is_real_T: jax.Array | None = None,
    *,
    rule: Rule,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [T, k], and their weights, float32 [T, k].

    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for shapes that do not fit together and for what the implementation does not take.
    """
    num_experts = logits_TE.shape[1]
    if rule.scoring not in SCORINGS:
        raise ValueError(f"no scoring {rule.scoring!r} of experts; there are {', '.join(SCORINGS)}")
    if not 1 <= rule.top_k <= num_experts:
        raise ValueError(f"top_k is {rule.top_k}, expected 1 to {num_experts}, the number of experts")
    if num_experts % rule.num_groups:
        raise ValueError(f"num_groups is {rule.num_groups}, which does not divide {num_experts} experts")
    if bias_E is not None and bias_E.shape != (num_experts,):
        raise ValueError(f"bias_E is {list(bias_E.shape)}, expected [{num_experts}] for logits_TE {list(logits_TE.shape)}")
    if is_real_T is not None and is_real_T.shape != logits_TE.shape[:1]:
        raise ValueError(f"is_real_T is {list(is_real_T.shape)}, expected [T] for logits_TE {list(logits_TE.shape)}")
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), num_experts=num_experts, rule=rule)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of the choice of experts; there are {', '.join(IMPLEMENTATIONS)}"
        )
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", num_experts=num_experts, rule=rule, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of the choice of experts does not take {num_experts} experts with the scoring "
            f"{rule.scoring!r}; use 'xla'"
        )
    return module.choose_experts(logits_TE, bias_E, is_real_T, rule=rule, interpret=interpret)


def candidates(*, platform: str, num_experts: int, rule: Rule, interpret: bool = False) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case."""
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    case = {"platform": platform, "num_experts": num_experts, "rule": rule, "interpret": interpret}
    return tuple(name for name in PREFERENCE if modules[name].supports(**case))


def choose(*, platform: str, num_experts: int, rule: Rule) -> str:
    """The first of `candidates` that is plain JAX or was verified on the kind of the first device."""
    names = candidates(platform=platform, num_experts=num_experts, rule=rule)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "expert_choice")
    return next(name for name in names if trusted or name in PLAIN)
