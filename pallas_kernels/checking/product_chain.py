"""Chains of products: near what NumPy computes in float64. Rows of padding are NaN and must reach no other row."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.checking.quantized_matmul import distance
from pallas_kernels.product_chain import PLAIN, Weights, chain

TOLERANCE = 0.012
"""Largest `distance` in bfloat16: three units of the largest rounding, for results of rounded values and their own."""
_NUM_ROWS = (1, 13, 64)
_PADDED = 3
"""Rows of padding, where there are more."""


@dataclass(frozen=True)
class Shapes:
    """The dense layers of a model between two attentions."""

    width: int
    hidden: int
    of_heads: int | None
    """Values of attention's result; None: the chain begins at the MLP."""
    qkv: int | None
    """Queries, keys and values of the next layer; None: the chain ends with the MLP."""
    dtype: str = "bfloat16"
    eps: float = 1e-5

    def __str__(self) -> str:
        ends = [f"from {self.of_heads}"] * (self.of_heads is not None) + [f"to {self.qkv}"] * (self.qkv is not None)
        return " ".join([f"chain {self.width}x{self.hidden}", *ends])

    @property
    def num_values(self) -> int:
        """Values of all products' weights."""
        return self.width * (3 * self.hidden + (self.of_heads or 0) + (self.qkv or 0))


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A row, a few, and the most."""
    return [case(shapes, num_rows, {implementation: interpret}) for num_rows in _NUM_ROWS]


def case(shapes: Shapes, num_rows: int, implementations: dict[str, bool]) -> Case:
    """implementations: by name, whether it is interpreted."""
    return Case(
        f"{shapes}, {num_rows} rows",
        functools.partial(host_arrays, shapes, num_rows),
        {
            name: functools.partial(chain, eps=shapes.eps, implementation=name, interpret=interpret)
            for name, interpret in implementations.items()
        },
        functools.partial(host_error, shapes),
        TOLERANCE,
        bytes=2.0 * shapes.num_values,
        flops=2.0 * num_rows * shapes.num_values,
    )


def layers_case(shapes: Shapes, num_rows: int, num_layers: int, implementations: dict[str, bool]) -> Case:
    """Whole layers one after the other, of which each takes the first values of the last result in the place of attention's.

    Kernels also with the next layer's weights brought into the cache."""
    call = functools.partial(_layers, eps=shapes.eps)
    variants: dict[str, Any] = {}
    for name, interpret in implementations.items():
        options: dict[str, Any] = {"implementation": name, "interpret": interpret}
        variants[name] = functools.partial(call, **options)
        if name not in PLAIN:
            variants[f"{name} upcoming"] = functools.partial(call, is_upcoming=True, **options)

    def make() -> tuple[np.ndarray, tuple[Any, ...]]:
        x, (residual, first) = host_arrays(shapes, num_rows)
        # Other layers have other values: rows in another order.
        return x, (residual, [_rolled(first, i) for i in range(num_layers)])

    return Case(
        f"{shapes}, {num_rows} rows, {num_layers} layers",
        make,
        variants,
        functools.partial(_layers_error, shapes),
        TOLERANCE * num_layers,
        bytes=2.0 * shapes.num_values * num_layers,
        flops=2.0 * num_rows * shapes.num_values * num_layers,
    )


def _layers(x: Any, residual: Any, layers: Sequence[Weights], *, is_upcoming: bool = False, **options: Any) -> tuple[Any, Any]:
    h, qkv = residual, x
    for weights, following in zip(layers, [*layers[1:], None], strict=True):
        found: list[Any] = [] if following is None or not is_upcoming else [following.out_AD, following.gate_up_DCF]
        h, qkv = chain(qkv[:, : x.shape[1]], h, weights, upcoming=found, **options)
    return h, qkv


def _layers_error(shapes: Shapes, x: Any, constants: Any, got: Any) -> float:
    real = num_real(len(x))
    h, qkv = constants[0][:real], x[:real]
    for weights in constants[1]:
        h, qkv = host_chain(qkv[:, : x.shape[1]], h, weights, shapes.eps)
    found = [np.asarray(each)[:real].astype(np.float64) for each in got]
    return max(distance(each, right) for each, right in zip(found, (h, qkv), strict=True))


def _rolled(weights: Weights, number: int) -> Weights:
    return jax.tree.map(lambda array: np.roll(array, number, axis=0), weights)  # type: ignore[no-any-return]


def host_arrays(shapes: Shapes, num_rows: int) -> tuple[np.ndarray, tuple[np.ndarray, Weights]]:
    """x, of whose rows the last are NaN, and the residual and the weights, whose products are as large as what they take."""
    normals, (D, F, A, Q) = Normals(), (shapes.width, shapes.hidden, shapes.of_heads, shapes.qkv)

    def weight(inputs: int, *outputs: int) -> Any:
        return (normals(inputs, *outputs) / np.float32(math.sqrt(inputs))).astype(shapes.dtype)

    def norm() -> Any:
        return (1 + 0.1 * normals(D)).astype(shapes.dtype)

    x = normals(num_rows, A or D)
    x[num_real(num_rows) :] = np.nan
    weights = Weights(
        weight(D, 2, F),
        weight(F, D),
        out_AD=None if A is None else weight(A, D),
        mlp_norm_D=None if A is None else norm(),
        qkv_DQ=None if Q is None else weight(D, Q),
        next_norm_D=None if Q is None else norm(),
    )
    return x.astype(shapes.dtype), (normals.of(shapes.dtype, num_rows, D), weights)


def num_real(num_rows: int) -> int:
    """Rows before the padding."""
    return max(1, num_rows - _PADDED)


def host_error(shapes: Shapes, x: Any, constants: Any, got: Any) -> float:
    """The larger `distance` of the two results' real rows; NaN where one is not finite."""
    real = num_real(len(x))
    found = [np.asarray(each)[:real].astype(np.float64) for each in got if each is not None]
    if not all(np.isfinite(each).all() for each in found):
        return math.nan
    expected = [each for each in host_chain(x[:real], constants[0][:real], constants[1], shapes.eps) if each is not None]
    return max(distance(each, right) for each, right in zip(found, expected, strict=True))


def host_chain(x_TA: Any, residual_TD: Any, weights: Weights, eps: float) -> tuple[np.ndarray, np.ndarray | None]:
    """`chain` in float64."""
    x, h = _wide(x_TA), _wide(residual_TD)
    if weights.out_AD is not None:
        h = h + x @ _wide(weights.out_AD)
        x = _norm(h, weights.mlp_norm_D, eps)
    gate, up = (x @ _wide(weights.gate_up_DCF[:, i]) for i in range(2))
    h = h + (gate / (1 + np.exp(-gate)) * up) @ _wide(weights.down_FD)
    return h, None if weights.qkv_DQ is None else _norm(h, weights.next_norm_D, eps) @ _wide(weights.qkv_DQ)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _norm(h_TD: np.ndarray, weight_D: Any, eps: float) -> np.ndarray:
    return h_TD / np.sqrt(np.mean(h_TD * h_TD, axis=-1, keepdims=True) + eps) * _wide(weight_D)  # type: ignore[no-any-return]
