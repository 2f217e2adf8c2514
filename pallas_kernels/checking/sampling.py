"""Tokens from logits: argmax, draws, and the likeliest values with rank and logsumexp."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import sampling
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals

TOLERANCE = 1e-5
"""Bound of errors of logsumexp."""
DRAW_TOLERANCE = 1e-4
"""How much less a drawn token's logit plus noise may be than the largest, and how far a sum of probabilities may be off top_p."""


@dataclass(frozen=True)
class Shapes:
    """A model's logits."""

    vocab_size: int
    num_padded: int = 0
    """Columns at the end that are -inf."""
    num_top_values: int = 20


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """argmax, draws and top_values of a few rows. Plain JAX ("xla") has no draw here: its own is `jaxllm.sampling`."""
    found = [
        Case("argmax", functools.partial(_argmax_arrays, shapes), {}, _argmax_error, 0.0),
        Case("draw", functools.partial(_draw_arrays, shapes), {}, _draw_error, DRAW_TOLERANCE),
        Case("draw adjusted", functools.partial(_adjusted_arrays, shapes), {}, _adjusted_error, DRAW_TOLERANCE),
    ]
    if 1 <= shapes.num_top_values <= min(sampling.MAX_TOP_VALUES, shapes.vocab_size):
        make = functools.partial(_top_arrays, shapes)
        found.append(Case("top_values", make, {}, functools.partial(_top_error, shapes.num_top_values), TOLERANCE))
    if implementation == "xla":
        calls: dict[str, Callable[..., Any]] = {
            "argmax": plain_argmax,
            "top_values": functools.partial(plain_top_values, k=shapes.num_top_values),
        }
    else:
        options: dict[str, Any] = {"implementation": implementation, "interpret": interpret}
        calls = {
            "argmax": functools.partial(sampling.argmax, **options),
            "draw": lambda logits, *params: sampling.draw(logits, sampling.DrawParams(*params), **options),
            "draw adjusted": lambda logits, *given: sampling.draw(logits, *_split(given), **options),
            "top_values": functools.partial(top_values, k=shapes.num_top_values, **options),
        }
    return [
        Case(case.name, case.make, {implementation: calls[case.name]}, case.error, case.tolerance)
        for case in found
        if case.name in calls
    ]


def top_values(logits: jax.Array, own: jax.Array, *, k: int, **options: Any) -> tuple[jax.Array, ...]:
    top = sampling.top_values(logits, own, k, **options)
    return top.ids_RK, top.values_RK, top.rank_R, top.logsumexp_R


def plain_argmax(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def plain_top_values(logits: jax.Array, own: jax.Array, *, k: int) -> tuple[jax.Array, ...]:
    values, ids = lax.top_k(logits, k)
    return ids, values, jnp.sum(logits >= own[:, None], axis=-1), jax.nn.logsumexp(logits, axis=-1)


# Arrays and oracles on the host


def _logits(shapes: Shapes, num_rows: int) -> np.ndarray:
    """With equal values; the last row is -inf but for one column."""
    logits = np.round(Normals()(num_rows, shapes.vocab_size) * (3 * 64)) / 64 + 0.0  # no -0: it is below 0 to lax.top_k
    logits[-1] = -np.inf
    logits[-1, shapes.vocab_size // 2] = 1.5
    if shapes.num_padded:
        logits[:, shapes.vocab_size - shapes.num_padded :] = -np.inf
    return logits.astype(np.float32)


def _argmax_arrays(shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    logits = _logits(shapes, 5)
    tied = shapes.vocab_size // 3
    logits[0, [tied, tied + 1, shapes.vocab_size // 2]] = 99.0
    return logits, ()


def _argmax_error(logits: np.ndarray, _: Any, got: Any) -> float:
    return 0.0 if np.array_equal(np.asarray(got), logits.argmax(axis=1)) else math.inf


def _draw_arrays(shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    """Greedy, without filters, each filter alone, all together, and the row with one token."""
    nothing = -np.inf
    rows = [
        (True, 1.0, nothing, 0, 1.0),
        (False, 1.0, nothing, 0, 1.0),
        (False, 1.4, nothing, 20, 1.0),
        (False, 0.7, nothing, 0, 0.9),
        (False, 1.0, math.log(0.05), 0, 1.0),
        (False, 1.2, math.log(0.01), 50, 0.8),
        (False, 1.0, nothing, 3, 0.5),
    ]
    types = (np.bool_, np.float32, np.float32, np.int32, np.float32)
    columns: list[Any] = [np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    words = np.random.default_rng(3).integers(0, 2**32, (2, len(rows)), np.uint32)
    return _logits(shapes, len(rows)), (*columns, *words)


def _draw_error(logits: np.ndarray, constants: Any, got: Any) -> float:
    """How much less the worst row's logit plus noise is than the largest; infinite for a token that its filters drop."""
    params = sampling.DrawParams(*constants)
    return max(
        _row_error(row, sampling.DrawParams(*(p[r] for p in params)), int(np.asarray(got)[r])) for r, row in enumerate(logits)
    )


def _adjusted_arrays(shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    """The same draws with all adjustments, out of other rows of words; one row has no words, the last one a single token allowed."""
    logits, params = _draw_arrays(shapes)
    num_rows, random = len(logits), np.random.default_rng(4)
    count = random.poisson(0.3, (num_rows + 2, shapes.vocab_size)).astype(np.int32)
    in_prompt = random.integers(0, 2, count.shape, np.int32)
    other_flags = random.integers(0, 2, count.shape, np.int32) << (sampling.COUNT_BITS + 1)
    mask: Any = random.integers(-(2**31), 2**31, (num_rows, -(-shapes.vocab_size // 32)), np.int64).astype(np.int32)
    mask[-1, shapes.vocab_size // 2 // 32] = -1
    word_row: Any = random.permutation(num_rows + 2)[:num_rows].astype(np.int32)
    word_row[2] = -1
    penalties = random.uniform([[0.7], [0.0], [-0.5]], [[1.5], [1.0], [0.5]], (3, num_rows)).astype(np.float32)
    words: Any = count | in_prompt << sampling.COUNT_BITS | other_flags
    return logits, (*params, *sampling.Adjustments(mask, words, word_row, *penalties))


def _split(constants: Any) -> tuple[sampling.DrawParams, sampling.Adjustments]:
    num_params = len(sampling.DrawParams._fields)
    return sampling.DrawParams(*constants[:num_params]), sampling.Adjustments(*constants[num_params:])


def _adjusted_error(logits: np.ndarray, constants: Any, got: Any) -> float:
    """As `_draw_error`, of adjusted logits."""
    params, by = _split(constants)
    has_words = np.asarray(by.word_row)[:, None] >= 0
    words = np.where(has_words, np.asarray(by.words_NV)[np.maximum(by.word_row, 0)], 0)
    count = words & ((1 << sampling.COUNT_BITS) - 1)
    is_there = (count > 0) | (words >> sampling.COUNT_BITS & 1 != 0)
    repetition, frequency, presence = (np.asarray(column)[:, None] for column in by[-3:])
    adjusted = np.where(is_there, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    adjusted = adjusted - frequency * count.astype(np.float32) - np.where(count > 0, presence, np.float32(0))
    bits = np.unpackbits(np.asarray(by.mask_RW).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return _draw_error(np.where(bits != 0, adjusted, np.float32(-np.inf)), params, got)


def _row_error(logits_V: np.ndarray, params: sampling.DrawParams, token: int) -> float:
    if not 0 <= token < len(logits_V):
        return math.inf
    if params.is_greedy:
        return 0.0 if token == logits_V.argmax() else math.inf
    scaled_V = logits_V * params.scale
    surely, perhaps = _kept(scaled_V, params, -DRAW_TOLERANCE), _kept(scaled_V, params, DRAW_TOLERANCE)
    if not perhaps[token]:
        return math.inf
    noisy_V = scaled_V.astype(np.float64) + _gumbel(len(logits_V), params.word_0, params.word_1)
    return max(0.0, float(noisy_V[surely].max(initial=-np.inf) - noisy_V[token]))


def _kept(scaled_V: np.ndarray, params: sampling.DrawParams, slack: float) -> np.ndarray:
    """The tokens that pass the filters, those of min_p and top_p with some slack; the likeliest always does."""
    highest = scaled_V.max()
    kept_V = (scaled_V > -np.inf) & (scaled_V >= highest + params.log_min_p - slack)
    if 0 < params.top_k < len(scaled_V):
        kept_V &= scaled_V >= np.partition(scaled_V, -params.top_k)[-params.top_k]
    if params.top_p < 1:
        weight_V = np.where(kept_V, np.exp(scaled_V.astype(np.float64) - highest), 0.0)
        value_U, place_V = np.unique(scaled_V, return_inverse=True)
        weight_U = np.bincount(place_V, weight_V, len(value_U)) / weight_V.sum()
        likelier_U = weight_U[::-1].cumsum()[::-1] - weight_U
        kept_V &= (likelier_U < params.top_p + slack)[place_V]
    return kept_V | (scaled_V == highest)


def _gumbel(size: int, word_0: Any, word_1: Any) -> np.ndarray:
    """`pallas_kernels.sampling.noise` in NumPy, float64 from its float32 uniforms."""
    bits = _scramble(_scramble(np.arange(size, dtype=np.uint32) ^ word_0) + word_1)
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-uniform.astype(np.float64)))


def _scramble(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _top_arrays(shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    logits = _logits(shapes, 4)
    return logits, (np.append(logits[:3, 7], np.float32(-np.inf)),)


def _top_error(k: int, logits: np.ndarray, constants: Any, got: Any) -> float:
    """Error of logsumexp; infinite where an id, a value or a rank differs. Ids of values of -inf are of no account."""
    ids_RK, values_RK, rank_R, logsumexp_R = (np.asarray(array) for array in got)
    (own_R,) = constants
    order_RK = np.stack([_largest(row, k) for row in logits])
    expected_RK = np.take_along_axis(logits, order_RK, axis=1)
    is_right = (
        np.array_equal(values_RK, expected_RK)
        and np.array_equal(np.where(np.isfinite(expected_RK), ids_RK, order_RK), order_RK)
        and np.array_equal(rank_R, (logits >= own_R[:, None]).sum(axis=1))
    )
    exact_R = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    off_R = np.abs(logsumexp_R - exact_R) / np.maximum(1.0, np.abs(exact_R))
    return float(off_R.max()) if is_right else math.inf


def _largest(logits_V: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest in order, of equals the lowest first."""
    candidates = np.flatnonzero(logits_V >= np.partition(logits_V, -k)[-k])
    return candidates[np.argsort(-logits_V[candidates], kind="stable")][:k]
