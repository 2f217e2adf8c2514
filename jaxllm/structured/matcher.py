"""Tracks the output of one request in its grammar and computes the mask of allowed next tokens, on the host."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxllm.errors import GrammarError
from jaxllm.request import Grammar
from jaxllm.structured.token_table import Vocabulary, parser_limits

BITS = 32
"""Tokens in one word of a mask."""
_MIN_PARALLEL = 8
"""Minimum number of masks that several threads fill."""


@dataclass(frozen=True)
class Template:
    """A compiled grammar, from whose beginning outputs start."""

    matcher: LLMatcher
    num_tokens: int
    """Of llguidance's masks."""
    num_bytes: int

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: Grammar) -> "Template":
        """Compile a grammar that passed a trial. Recurses deeply. Raises GrammarError."""
        matcher = LLMatcher(vocabulary.table, grammar.text, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError("the grammar could not be compiled again")
        matcher.compute_bitmask()  # builds what the copies share
        return cls(matcher, vocabulary.table.vocab_size, grammar.num_bytes + 1000)


class Matcher:
    """The state of one output in its grammar. Until the output contains `start_after`, every token is allowed."""

    def __init__(
        self,
        template: Template,
        *,
        num_columns: int,
        eos_token_ids: Sequence[int] = (),
        ends_at_eos: bool = True,
        start_after: Sequence[int] | None = None,
    ):
        """`ends_at_eos`: an EOS token ends the output. If not, the output ends where the grammar allows nothing else."""
        self._matcher = template.matcher.deep_copy()
        self.num_tokens = template.num_tokens
        self._eos_token_ids = [token for token in eos_token_ids if token < num_columns]
        self._ends_at_eos = ends_at_eos and bool(self._eos_token_ids)
        self._awaited = tuple(start_after or ())
        self._recent: list[int] = []
        self._failure: GrammarError | None = None
        """The error of the last mask, if it could not be computed."""
        self.is_done = False
        """Whether the output is complete and nothing but its end can follow."""

    @property
    def is_active(self) -> bool:
        """Whether the grammar holds for the next token."""
        return not self._awaited

    def advance(self, token_id: int) -> None:
        """Advance by the next token of the output. Raises GrammarError if the grammar does not allow it."""
        if self._failure is not None:
            raise self._failure
        if self._awaited:
            self._recent = [*self._recent, token_id][-len(self._awaited) :]
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

    def _take_mask(self, words: np.ndarray, mask_W: np.ndarray) -> None:
        """Copy the mask that llguidance computed to a row of the model's columns."""
        num_words = min(len(words), len(mask_W))
        mask_W[:] = 0
        mask_W[:num_words] = words[:num_words]
        if not self._ends_at_eos:
            _clear(mask_W, self._eos_token_ids)
        is_stuck = self._matcher.is_error() and not self._matcher.get_error().startswith("NoExtension")
        if is_stuck:
            self._failure = GrammarError("the grammar became too complex for this output")
        elif self._matcher.is_error() or not mask_W.any():
            self._failure = GrammarError("the grammar allows no token of this model at this position")
        if self._failure is not None:
            mask_W[:] = -1  # the token that is drawn ends the request


def fill_masks(matchers: Sequence[tuple[Matcher, int]], mask_RW: np.ndarray) -> None:
    """Write what each matcher allows into its row: bit b of word w for token 32 w + b. Other rows stay as they are.

    A matcher whose mask cannot be computed fails when it is advanced.
    """
    active = [(matcher, row) for matcher, row in matchers if matcher.is_active]
    if not active:
        return
    words_MW = np.empty((len(active), -(-active[0][0].num_tokens // BITS)), np.int32)
    executor = _executor() if len(active) >= _MIN_PARALLEL else None
    if executor is not None:
        fill_next_token_bitmask_par(executor, [(matcher._matcher, i) for i, (matcher, _) in enumerate(active)], words_MW)
    else:
        for i, (matcher, _) in enumerate(active):
            fill_next_token_bitmask(matcher._matcher, words_MW, i)
    for i, (matcher, row) in enumerate(active):
        matcher._take_mask(words_MW[i], mask_RW[row])


def _clear(words: np.ndarray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        if token // BITS < len(words):
            words[token // BITS] &= np.int32(~(1 << token % BITS) if token % BITS < 31 else 2**31 - 1)


@cache
def _executor() -> LLExecutor | None:
    num_threads = min((os.cpu_count() or 1) // 2, 8)
    return LLExecutor(num_threads=num_threads) if num_threads > 1 else None
