"""The README says what is so: its commands exist, its options are accepted, CI runs its second command."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxllm.cli.main import COMMANDS, SUBCOMMANDS, command_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
A_COMMAND = re.compile(rf"jaxllm (?:{'|'.join(COMMANDS)})\b[^>&|`]*")
COMMAND_LINES = [match[0] for line in LINES for match in A_COMMAND.finditer(line)]


def test_quick_start_is_two_commands_in_one_block() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    [block] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    first, second = block.strip().splitlines()
    assert "jaxllm generate" in first
    assert "pytest" in second
    assert README.index("## ") == README.index("## Quick start")


def test_ci_runs_the_second_command() -> None:
    [line] = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("command=$(")]
    found = subprocess.run(
        ["bash", "-c", line + '; printf %s "$command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == BLOCKS[0].strip().splitlines()[1]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_lines_are_accepted(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    length = 2 if tuple(words[:2]) in SUBCOMMANDS else 1
    command_parser(*words[:length]).parse(words[length:])


def test_every_script_and_local_page_exists() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")}
        scripts = set(re.findall(r"\bscripts/[\w.]+", text))
        assert not {path for path in links | scripts if path and not (ROOT / path).exists()}
