"""Limits the tokens of an output's thinking section, which single tokens of the model open and close."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.errors import InvalidRequestError

PARAM = "thinking_token_budget"
MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>", "<channel|>"),
)
"""The tokens that open and close a thinking section, of the models that have such tokens."""
KIMI_CALLS = "<|tool_calls_section_begin|>"
"""The token of Kimi K2 that begins tool calls. It ends a thinking section too."""
_BITS = 32
"""Tokens in one word of a mask."""


def markers(token_ids: Container[str]) -> tuple[str, str] | None:
    """The pair of MARKERS that is among the added tokens of a vocabulary."""
    return next((pair for pair in MARKERS if pair[0] in token_ids and pair[1] in token_ids), None)


@dataclass(frozen=True)
class ThinkingBudget:
    """The most tokens of a request's thinking section, and where the section stands after the prompt."""

    num_tokens: int
    """Tokens left: the request's budget without the tokens of a section that the prompt opened."""
    start_token_id: int
    end_token_ids: tuple[int, ...]
    """Tokens that close the section; the first is the one to force."""
    is_open: bool
    """Whether the prompt ends within the section."""

    @classmethod
    def of(
        cls, budget: int, prompt_token_ids: Sequence[int], token_ids: Mapping[str, int], special_ids: frozenset[int]
    ) -> "ThinkingBudget | None":
        """The budget for a prompt; None if the prompt ends with a closed section. `token_ids`: the added tokens of the vocabulary.

        Raises InvalidRequestError if the vocabulary has no tokens that open and close thinking.
        """
        found = markers(token_ids)
        if found is None:
            pairs = ", ".join(" and ".join(pair) for pair in MARKERS)
            raise InvalidRequestError(
                f"{PARAM} is {budget}, but this model has no tokens that begin and end its thinking ({pairs}); leave it out, or "
                "limit max_tokens",
                PARAM,
            )
        start, end = (token_ids[text] for text in found)
        ends = (end, *((token_ids[KIMI_CALLS],) if KIMI_CALLS in token_ids else ()))
        opened_at, closed_at = _last(prompt_token_ids, start), _last(prompt_token_ids, end)
        after = prompt_token_ids[opened_at + 1 :]
        # A section that an earlier turn left open is over: special tokens stand between the turns.
        is_open = opened_at > closed_at and special_ids.isdisjoint(after)
        if is_open:
            return cls(max(0, budget - len(after)), start, ends, is_open)
        is_over = closed_at >= 0 and special_ids.isdisjoint(prompt_token_ids[closed_at + 1 :])
        return None if is_over else cls(budget, start, ends, is_open)


class ThinkingSection:
    """The thinking section of one output, which ends once. Advanced by each token of the output."""

    def __init__(self, budget: ThinkingBudget):
        self._budget = budget
        self._num_left = budget.num_tokens
        self._is_open = budget.is_open
        self.is_over = False
        """Whether the section has ended."""

    @property
    def forced_token_id(self) -> int | None:
        """The token that must come next, if the budget is used up."""
        return self._budget.end_token_ids[0] if self.may_force(0) else None

    def may_force(self, num_unknown: int) -> bool:
        """Whether the token after so many that are not known yet may be a forced one."""
        if self.is_over:
            return False
        # An open section is over after the forced token; one that is not open may open at any token, which does not count.
        return self._num_left == num_unknown if self._is_open else self._num_left < num_unknown

    def advance(self, token_id: int) -> None:
        """Take in the next token of the output."""
        if token_id in self._budget.end_token_ids:
            self.is_over = True
        elif self._is_open:
            self._num_left -= 1
        else:
            self._is_open = token_id == self._budget.start_token_id


def force_token(mask_W: np.ndarray, token_id: int) -> None:
    """Leave one token in a mask (bit b of word w allows token 32 w + b), if the mask allows it: a grammar goes first."""
    bit = np.uint32(1 << token_id % _BITS).astype(np.int32)
    if mask_W[token_id // _BITS] & bit:
        mask_W[:] = 0
        mask_W[token_id // _BITS] = bit


def _last(token_ids: Sequence[int], token_id: int) -> int:
    """The place of the last such token, or -1."""
    return len(token_ids) - 1 - token_ids[::-1].index(token_id) if token_id in token_ids else -1
