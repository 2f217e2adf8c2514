"""Sampling scalars of each row of a batch: one int32 vector per request, typed arrays on the device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.variants import state_use
from jaxllm.sampling_params import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingColumns:
    """Scalars of R rows, each an array [R], float32 unless stated otherwise."""

    temperature: jax.Array
    """0: greedy."""
    top_k: jax.Array
    """int32; 0: all."""
    top_p: jax.Array
    min_p: jax.Array
    seed_low: jax.Array
    """uint32; the two halves of an int64."""
    seed_high: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    min_tokens: jax.Array
    """int32; number of output tokens before which no stop token is drawn."""
    top_n_sigma: jax.Array
    """0: off."""
    uses_state: jax.Array
    """int32: `StateUse`. With NONE the request was not admitted to the SamplingState: its row there holds another's stale data."""


_COLUMNS: dict[str, tuple[str, float, Callable[[SamplingParams], float]]] = {
    "temperature": ("float32", 0, lambda params: params.temperature),
    "top_k": ("int32", 0, lambda params: min(params.top_k, 2**31 - 1)),
    "top_p": ("float32", 1, lambda params: params.top_p),
    "min_p": ("float32", 0, lambda params: params.min_p),
    "seed_low": ("uint32", 0, lambda params: (params.seed or 0) % 2**32),
    "seed_high": ("uint32", 0, lambda params: (params.seed or 0) % 2**64 >> 32),
    "repetition_penalty": ("float32", 1, lambda params: params.repetition_penalty),
    "frequency_penalty": ("float32", 0, lambda params: params.frequency_penalty),
    "presence_penalty": ("float32", 0, lambda params: params.presence_penalty),
    "min_tokens": ("int32", 0, lambda params: params.min_tokens),
    "top_n_sigma": ("float32", 0, lambda params: min(params.top_n_sigma, 1e6)),  # so far from the highest is no logit
    "uses_state": ("int32", 0, state_use),
}
"""Per column: its type, its neutral value, and its source."""

NUM_COLUMNS = len(_COLUMNS)


_RECORD = np.dtype([(name, dtype) for name, (dtype, _, _) in _COLUMNS.items()])


def _words(values: Iterable[float]) -> np.ndarray:
    return np.array([tuple(values)], _RECORD).view(np.int32)


# Words are XORed with the neutral ones, so that a row of zeros (padding) is neutral.
_NEUTRAL = _words(neutral for _, neutral, _ in _COLUMNS.values())


def pack_columns(params: SamplingParams) -> np.ndarray:
    """int32[NUM_COLUMNS] of a request, whose seed must be set unless it is greedy."""
    assert params.seed is not None or params.is_greedy, "the input processor gives every request a seed"
    return _words(read(params) for _, _, read in _COLUMNS.values()) ^ _NEUTRAL


def unpack_columns(columns_RC: jax.Array) -> SamplingColumns:
    """The rows of packed columns as typed arrays; a row of zeros is neutral."""
    words_CR = (columns_RC ^ jnp.asarray(_NEUTRAL)).T
    typed = {name: jax.lax.bitcast_convert_type(words_CR[i], dtype) for i, (name, (dtype, _, _)) in enumerate(_COLUMNS.items())}
    return SamplingColumns(**typed)
