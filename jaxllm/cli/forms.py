"""Flags for structured output: --json-schema, --regex, --choice, --grammar."""

import argparse
import os

from jaxllm.cli.parser import Parser, UsageError
from jaxllm.structured_outputs import MAX_SPEC_BYTES, StructuredOutputsParams


def add_form_arguments(parser: Parser) -> None:
    """At most one of them can be given."""
    add = parser.add_mutually_exclusive_group().add_argument
    schema = 'the output is JSON of this schema: a file, or the schema itself, such as \'{"type": "object"}\''
    add("--json-schema", metavar="FILE|TEXT", help=schema)
    add("--regex", help="the whole output matches this regular expression")
    add("--choice", action="append", help="the output is one of these texts; give it several times")
    grammar = "the output follows this grammar, in Lark's notation or GBNF: a file, or the grammar itself"
    add("--grammar", metavar="FILE|TEXT", help=grammar)


def read_form(arguments: argparse.Namespace) -> StructuredOutputsParams | None:
    """Build the structured output. Raises UsageError for an unreadable file, InvalidRequestError for an invalid constraint."""
    schema, grammar = arguments.json_schema, arguments.grammar
    if schema is not None and not schema.lstrip().startswith("{"):
        schema = _read("--json-schema", schema)
    if grammar is not None and (":" not in grammar or os.path.isfile(grammar)):
        grammar = _read("--grammar", grammar)
    form = {"json": schema, "grammar": grammar, "regex": arguments.regex, "choice": arguments.choice}
    given = {name: value for name, value in form.items() if value is not None}
    return StructuredOutputsParams(**given) if given else None


def _read(option: str, name: str) -> str:
    try:
        with open(name, encoding="utf-8") as file:
            return file.read(MAX_SPEC_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{option} {name} cannot be read: {reason}") from None
