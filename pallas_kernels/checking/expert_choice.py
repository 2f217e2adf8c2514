"""The choice of experts: the ids that NumPy finds in float64, except where values are equal in float32, and its weights."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.expert_choice import Rule, choose_experts, reference

TOLERANCE = 1e-5
"""Bound of errors of what experts are chosen by, and of weights, relative to a token's largest."""
_TOKENS = 70


@dataclass(frozen=True)
class Shapes:
    """A mixture's router."""

    num_experts: int
    rule: Rule
    has_bias: bool = False


def cases(shapes: Shapes, implementation: str, *, interpret: bool, num_tokens: int = _TOKENS) -> list[Case]:
    """Tokens with all kinds of logits: `host_arrays`."""
    call = functools.partial(run, rule=shapes.rule, implementation=implementation, interpret=interpret)
    make = functools.partial(host_arrays, shapes, num_tokens)
    error = functools.partial(host_error, rule=shapes.rule)
    return [Case(f"{num_tokens} tokens", make, {implementation: call}, error, TOLERANCE)]


def run(logits: Any, is_real: Any, *bias: Any, **options: Any) -> Any:
    """The op on logits."""
    return choose_experts(logits, bias[0] if bias else None, is_real, **options)


def host_arrays(shapes: Shapes, num_tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """Logits, half of them with many equal values; one token's are all equal, one's far apart, one's NaN. Some biases are 0.

    The last of several tokens is padding.
    """
    normals, num_experts = Normals(), shapes.num_experts
    logits_TE = normals(num_tokens, num_experts) * np.float32(2)
    logits_TE[::2] = np.round(logits_TE[::2] * 2) / 2 + 0.0  # no -0: it is below 0 to lax.top_k
    if num_tokens > 4:
        logits_TE[1] = 0.5
        if shapes.rule.num_groups == 1:  # float32 and float64 choose other groups where scores reach 0 or 1
            logits_TE[2] *= 50
        if shapes.rule.scoring != "sparsemixer":
            logits_TE[4] = np.nan
    is_real_T = np.arange(num_tokens) < max(1, num_tokens - 1)
    if not shapes.has_bias:
        return logits_TE, (is_real_T,)
    return logits_TE, (
        is_real_T,
        normals(num_experts) * np.float32(0.2) * (np.arange(num_experts) % 3 == 0),
    )


def host_error(logits: Any, constants: tuple[Any, ...], got: Any, *, rule: Rule) -> float:
    """The largest difference of what was chosen by, or of weights; infinite for ids that cannot be right."""
    logits_TE, (expert_Tk, weight_Tk) = np.asarray(logits), (np.asarray(array) for array in got)
    num_experts = logits_TE.shape[1]
    is_real_T, *bias = (np.asarray(array) for array in constants)
    if np.any(expert_Tk[~is_real_T] != -1):
        return math.inf
    logits_TE, expert_Tk, weight_Tk = (array[is_real_T] for array in (logits_TE, expert_Tk, weight_Tk))
    in_order = np.sort(expert_Tk, axis=1)
    if in_order.min() < 0 or in_order.max() >= num_experts or np.any(in_order[:, 1:] == in_order[:, :-1]):
        return math.inf
    is_number_T = ~np.isnan(logits_TE[:, 0])
    if not np.isnan(weight_Tk[~is_number_T]).all():
        return math.inf
    logits_TE, expert_Tk, weight_Tk = (array[is_number_T] for array in (logits_TE, expert_Tk, weight_Tk))
    expected_Tk, exact_Tk = reference.choose_experts(logits_TE, *bias, rule=rule)
    if rule.scoring == "sparsemixer":
        return math.inf if np.any(expert_Tk != expected_Tk) else _difference(weight_Tk, exact_Tk)
    choice_TE = reference.choice(logits_TE, *bias, rule=rule)
    place_TE = np.full(choice_TE.shape, rule.top_k)
    np.put_along_axis(place_TE, expert_Tk, np.arange(rule.top_k)[None, :], axis=1)
    chosen_Tk, best_Tk = (np.take_along_axis(choice_TE, ids, axis=1) for ids in (expert_Tk, expected_Tk))
    for place in range(rule.top_k):
        is_equal_TE = choice_TE == chosen_Tk[:, place, None]
        is_before_TE = np.arange(num_experts) < expert_Tk[:, place, None]
        if np.any(is_equal_TE & is_before_TE & (place_TE > place)):
            return math.inf
    exact_Tk = reference.weights(logits_TE, expert_Tk, rule=rule)
    return max(_difference(chosen_Tk, best_Tk), _difference(weight_Tk, exact_Tk))


def _difference(got_Tk: np.ndarray, exact_Tk: np.ndarray) -> float:
    """Relative to the largest of the token; -inf equals -inf."""
    finite_Tk = np.isfinite(exact_Tk)
    if np.any(np.isfinite(got_Tk) != finite_Tk):
        return math.inf
    scale_T1 = np.max(np.abs(exact_Tk), axis=1, where=finite_Tk, initial=1e-30, keepdims=True)
    return float((np.abs(np.where(finite_Tk, got_Tk - np.where(finite_Tk, exact_Tk, 0), 0)) / scale_T1).max())
