"""Drawing tokens from logits, and their likeliest, without sorting: signatures of what the kernels do.

Logits are float32 [R, V]; columns of -inf are never drawn. The plain versions are one or two lines of JAX each where their
callers live (`jnp.argmax`, `lax.top_k`); here are the kernels for large V, and the pieces that both share: `noise`, the
Gumbel noise of a token, and `order`, floats as ordered integers.
"""

import importlib
from types import ModuleType
from typing import NamedTuple

import jax

IMPLEMENTATIONS = {"triton": "pallas_kernels.sampling.triton"}
"""Each module has argmax, draw, top_values and supports(platform, vocab_size, interpret)."""

MAX_TOP_VALUES = 64
"""The largest k that `top_values` takes; its time grows with k."""


class DrawParams(NamedTuple):
    """What each of R rows asks of a draw; float32[R] unless told."""

    is_greedy: jax.Array
    """bool[R]: the likeliest token; the rest is ignored."""
    scale: jax.Array
    """1 / temperature; logits are multiplied by it."""
    log_min_p: jax.Array
    """Tokens whose scaled logit is less than the highest by more than this are dropped; -inf: none."""
    top_k: jax.Array
    """int32[R]: the k-th largest and what ties with it stay; 0 or ≥ V: all."""
    top_p: jax.Array
    """Of what the others keep, the likeliest that hold this fraction stay, ties with the last included; ≥ 1: all."""
    word_0: jax.Array
    """uint32[R]: key of the noise."""
    word_1: jax.Array


COUNT_BITS = 24
"""Of a token's word the lower bits count it in the output; the next one tells whether it is in the prompt."""


class Adjustments(NamedTuple):
    """What changes each of R rows of logits before anything else; float32[R] unless told."""

    mask_RW: jax.Array
    """int32: bit b of word w allows token 32 w + b; the others count as -inf."""
    words_NV: jax.Array
    """int32: a word for each token of the vocabulary, in N rows of which `word_row` chooses."""
    word_row: jax.Array
    """int32[R]; -1: the row has none, as if no token were there yet."""
    repetition: jax.Array
    """Positive logits of tokens in the prompt or the output are divided by it, others multiplied."""
    frequency: jax.Array
    """Times its count it is subtracted from a token's logit."""
    presence: jax.Array
    """It is subtracted from the logits of tokens in the output."""


class TopValues(NamedTuple):
    """The k largest logits of each row in order, of equals the lower id first, and where one token's logit stands."""

    ids_RK: jax.Array
    values_RK: jax.Array
    rank_R: jax.Array
    """int32[R]: how many logits are ≥ the given one."""
    logsumexp_R: jax.Array


def argmax(logits_RV: jax.Array, *, implementation: str, interpret: bool = False) -> jax.Array:
    """int32[R]: the id of the largest logit, the lowest among equals; NaN counts as +inf; 0 where all are -inf."""
    return _resolve(implementation, logits_RV, interpret).argmax(logits_RV, interpret=interpret)


def draw(
    logits_RV: jax.Array,
    params: DrawParams,
    adjustments: Adjustments | None = None,
    *,
    implementation: str,
    interpret: bool = False,
) -> jax.Array:
    """int32[R]: of the tokens that a row's filters keep, the one of the largest scaled logit plus Gumbel noise.

    Logits are adjusted as they are read, and written nowhere.

    Exact but for the rounding of sums and logarithms: a top_p that falls between two sums of probabilities within rounding may
    keep one token more or less than another implementation, and equal sums of logit and noise may fall either way.
    """
    return _resolve(implementation, logits_RV, interpret).draw(logits_RV, params, adjustments, interpret=interpret)


def top_values(logits_RV: jax.Array, own_R: jax.Array, k: int, *, implementation: str, interpret: bool = False) -> TopValues:
    """The k largest logits of each row, k ≤ MAX_TOP_VALUES, the rank of the logit own_R, and the row's logsumexp."""
    if not 1 <= k <= min(MAX_TOP_VALUES, logits_RV.shape[1]):
        raise ValueError(f"top_values of {k} out of {logits_RV.shape[1]} logits; it takes 1 to {MAX_TOP_VALUES}, use lax.top_k")
    return _resolve(implementation, logits_RV, interpret).top_values(logits_RV, own_R, k, interpret=interpret)


def supports(implementation: str, *, vocab_size: int, interpret: bool = False) -> bool:
    """Whether an implementation takes rows of so many logits, on the platform it is made for."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.supports(platform="gpu", vocab_size=vocab_size, interpret=interpret)


def _resolve(implementation: str, logits_RV: jax.Array, interpret: bool) -> ModuleType:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no sampling kernels {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")
    if logits_RV.dtype != jax.numpy.float32:
        raise ValueError(f"sampling kernels take float32 logits, not {logits_RV.dtype}; convert them")
    if not supports(implementation, vocab_size=logits_RV.shape[1], interpret=interpret):
        raise ValueError(f"sampling kernels {implementation!r} do not take {logits_RV.shape[1]} logits; use the plain version")
    return importlib.import_module(IMPLEMENTATIONS[implementation])
