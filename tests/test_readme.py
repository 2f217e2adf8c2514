"""The README and the pages in docs/ are correct: commands exist, options are accepted, links resolve."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxllm.cli.main import COMMANDS, SUBCOMMANDS, command_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GENERATED = {"CONFIGURATION.md", "METRICS.md", "VLLM_FLAGS.md", "MODELS.md"}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)]
A_COMMAND = re.compile(rf"jaxllm (?:{'|'.join(COMMANDS)})\b[^>&|`]*")
LINES = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
COMMAND_LINES = sorted({match[0].strip() for line in LINES for match in A_COMMAND.finditer(line)})
SNIPPETS = [(page, code) for page, text in PAGES.items() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


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
    assert found.stdout == re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[0].strip().splitlines()[1]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_lines_are_accepted(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    length = 2 if tuple(words[:2]) in SUBCOMMANDS else 1
    assert vars(command_parser(*words[:length]).parse(words[length:]))


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_python_examples_compile(page: str, code: str) -> None:
    assert ast.parse(code, page).body


def anchors(text: str) -> set[str]:
    """Anchors of the headings, in GitHub's form."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_scripts_exist(page: str) -> None:
    broken = {script for script in re.findall(r"\bscripts/[\w.]+", PAGES[page]) if not (ROOT / script.rstrip(".")).exists()}
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        target, _, anchor = link.partition("#")
        path = ROOT / page if not target else (ROOT / page).parent / target
        if not link.startswith("http") and (
            not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8")))
        ):
            broken.add(link)
    assert not broken


@pytest.mark.parametrize("page", [page for page in PAGES if Path(page).name not in GENERATED])
def test_pages_can_be_read_in_a_terminal(page: str) -> None:
    lines = PAGES[page].splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert len(lines) <= {"README.md": 120, "docs/ARCHITECTURE.md": 150}.get(page, len(lines))


def test_tables_on_the_first_page_can_be_read_in_a_terminal() -> None:
    assert max(map(len, README.splitlines())) <= 120
