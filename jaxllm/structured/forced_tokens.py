"""Finds the next tokens of an output that its grammar forces, if JSON is written as most models write it.

They are guesses, because grammars mostly allow more: other spaces, or other properties. A step verifies them as drafts. llguidance
divides forced text into the tokens that the tokenizer would, and leaves out the last ones, which the text behind them may change.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from jaxllm.request import Grammar
from jaxllm.structured.grammar_text import WHITESPACE
from jaxllm.structured.json_schema import changed
from jaxllm.structured.token_table import Vocabulary, parser_limits

_ANY_SPACES: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
_USUAL_SPACES: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes them, and most models."""
_SCHEMA_IN_LARK = re.compile(r"%json (?=\{)")


def likely_grammar(text: str, *, all_properties: bool) -> str | None:
    """A narrower grammar, of JSON with the usual spaces, where a caller has not set them. all_properties: and in each object with all
    properties that its schema lists and no others. None if that changes nothing."""
    if not text.startswith("{"):
        return None  # a caller's own grammar, or a regular expression
    grammars = json.loads(text)
    for grammar in grammars["grammars"]:
        if "json_schema" in grammar:
            grammar["json_schema"] = _likely(grammar["json_schema"], all_properties=all_properties)
        if "lark_grammar" in grammar:
            grammar["lark_grammar"] = _likely_in_lark(grammar["lark_grammar"], all_properties=all_properties)
    return None if grammars == json.loads(text) else json.dumps(grammars)


def _likely(schema: Any, *, all_properties: bool) -> Any:
    if isinstance(schema, dict) and schema.get("x-guidance") == _ANY_SPACES:
        schema = {**schema, "x-guidance": _USUAL_SPACES}
    return changed(schema, _with_all_properties) if all_properties else schema


def _with_all_properties(schema: dict[str, Any]) -> dict[str, Any]:
    names = schema.get("properties")
    return {**schema, "required": list(names), "additionalProperties": False} if names else schema


def _likely_in_lark(lark: str, *, all_properties: bool) -> str:
    """A grammar in Lark's notation in which each schema is replaced."""
    parts, end = [], 0
    for found in _SCHEMA_IN_LARK.finditer(lark):
        if found.start() < end:
            continue  # within a schema
        try:
            schema, after = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError:
            continue  # within a text
        parts += [lark[end : found.end()], json.dumps(_likely(schema, all_properties=all_properties))]
        end = after
    return "".join((*parts, lark[end:]))


class ForcedTokens:
    """The tokens that a grammar forces. Outputs are followed by copies of it."""

    def __init__(self, table: LLTokenizer, likely: LLMatcher | None):
        """likely: of a likely grammar, if there is one, in which an output is followed until it leaves it. From then on only what the
        grammar itself forces is found."""
        self._table, self._likely = table, likely

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: Grammar) -> "ForcedTokens":
        """Compile the narrowest likely grammar that something matches."""
        for all_properties in (True, False):
            text = likely_grammar(grammar.text, all_properties=all_properties)
            if text is not None:
                matcher = LLMatcher(vocabulary.table, text, log_level=0, limits=parser_limits())
                if not matcher.is_error():
                    return cls(vocabulary.table, matcher)
        return cls(vocabulary.table, None)

    def copy(self) -> "ForcedTokens":
        """Copy it for another output, at whose beginning it stands."""
        return ForcedTokens(self._table, None if self._likely is None else self._likely.deep_copy())

    def advance(self, token_id: int) -> None:
        """Take in the next token of the output."""
        if self._likely is not None and not self._likely.consume_token(token_id):
            self._likely = None

    def behind(self, matcher: LLMatcher) -> list[int]:
        """The tokens forced behind the output. matcher: of the grammar, with the same output."""
        if self._likely is None:
            return matcher.compute_ff_tokens()
        tokens = self._likely.compute_ff_tokens()
        if tokens:
            # What is left of the forced text mostly is a token too: ` "` before a string.
            num_bytes = len(self._table.decode_bytes(tokens))
            tokens += self._table.tokenize_bytes(self._likely.compute_ff_bytes()[num_bytes:])
        return tokens
