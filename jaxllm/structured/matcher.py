"""Tracks the output of one request in its grammar and computes the mask of allowed next tokens, on the host."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from jaxllm.errors import GrammarError
from jaxllm.request import Grammar
from jaxllm.structured.forced_tokens import ForcedTokens
from jaxllm.structured.token_table import Vocabulary, parser_limits

BITS = 32
"""Tokens in one word of a mask."""
_MIN_PARALLEL = 8
"""Minimum number of masks that several threads fill."""
_MOST_ORIGINALS = 16
_CHEAP_SECONDS = 0.005
"""A grammar that compiles within this is compiled once for each thread that fills masks."""


@dataclass(frozen=True)
class Template:
    """A compiled grammar, from whose beginning outputs start.

    Copies of an LLMatcher share the state of its lexer behind a lock, so their masks are computed one after the other. Outputs
    therefore start from several originals in turn, if the grammar is cheap to compile.
    """

    originals: tuple[LLMatcher, ...]
    turns: Iterator[int]
    """Which original the next output starts from."""
    num_tokens: int
    """Tokens in llguidance's masks."""
    num_bytes: int
    forced: ForcedTokens | None = None
    """The tokens that it forces, if they are drafts."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: Grammar, *, drafts_forced: bool = False) -> "Template":
        """Compile a grammar that passed a trial. Recurses deeply, so outputs compile nothing themselves. Raises GrammarError."""
        start = time.perf_counter()
        originals = [_compiled(vocabulary, grammar)]
        if time.perf_counter() - start <= _CHEAP_SECONDS:
            originals += (_compiled(vocabulary, grammar) for _ in range(1, min(_num_threads(), _MOST_ORIGINALS)))
        forced = ForcedTokens.of(vocabulary, grammar) if drafts_forced else None
        num_bytes = grammar.num_bytes * (len(originals) + (forced is not None)) + 1000
        return cls(tuple(originals), cycle(range(len(originals))), vocabulary.table.vocab_size, num_bytes, forced)


def _compiled(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(vocabulary.table, grammar.text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError("the grammar could not be compiled again")
    matcher.compute_bitmask()  # builds what the copies share
    return matcher


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
        self._template = template
        self._original = next(template.turns)
        self._matcher = template.originals[self._original].deep_copy()
        self._consumed: list[int] = []
        """Tokens of the output since the grammar holds."""
        self.num_tokens = template.num_tokens
        self._eos_token_ids = [token for token in eos_token_ids if token < num_columns]
        self._ends_at_eos = ends_at_eos and bool(self._eos_token_ids)
        self._awaited = tuple(start_after or ())
        self._recent: list[int] = []
        self._failure: tuple[int, GrammarError] | None = None
        """The first of the last masks that could not be computed: how many tokens are still to come before it, and why."""
        self.is_done = False
        """Whether the output is complete and nothing but its end can follow."""
        self._forced = None if template.forced is None else template.forced.copy()
        self.num_next_drafts = 0
        """See OutputMatcher."""

    @property
    def lexer(self) -> tuple[int, int]:
        """Names the state that it shares with other outputs."""
        return id(self._template), self._original

    def next_drafts(self, drafts: Sequence[int]) -> list[int]:
        """The last token expected from a step that verifies these drafts, and those forced behind it, which are drafts for the next step;
        empty if there are none. Sets `num_next_drafts`."""
        expected = [] if self._forced is None or self._awaited else self._forced.behind(self._matcher)
        for draft in drafts:
            if not expected or expected[0] != draft:
                break
            del expected[0]
        self.num_next_drafts = max(0, len(expected) - 1)
        return expected if self.num_next_drafts else []

    def num_free(self, drafts: Sequence[int]) -> int | None:
        """How many of these tokens are the next before the grammar holds; None if it does not hold even behind all of them."""
        if not self._awaited:
            return 0
        run, size = [*self._recent, *drafts], len(self._awaited)
        ends = range(len(self._recent) + 1, len(run) + 1)
        return next((end - len(self._recent) for end in ends if tuple(run[max(0, end - size) : end]) == self._awaited), None)

    def advance(self, token_id: int) -> None:
        """Advance by the next token of the output. Raises GrammarError if the grammar does not allow it."""
        if self._failure is not None:
            num_before, error = self._failure
            if not num_before:
                raise error
            self._failure = num_before - 1, error
        if self._awaited:
            self._recent = [*self._recent, token_id][-len(self._awaited) :]
            if tuple(self._recent) == self._awaited:
                self._awaited = ()
            return
        if not self._matcher.consume_token(token_id):
            raise GrammarError("the output left its grammar")
        self._consumed.append(token_id)
        if self._forced is not None:
            self._forced.advance(token_id)
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

    @property
    def llmatcher(self) -> LLMatcher:
        return self._matcher

    @property
    def changes_masks(self) -> bool:
        """Whether llguidance's masks are not the output's."""
        return not self._ends_at_eos or bool(self._matcher.is_error())

    def take_masks(self, words_DW: np.ndarray, mask_DW: np.ndarray, num_before: int) -> None:
        """Copy the masks that llguidance computed, behind the last token and behind each draft, to rows of the model's columns, which may
        be the same memory.

        There are none behind a draft that the grammar forbids. num_before: drafts before these, which the grammar does not see.
        """
        message = "allows no token of this model at this position"
        if self._matcher.is_error():
            if not self._matcher.get_error().startswith("NoExtension"):
                message = "became too complex for this output"
            # The last mask is the one that failed: it allows EOS alone. A matcher would stay in its error state, also where a draft
            # that proves wrong led into it.
            words_DW[np.flatnonzero(words_DW.any(axis=1))[-1:]] = 0
            self._matcher = self._template.originals[self._original].deep_copy()
            self._matcher.consume_tokens(self._consumed)
        num_words = min(words_DW.shape[1], mask_DW.shape[1])
        mask_DW[:, num_words:] = 0
        mask_DW[:, :num_words] = words_DW[:, :num_words]
        if not self._ends_at_eos:
            for mask_W in mask_DW:
                _clear(mask_W, self._eos_token_ids)
        is_known_D = mask_DW.any(axis=1)
        if is_known_D.all():
            return
        # From there on anything may be drawn: either no such token counts, or the first one ends the request.
        first = int(np.argmin(is_known_D))
        mask_DW[first:] = -1
        self._failure = num_before + first, GrammarError(f"the grammar {message}")


def fill_masks(matchers: Sequence[tuple[Matcher, int, Sequence[int]]], mask_TW: np.ndarray) -> None:
    """Write what each matcher allows into its row, and what it allows behind each of its drafts into the rows after it: bit b of word w
    for token 32 w + b. Other rows stay as they are.

    A matcher whose mask cannot be computed fails when it is advanced to that mask. Masks behind a draft that is not allowed are not
    restricted.
    """
    places: list[tuple[int, int]] = []
    """Row of the mask and drafts before it, of the first mask of each job."""
    jobs: list[tuple[Matcher, int, list[int]]] = []
    num_masks = 0
    for matcher, row, drafts in matchers:
        matcher._failure = None
        if (num_free := matcher.num_free(drafts)) is not None:
            places.append((row + num_free, num_free))
            jobs.append((matcher, num_masks, list(drafts[num_free:])))
            num_masks += 1 + len(drafts) - num_free
    if not jobs:
        return
    num_words = -(-jobs[0][0].num_tokens // BITS)
    is_direct = num_masks == len(jobs) and num_words == mask_TW.shape[1]
    if is_direct:  # llguidance writes to where the masks belong
        words_MW = mask_TW
        jobs = [(matcher, row, drafts) for (matcher, _, drafts), (row, _) in zip(jobs, places, strict=True)]
    else:
        words_MW = np.zeros((num_masks, num_words), np.int32)
    _compute(jobs, words_MW)
    is_known_J = np.any(words_MW[[row for row, _ in places]], axis=1) if is_direct else np.zeros(len(jobs), bool)
    for (matcher, index, drafts), (row, num_free), is_known in zip(jobs, places, is_known_J, strict=True):
        if not is_known or matcher.changes_masks:
            size = 1 + len(drafts)
            matcher.take_masks(words_MW[index : index + size], mask_TW[row : row + size], num_free)


def _compute(jobs: Sequence[tuple[Matcher, int, list[int]]], words_MW: np.ndarray) -> None:
    """Have llguidance write the masks of each matcher, behind its last token and behind each of these drafts, from this row on."""
    by_original = sorted(jobs, key=lambda job: job[0].lexer)  # a thread takes neighbours, which would wait for each other
    single = [(matcher.llmatcher, index) for matcher, index, drafts in by_original if not drafts]
    if len(single) >= _MIN_PARALLEL:
        fill_next_token_bitmask_par(_executor(), single, words_MW)
    else:
        for llmatcher, index in single:
            fill_next_token_bitmask(llmatcher, words_MW, index)
    if several := [(matcher.llmatcher, index, drafts) for matcher, index, drafts in by_original if drafts]:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), several, words_MW)


def _clear(words: np.ndarray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        if token // BITS < len(words):
            words[token // BITS] &= np.int32(~(1 << token % BITS) if token % BITS < 31 else 2**31 - 1)


def _num_threads() -> int:
    return max(1, min((os.cpu_count() or 1) // 2, 32))


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=_num_threads())
