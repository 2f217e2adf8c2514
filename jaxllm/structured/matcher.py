"""Follows the output of one request through its grammar and tells which tokens may come next. Host work only."""

import os
from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxllm.request import Grammar
from jaxllm.structured.errors import GrammarError
from jaxllm.structured.token_table import parser_limits

BITS = 32
"""Tokens in one word of a mask."""
_MIN_PARALLEL = 8
"""From so many masks on several threads fill them."""


def num_words(num_columns: int) -> int:
    """Words of a mask for so many columns of logits."""
    return -(-num_columns // BITS)


def compile_matcher(table: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of a grammar, to copy. Takes deep recursion. Raises GrammarError."""
    matcher = LLMatcher(table, grammar.text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError("the grammar could not be compiled again")
    matcher.compute_bitmask()  # builds what the copies share
    return matcher


class Matcher:
    """Where one output is in its grammar. Before `start_after` was said, everything is allowed."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        num_columns: int,
        eos_token_ids: Sequence[int] = (),
        ends_at_eos: bool = True,
        start_after: Sequence[int] | None = None,
    ):
        """`ends_at_eos`: an EOS token ends the output. If not, the output ends where the grammar allows nothing else."""
        self._matcher = matcher
        self._num_columns = num_columns
        self._eos_token_ids = [token for token in eos_token_ids if token < num_columns]
        self._ends_at_eos = ends_at_eos and bool(self._eos_token_ids)
        self._awaited = tuple(start_after or ())
        self._recent: list[int] = []
        self.is_done = False
        """Whether the output is complete and nothing but its end can follow."""

    @property
    def is_active(self) -> bool:
        """Whether the grammar holds for the next token."""
        return not self._awaited

    def advance(self, token_id: int) -> None:
        """Take in the next token of the output. Raises GrammarError if the grammar does not allow it."""
        if self._awaited:
            self._recent = [*self._recent[1 - len(self._awaited) :], token_id] if len(self._awaited) > 1 else [token_id]
            if tuple(self._recent) == self._awaited:
                self._awaited = ()
            return
        if not self._matcher.consume_token(token_id):
            raise GrammarError("the output left its grammar")
        if not self._ends_at_eos:
            self.is_done = self._only_end_remains()

    def _only_end_remains(self) -> bool:
        if self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        _clear(words, self._eos_token_ids)
        return not words.any()

    def finish_mask(self, mask_W: np.ndarray) -> None:
        """Correct a mask that `fill_masks` has filled. Raises GrammarError if it allows nothing."""
        if self._matcher.is_error():
            raise GrammarError("the grammar became too complex for this output")
        if not self._ends_at_eos:
            _clear(mask_W, self._eos_token_ids)
        if not mask_W.any():
            raise GrammarError("the grammar allows no token of this model here")


def fill_masks(matchers: Sequence[tuple[Matcher, int]], mask_RW: np.ndarray) -> dict[int, GrammarError]:
    """Write the mask of each matcher into its row: bit i of word w allows token 32 w + i. Rows of others stay.

    Returns what went wrong, by row; such a row allows everything.
    """
    active = [(matcher, row) for matcher, row in matchers if matcher.is_active]
    whole_RW = mask_RW
    width = max((num_words(matcher._table_columns) for matcher, _ in active), default=0)  # noqa: SLF001
    if width > mask_RW.shape[1]:  # a tokenizer with more tokens than the model
        whole_RW = np.full((mask_RW.shape[0], width), -1, np.int32)
    if len(active) >= _MIN_PARALLEL and (executor := _executor()) is not None:
        fill_next_token_bitmask_par(executor, [(matcher._matcher, row) for matcher, row in active], whole_RW)
    else:
        for matcher, row in active:
            fill_next_token_bitmask(matcher._matcher, whole_RW, row)
    errors: dict[int, GrammarError] = {}
    for matcher, row in active:
        if whole_RW is not mask_RW:
            mask_RW[row] = whole_RW[row, : mask_RW.shape[1]]
        try:
            matcher.finish_mask(mask_RW[row])
        except GrammarError as error:
            errors[row] = error
            mask_RW[row] = -1
    return errors


def _clear(words: np.ndarray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token // BITS] &= ~np.int32(np.uint32(1 << token % BITS).view(np.int32))


@cache
def _executor() -> LLExecutor | None:
    num_threads = min((os.cpu_count() or 1) // 2, 8)
    return LLExecutor(num_threads=num_threads) if num_threads > 1 else None
