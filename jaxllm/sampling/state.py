"""The per-request state of FULL sampling on the device: one row per request, and a last one for padding.

A request that needs it (`variants.needs_state`) is admitted whole when it gets its row, new or resumed after preemption;
after that only drawn tokens are added. Rows are never cleared: `SamplingColumns.uses_state` marks the valid ones.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.processors import Processor, num_argument_columns, pack_arguments
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from pallas_kernels.sampling import COUNT_BITS

# A token's word: how often it is in the output, and two flags.
_COUNT = (1 << COUNT_BITS) - 1
_IN_PROMPT = 1 << COUNT_BITS
_ENDS_REQUEST = 2 << COUNT_BITS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Arrays over rows (first axis), all of 4-byte types."""

    tokens: jax.Array
    """int32[rows, V]: one word per token of the vocabulary, read through the properties below."""
    bias: jax.Array
    """float32[rows, V]: logit_bias, and -inf where allowed_token_ids forbids."""
    recent: jax.Array
    """int32[rows, MAX_BAD_WORD_TOKENS - 1]: the last output tokens, newest last; -1 before the first."""
    bad_words: jax.Array
    """int32[rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]: forbidden sequences, right-aligned; -1 fills."""
    num_prompt_tokens: jax.Array
    """int32[rows]"""
    arguments: jax.Array
    """float32[rows, A]: of custom logits processors."""

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int, processors: Sequence[Processor] = ()) -> "SamplingState":
        """An empty state. `num_rows` counts the trash row too; `vocab_size` is the number of columns of the logits."""
        return cls(
            tokens=jnp.zeros((num_rows, vocab_size), jnp.int32),
            bias=jnp.zeros((num_rows, vocab_size), jnp.float32),
            recent=jnp.full((num_rows, MAX_BAD_WORD_TOKENS - 1), -1, jnp.int32),
            bad_words=jnp.full((num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
            num_prompt_tokens=jnp.zeros(num_rows, jnp.int32),
            arguments=jnp.zeros((num_rows, num_argument_columns(processors)), jnp.float32),
        )

    @property
    def output_count(self) -> jax.Array:
        return self.tokens & _COUNT

    @property
    def in_prompt(self) -> jax.Array:
        return self.tokens & _IN_PROMPT != 0

    @property
    def ends_request(self) -> jax.Array:
        """Whether each token is an EOS or stop token."""
        return self.tokens & _ENDS_REQUEST != 0


def pack_admission(
    params: SamplingParams,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: Sequence[int],
    *,
    vocab_size: int,
    processors: Sequence[Processor] = (),
) -> np.ndarray:
    """A request's row as one int32 vector of fixed length, for `admit`. `token_ids`: the prompt and the outputs so far.

    `vocab_size` is the number of columns of the logits, as for `SamplingState.zeros`.
    """
    recent_length, bad_words_shape = MAX_BAD_WORD_TOKENS - 1, (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    sizes = [vocab_size, vocab_size, recent_length, math.prod(bad_words_shape), 1, num_argument_columns(processors)]
    packed = np.zeros(sum(sizes), np.int32)
    tokens, bias, recent, bad_words, num_prompt, arguments = np.split(packed, np.cumsum(sizes)[:-1])  # views

    prompt, outputs = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    np.add.at(tokens, np.asarray(outputs, np.int64), 1)
    tokens[np.asarray(prompt, np.int64)] |= _IN_PROMPT
    ends = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)]
    tokens[np.asarray(ends, np.int64)] |= _ENDS_REQUEST

    bias = bias.view(np.float32)
    for token, number in (params.logit_bias or {}).items():
        bias[token] = number
    if params.allowed_token_ids is not None:
        forbidden = np.ones(vocab_size, bool)
        forbidden[params.allowed_token_ids] = False
        bias[forbidden] = -np.inf

    last = outputs[-recent_length:]
    recent[:] = -1
    recent[recent_length - len(last) :] = last
    assert not params.bad_words or params.bad_words_token_ids is not None, "the input processor fills bad_words_token_ids"
    bad_words[:] = -1
    for row, sequence in zip(bad_words.reshape(bad_words_shape), params.bad_words_token_ids or (), strict=False):
        row[len(row) - len(sequence) :] = sequence

    num_prompt[:] = num_prompt_tokens
    arguments.view(np.float32)[:] = pack_arguments(params, processors)
    return packed


def num_words(state: SamplingState) -> int:
    """The length of a packed request. The arrays of the state may be shapes."""
    return sum(math.prod(array.shape[1:]) for array in jax.tree.leaves(state))


def admit(state: SamplingState, row: jax.Array, packed: jax.Array) -> SamplingState:
    """Overwrite one row (int32, a scalar or [1]) with a packed request; donate the state."""
    fields = [field.name for field in dataclasses.fields(state)]
    sizes = [getattr(state, name)[0].size for name in fields]
    assert packed.shape == (sum(sizes),), f"packed for other sizes: {packed.shape}, the state's rows have {sum(sizes)} words"
    updated, first = {}, 0
    for name, size in zip(fields, sizes, strict=True):
        rows = getattr(state, name)
        words = jax.lax.bitcast_convert_type(packed[first : first + size], rows.dtype)
        updated[name] = rows.at[row].set(words.reshape(rows.shape[1:]))
        first += size
    return SamplingState(**updated)


def gather(state: SamplingState, row_R: jax.Array, uses_state_R: jax.Array) -> SamplingState:
    """The rows of a batch; those of requests without state are neutral."""
    rows = jax.tree.map(lambda array: array[row_R], state)
    alive_R1 = uses_state_R[:, None] != 0
    return SamplingState(
        tokens=jnp.where(alive_R1, rows.tokens, 0),
        bias=jnp.where(alive_R1, rows.bias, 0.0),
        recent=rows.recent,
        bad_words=jnp.where(alive_R1[..., None], rows.bad_words, -1),
        num_prompt_tokens=rows.num_prompt_tokens,
        arguments=jnp.where(alive_R1, rows.arguments, 0.0),
    )


def record(state: SamplingState, row_R: jax.Array, uses_state_R: jax.Array, token_R: jax.Array) -> SamplingState:
    """Add each row's drawn token to its output; rows without state stay as they are. Donate the state."""
    num_rows = state.tokens.shape[0]
    row_R = jnp.where(uses_state_R != 0, row_R, num_rows)  # out of range: dropped
    shifted_RM = jnp.concatenate([state.recent[row_R, 1:], token_R[:, None]], axis=1)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[row_R, token_R].add(1, mode="drop"),
        recent=state.recent.at[row_R].set(shifted_RM, mode="drop"),
    )
