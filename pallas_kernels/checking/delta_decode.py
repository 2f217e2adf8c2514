"""Decodes of linear attention: near what NumPy computes in float64; states of rows that take no part stay as they are."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.gated_delta import plain as gated_delta
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.delta_decode import Gate, delta_decode

TOLERANCE = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of the largest difference of outputs or states, relative to the largest value: outputs are rounded."""
_MAX_HEADS = 4
"""Key heads of a case at an engine's start: each is computed alike."""


@dataclass(frozen=True)
class Shapes:
    """A model's linear attention on one device."""

    dtype: str
    num_key_heads: int
    group_size: int
    """Value heads of each key head."""
    key_dim: int
    value_dim: int
    kernel_size: int = 4
    """Inputs that the convolution sees."""
    gate: Gate = "silu"
    eps: float = 1e-6


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A step with padding."""
    return [case(replace(shapes, num_key_heads=min(shapes.num_key_heads, _MAX_HEADS)), (implementation,), interpret=interpret)]


def case(
    shapes: Shapes,
    names: tuple[str, ...],
    *,
    interpret: bool,
    num_rows: int = 6,
    num_padding: int = 5,
    title: str = "decode",
    **more: Any,
) -> Case:
    """A step of so many rows, computed by these implementations."""
    options = {"gate": shapes.gate, "eps": shapes.eps, "interpret": interpret}
    variants: dict[str, Any] = {name: functools.partial(of_state, implementation=name, **options) for name in names}
    make = functools.partial(host_arrays, shapes, num_rows, num_padding)
    error = functools.partial(host_error, gate=shapes.gate, eps=shapes.eps)
    return Case(title, make, variants, error, TOLERANCE[shapes.dtype], **more)


def of_state(state: Any, conv_state: Any, *constants: Any, **options: Any) -> Any:
    """The op with the states as first arguments."""
    *arrays, row, is_new = constants
    arrays += [conv_state, state, row, is_new]
    return delta_decode(*arrays, **options)


def host_arrays(shapes: Shapes, num_rows: int = 6, num_padding: int = 5) -> tuple[Any, tuple[Any, ...]]:
    """States and a step. Some rows are new, and what they hold is NaN.

    num_padding: rows behind those of requests.
    """
    normals, dtype = Normals(), shapes.dtype
    K, G, H, V, J = shapes.num_key_heads, shapes.group_size, shapes.key_dim, shapes.value_dim, shapes.kernel_size
    R, N, C = num_rows + num_padding, num_rows + 4, 2 * H + G * V
    row_R = np.full(R, N - 1, np.int32)
    row_R[:num_rows] = np.random.default_rng(0).permutation(N - 1)[:num_rows]
    is_new_R = np.arange(R) % 3 == 1
    conv_state_NKjC, state_NKGHV = normals.of(dtype, N, K, J - 1, C), normals(N, K, G, H, V)
    for array in (conv_state_NKjC, state_NKGHV):
        array[row_R[is_new_R & (row_R < N - 1)]] = np.nan
    products = normals.of(dtype, R, K, C + G * V), normals.of(dtype, R, K, 2 * G)
    weights = normals.of(dtype, K, C, J), normals(K, G) - 2, normals(K, G), 1 + normals.of(dtype, V)
    return state_NKGHV, (conv_state_NKjC, *products, *weights, row_R, is_new_R)


def host_error(state: Any, constants: tuple[Any, ...], got: Any, *, gate: Gate, eps: float) -> float:
    """The largest difference, relative to the largest value; infinite where another row's state has changed, or padding is not finite."""
    conv_state, *arrays, row_R, is_new_R = (np.asarray(x) for x in constants)
    before = conv_state, np.asarray(state)
    out, *after = (np.asarray(x) for x in got)
    trash = len(conv_state) - 1
    others = np.setdiff1d(np.arange(trash), row_R)
    if not all(same_bits(old[others], new[others]) for old, new in zip(before, after, strict=True)):
        return math.inf
    if not np.isfinite(out[row_R == trash].astype(np.float32)).all():
        return math.inf
    errors: list[float] = []
    for r, row in enumerate(row_R):
        if row == trash:
            continue
        begin = [np.zeros(old.shape[1:]) if is_new_R[r] else old[row].astype(np.float64) for old in before]
        products, weights = ([x.astype(np.float64) for x in part] for part in ([x[r] for x in arrays[:2]], arrays[2:]))
        expected = plain(*begin, *products, *weights, gate=gate, eps=eps)
        errors += map(_difference, (out[r], *(new[row] for new in after)), expected)
    return float(np.max(errors))


def plain(
    conv_state_KjC: np.ndarray,
    state_KGHV: np.ndarray,
    qkvz_KC: np.ndarray,
    ba_KC: np.ndarray,
    conv_weight_KCJ: np.ndarray,
    log_rate_KG: np.ndarray,
    rate_bias_KG: np.ndarray,
    norm_weight_V: np.ndarray,
    *,
    gate: Gate,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [K, G, V] of one row and its states after it, in NumPy."""
    (K, G, H, V), C = state_KGHV.shape, conv_weight_KCJ.shape[1]
    window_KJC = np.concatenate([conv_state_KjC, qkvz_KC[:, None, :C]], axis=1)
    y_KC = np.einsum("kjc,kcj->kc", window_KJC, conv_weight_KCJ)
    q_KH, k_KH, v_KC = np.split(y_KC * _sigmoid(y_KC), [H, 2 * H], axis=1)
    q_KH, k_KH = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q_KH, k_KH))
    b_KG, a_KG = np.split(ba_KC, 2, axis=1)
    log_decay_KG = -np.exp(log_rate_KG) * np.logaddexp(a_KG + rate_bias_KG, 0)
    token = q_KH / math.sqrt(H), k_KH, v_KC.reshape(K, G, V), log_decay_KG, _sigmoid(b_KG)
    (out_KGV,), state_KGHV = gated_delta(state_KGHV, *(x[None] for x in token))
    z_KGV = qkvz_KC[:, C:].reshape(K, G, V)
    normed_KGV = out_KGV / np.sqrt(np.mean(out_KGV * out_KGV, axis=-1, keepdims=True) + eps) * norm_weight_V
    return normed_KGV * _sigmoid(z_KGV) * (1 if gate == "sigmoid" else z_KGV), window_KJC[:, 1:], state_KGHV


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30))
