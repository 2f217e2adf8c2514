"""Every jaxllm command on the page for people coming from elsewhere is accepted."""

import re
import shlex
from pathlib import Path

import pytest

from jaxllm.cli.main import OTHER_NAMES, SUBCOMMANDS, command_parser

PAGE = (Path(__file__).parent.parent / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`(jaxllm [^`]+)`", PAGE)))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line: str) -> None:
    _, name, *words = shlex.split(line)
    name = OTHER_NAMES.get(name, name)
    parts = [name, words.pop(0)] if words and (name, words[0]) in SUBCOMMANDS else [name]
    parser = command_parser(*parts)
    found = parser.parse(words)
    parser.take_vllm_flags(found)
    assert vars(found)


def test_the_page_has_commands_for_each_program() -> None:
    assert all(PAGE.count(f"\n| `{program}") >= 7 for program in ("vllm ", "ollama ", "llama-"))
