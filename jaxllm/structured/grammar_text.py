"""Converts a structured output to the text of an llguidance grammar. Called in the compiler's process only."""

import json
import re
from functools import partial
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jaxllm.errors import GrammarError
from jaxllm.structured.json_schema import changed, check_schema, closed, with_real_dates
from jaxllm.structured.structural_tag import Split, lark_regex, structural_tag_grammar
from jaxllm.structured.supported import supported
from jaxllm.structured_outputs import StructuredOutputsParams

MAX_RULES = 2000
WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the tokens of JSON, unless the caller says otherwise. Bounded, because a model that begins to write spaces may never stop."""

_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*(?:\.\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?[ \t]*(?:::=|:)", re.MULTILINE)
_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)


def grammar_text(params: StructuredOutputsParams, split: Split) -> str:
    """The grammar of a form. `split` finds the special tokens in a text. Raises GrammarError."""
    if params.kind == "json":
        schema = _with_options(json.loads(str(params.json)), params)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if params.kind == "json_object":
        return LLMatcher.grammar_from_json_schema(json.dumps(_with_options({"type": "object"}, params)))
    if params.kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: {lark_regex(str(params.regex))}")
    if params.kind == "choice":
        # Lark's strings are those of JSON, in ASCII.
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice or ())))
    if params.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(str(params.grammar)))
    return structural_tag_grammar(json.loads(str(params.structural_tag)), partial(_with_options, params=params), split)


def _with_options(schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema, checked, with the options where llguidance reads them."""
    check_schema(schema)
    schema = changed(supported(schema), with_real_dates)
    if params.disable_additional_properties:
        schema = changed(schema, closed)
    if params.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    return {**(schema if isinstance(schema, dict) else {}), "x-guidance": options}


def _lark(text: str) -> str:
    """A grammar in Lark's notation, given in that or in GBNF."""
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise GrammarError(f"has {num_rules} rules, at most {MAX_RULES} are allowed")
    if not _GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(f"is not GBNF: {error}") from None
