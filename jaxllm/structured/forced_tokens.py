"""Finds the next tokens of an output that its grammar forces, if JSON is written with the usual spaces.

They are guesses, because grammars mostly allow other spaces too: a step verifies them as drafts. llguidance divides forced text into
the tokens that the tokenizer would, and leaves the last ones out where text that follows may change them.
"""

import json
from typing import Any

from llguidance import LLMatcher

from jaxllm.request import Grammar
from jaxllm.structured.grammar_text import WHITESPACE
from jaxllm.structured.token_table import Vocabulary, parser_limits

_ANY_SPACES: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
_USUAL_SPACES: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Those of `json.dumps`, which models mostly write too."""


def with_usual_spaces(text: str) -> str | None:
    """A narrower grammar, of the same JSON with the usual spaces; None if a grammar has no JSON, or a caller's spaces."""
    before, after = (json.dumps({"x-guidance": spaces})[1:-1] for spaces in (_ANY_SPACES, _USUAL_SPACES))
    found = text.replace(before, after).replace(_escaped(before), _escaped(after))  # a structural tag has schemas within a text
    return None if found == text else found


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def compile_with_usual_spaces(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher | None:
    """The matcher of `with_usual_spaces`; None if there is none."""
    text = with_usual_spaces(grammar.text)
    if text is None:
        return None
    matcher = LLMatcher(vocabulary.table, text, log_level=0, limits=parser_limits())
    return None if matcher.is_error() else matcher


class ForcedTokens:
    """Follows an output as long as it has the usual spaces. Behind others only what the grammar itself forces is found."""

    def __init__(self, usual: LLMatcher | None):
        self._usual = None if usual is None else usual.deep_copy()

    def advance(self, token_id: int) -> None:
        """Take in the next token of the output."""
        if self._usual is not None and not self._usual.consume_token(token_id):
            self._usual = None

    def next_tokens(self, matcher: LLMatcher) -> list[int]:
        """The tokens forced behind the output. matcher: of the grammar, with the same output."""
        return (self._usual or matcher).compute_ff_tokens()
