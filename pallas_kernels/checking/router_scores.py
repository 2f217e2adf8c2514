"""Routers behind a norm: near what NumPy computes in float64."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.router_scores import router_scores

TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 6e-3}
"""Bound of the largest difference, relative to the largest score: a value that lies between two of the type may be rounded to either."""


@dataclass(frozen=True)
class Shapes:
    """A mixture's router."""

    dtype: str
    num_experts: int
    width: int
    eps: float = 1e-6
    weight_offset: float = 0.0
    has_bias: bool = False


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A step with padding."""
    return [case(shapes, (implementation,), interpret=interpret)]


def case(
    shapes: Shapes,
    names: tuple[str, ...],
    *,
    interpret: bool,
    num_tokens: int = 3,
    num_padding: int = 5,
    title: str = "few",
    **more: Any,
) -> Case:
    """A step of so many tokens, computed by these implementations; without padding they are not told which tokens are real."""
    options: dict[str, Any] = {"eps": shapes.eps, "weight_offset": shapes.weight_offset, "interpret": interpret}
    variants: dict[str, Any] = {name: functools.partial(router_scores, implementation=name, **options) for name in names}
    make = functools.partial(host_arrays, shapes, num_tokens, num_padding)
    error = functools.partial(host_error, shapes)
    return Case(title, make, variants, error, TOLERANCE[shapes.dtype], **more)


def host_arrays(shapes: Shapes, num_tokens: int, num_padding: int) -> tuple[Any, tuple[Any, ...]]:
    """Tokens, some of them large, and weights."""
    normals, dtype = Normals(), shapes.dtype
    x_TD = (normals(num_tokens + num_padding, shapes.width) * 4 + 1).astype(dtype)
    weight_D = (1 - shapes.weight_offset + normals(shapes.width) / 4).astype(dtype)
    router_ED = normals.of(dtype, shapes.num_experts, shapes.width)
    is_real = np.arange(num_tokens + num_padding) < num_tokens if num_padding else None
    return x_TD, (weight_D, router_ED, is_real, normals(shapes.num_experts) if shapes.has_bias else None)


def host_error(shapes: Shapes, x: Any, constants: tuple[Any, ...], got: Any) -> float:
    """The largest difference of real tokens' scores, relative to the largest; infinite where one of padding is not finite."""
    weight_D, router_ED, is_real, bias_E = (None if each is None else np.asarray(each) for each in constants)
    assert weight_D is not None and router_ED is not None
    x, got = np.asarray(x), np.asarray(got)
    if not np.isfinite(got).all():
        return math.inf
    is_real_T = np.ones(len(x), bool) if is_real is None else is_real
    wide = x[is_real_T].astype(np.float64)
    wide = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + shapes.eps)
    wide = (wide * (weight_D.astype(np.float64) + shapes.weight_offset)).astype(x.dtype).astype(np.float64)
    expected = wide @ router_ED.astype(np.float64).T + (0.0 if bias_E is None else bias_E.astype(np.float64))
    return float(np.abs(got[is_real_T] - expected).max() / np.abs(expected).max())
