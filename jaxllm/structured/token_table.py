"""The bridge from a tokenizer to llguidance: which bytes each token stands for, and which tokens end a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLParserLimits, LLTokenizer

from jaxllm.errors import InvalidRequestError
from jaxllm.structured.structural_tag import Part
from jaxllm.structured_outputs import PARAM
from jaxllm.text.tokenizer import Tokenizer

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
"""A character of a JSON string that is written as it is."""
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 20, 30)), f"{_PLAIN}+"]
"""Sets of tokens that a mask takes over whole where the grammar allows all of a set. With more lengths than llguidance's own 10 and 30,
a mask inside a string with a `maxLength` takes two thirds of the CPU time, and reading a vocabulary of 128 000 tokens 0.14 s more."""


@dataclass(frozen=True)
class Vocabulary:
    """The data about a model's tokens that llguidance needs."""

    tokenizer_json: str
    """The text of tokenizer.json."""
    num_tokens: int
    """Number of tokens of the tokenizer."""
    num_columns: int
    """Number of columns of the model's logits. Columns beyond the tokenizer's tokens are never allowed."""
    eos_token_ids: tuple[int, ...]
    added_tokens: tuple[tuple[str, int], ...]
    """Tokens that are not in the trained vocabulary, with their texts."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_columns: int, eos_token_ids: Sequence[int]) -> "Vocabulary":
        """That of a model. Raises InvalidRequestError if llguidance cannot read the tokenizer."""
        text = tokenizer.to_json()
        if text is None:
            raise InvalidRequestError(
                f"{PARAM} needs a tokenizer.json, and the model {tokenizer.name_or_path} has none; leave it out", PARAM
            )
        added = tuple((content, token) for token, content in tokenizer.added_tokens.items())
        num_tokens = max(tokenizer.get_vocab().values()) + 1
        return cls(text, num_tokens, num_columns, tuple(eos_token_ids), added)

    @cached_property
    def table(self) -> LLTokenizer:
        """llguidance's representation. Takes about a second for 128 000 tokens."""
        ends = [token for token in self.eos_token_ids if token < self.num_tokens]
        num_columns = max(self.num_columns, self.num_tokens)
        return LLTokenizer(self.tokenizer_json, n_vocab=num_columns, eos_token=ends or None, slices=_SLICES)

    @cached_property
    def _special_tokens(self) -> list[tuple[str, int]]:
        """Tokens that llguidance treats as special, the longest first."""
        found = [entry for entry in self.added_tokens if self.table.is_special_token(entry[1])]
        return sorted(found, key=lambda entry: -len(entry[0]))

    def split(self, text: str) -> list[Part]:
        """A text as runs of ordinary text and special tokens, the longest that fits first."""
        parts: list[Part] = []
        plain = 0
        place = 0
        while place < len(text):
            found = next(((name, token) for name, token in self._special_tokens if text.startswith(name, place)), None)
            if found is None:
                place += 1
                continue
            if plain < place:
                parts.append(Part(text[plain:place]))
            parts.append(Part(*found))
            plain = place = place + len(found[0])
        if plain < len(text):
            parts.append(Part(text[plain:]))
        return parts


def parser_limits() -> LLParserLimits:
    """Limits of one grammar, the same on trial and in use."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
