"""Greedy answers of the model without the engine."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tokenizers import Tokenizer

from ..chat_tokenizer import STOP_IDS
from ..packing import TOKEN_MASK
from .model import Weights, encode_pictures, logits, text_hidden
from .model_files import Sizes
from .rows import Batch, BatchShape, Documents, Packer
from .scoring import MAX_ANSWER_TOKENS, Asked

MAX_PROMPT_TOKENS = 160
MAX_PATCHES = 400


def answer_shape(rows: int) -> BatchShape:
    """Of a batch of one question a row with its pictures."""
    return BatchShape(rows, MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS, rows, MAX_PATCHES)


class Answerer:
    """Computes whole rows for every token: short answers of a small model need no cache."""

    def __init__(self, weights: Weights, sizes: Sizes, tokenizer: Tokenizer, dtype: str, batch: int):
        self._weights = {name: value.astype(dtype) for name, value in weights.items()}
        self._tokenizer = tokenizer
        self._documents = Documents(tokenizer)
        self._shape = answer_shape(batch)
        self._generate = jax.jit(lambda weights, batch, lengths: _generate(weights, sizes, batch, lengths))

    def answer(self, questions: Sequence[Asked], is_late: Callable[[], bool] = lambda: False) -> list[str]:
        """The greedy answer to each question, or to those that come before it is late."""
        answers: list[str] = []
        for at in range(0, len(questions), self._shape.rows):
            if is_late():
                break
            answers += self._tokenizer.decode_batch(self.token_ids(questions[at : at + self._shape.rows]))
        return answers

    def token_ids(self, questions: Sequence[Asked]) -> list[list[int]]:
        """The answers to one batch of questions, without the tokens that end them."""
        batch = self._shape.empty()
        packer = Packer(self._shape, batch)
        lengths = np.zeros(self._shape.rows, np.int32)
        for row, asked in enumerate(questions):
            document = self._documents.of_prompt(asked.prompt, asked.pictures)
            packer.put(document, row, [row] * len(document.pictures))
            lengths[row] = len(document.tokens)
        answers = []
        for ids in np.asarray(self._generate(self._weights, batch, lengths))[: len(questions)]:
            ended = np.flatnonzero(np.isin(ids, STOP_IDS))
            answers.append(ids[: ended[0] if len(ended) else len(ids)].tolist())
        return answers


def _generate(weights: Weights, sizes: Sizes, batch: Batch, lengths_R: Array) -> Array:
    """Continuations [R, MAX_ANSWER_TOKENS] of the rows; those of length 0 are idle. After a stop id comes anything."""
    R, T = batch.tokens_RT.shape
    rows = jnp.arange(R)
    ids_RT = (batch.tokens_RT & TOKEN_MASK).astype(jnp.int32)
    pictures = encode_pictures(weights, sizes, batch.patches_VPC, batch.places_VP4, batch.segment_VP)
    last_R = batch.positions_R3T[rows, 0, lengths_R - 1].astype(jnp.int32)
    behind_RT = last_R[:, None] + jnp.arange(T) - (lengths_R[:, None] - 1)
    is_prompt = jnp.arange(T) < lengths_R[:, None]
    positions = jnp.where(is_prompt[:, None], batch.positions_R3T.astype(jnp.int32), behind_RT[:, None])
    segment_RT = jnp.zeros((R, T), jnp.int32)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, ids, done_R = carry
        hidden = text_hidden(weights, sizes, ids, positions, segment_RT, batch.source_RT, pictures)
        next_R = jnp.argmax(logits(weights, hidden[rows, lengths_R + count - 1]), axis=-1)
        return count + 1, ids.at[rows, lengths_R + count].set(next_R), done_R | jnp.isin(next_R, jnp.array(STOP_IDS))

    start = (jnp.int32(0), ids_RT, lengths_R == 0)
    _, ids, _ = jax.lax.while_loop(lambda carry: (carry[0] < MAX_ANSWER_TOKENS) & ~jnp.all(carry[2]), step, start)
    return ids[rows[:, None], lengths_R[:, None] + jnp.arange(MAX_ANSWER_TOKENS)]
