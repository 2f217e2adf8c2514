"""Flags for structured output: --json-schema, --regex, --choice, --grammar."""

import argparse
from pathlib import Path

from jaxllm.cli.parser import Parser, UsageError
from jaxllm.structured_outputs import MAX_SPEC_BYTES, StructuredOutputsParams


def add_form_arguments(parser: Parser) -> None:
    """At most one of them can be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        metavar="FILE|TEXT",
        help='the output is JSON of this schema: a file, or the schema itself, such as \'{"type": "object"}\'',
    )
    group.add_argument("--regex", metavar="TEXT", help="the whole output matches this regular expression")
    group.add_argument(
        "--choice", metavar="TEXT", action="append", help="the output is one of these texts; give it several times"
    )
    group.add_argument(
        "--grammar",
        metavar="FILE|TEXT",
        help="the output follows this grammar, in Lark's notation or GBNF: a file, or the grammar itself",
    )


def read_form(arguments: argparse.Namespace) -> StructuredOutputsParams | None:
    """Build the structured output. Raises UsageError for an unreadable file, InvalidRequestError for an invalid constraint."""
    if arguments.json_schema is not None:
        is_text = arguments.json_schema.lstrip().startswith("{")
        return StructuredOutputsParams(json=arguments.json_schema if is_text else _read("--json-schema", arguments.json_schema))
    if arguments.grammar is not None:
        is_text = ":" in arguments.grammar and not Path(arguments.grammar).is_file()
        return StructuredOutputsParams(grammar=arguments.grammar if is_text else _read("--grammar", arguments.grammar))
    if arguments.regex is not None:
        return StructuredOutputsParams(regex=arguments.regex)
    if arguments.choice is not None:
        return StructuredOutputsParams(choice=arguments.choice)
    return None


def _read(option: str, name: str) -> str:
    try:
        with open(name, encoding="utf-8") as file:
            return file.read(MAX_SPEC_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{option} {name} cannot be read: {reason}") from None
