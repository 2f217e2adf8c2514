"""Writes docs/VLLM_ENVIRONMENT.md from the table of vLLM's variables: python scripts/make_vllm_environment_page.py"""

import argparse
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.flag_arguments import spelling
from jaxllm.vllm_compat.environment import OLDER, TABLE, VllmVariable

FILE = Path(__file__).resolve().parent.parent / "docs" / "VLLM_ENVIRONMENT.md"
INTRODUCTION = """# vLLM's environment variables

Written by `scripts/make_vllm_environment_page.py` from `jaxllm/vllm_compat/environment.py`; tests hold it up to date
and complete.

Every variable that vLLM 0.33 reads, and older ones that scripts still set, is one of these:

- **honoured**: it sets an option of jaxllm, and a line of the log says which. It is the weakest way to set one: the
  command line, `JAXLLM_OPT_…`, a `--config` file, keywords of `LLM(...)`, and the variable named in the last column win
  over it. A value that cannot be read, or that the option does not take, is an error. Empty variables count as unset;
- **nothing to do**: its effect is not needed here; one line of the log names all that are set;
- **without effect**: a warning says what to do instead, unless the value (in brackets) asks for nothing.

Another warning names those that are none of these, but not what Kubernetes sets for a service whose name begins with
`vllm`.

This holds for `jaxllm serve` and every other command that runs a model, and for `LLM(...)`, `EngineArgs(...)` and
`AsyncEngineArgs(...)`, each with the options that it has. `jaxllm config show` prints the origin of each option.
"""


def page() -> str:
    """The whole text."""
    honoured = [variable for variable in TABLE.values() if variable.is_honoured]
    harmless = [variable for variable in TABLE.values() if variable.is_harmless]
    missing = [variable for variable in TABLE.values() if not variable.is_honoured and not variable.is_harmless]
    return "\n".join(
        [
            INTRODUCTION,
            "## Honoured\n",
            "| variable | value | as | unless set |",
            "|---|---|---|---|",
            *(f"| `{variable.name}` | {variable.text} | {_target(variable)} | {_winner(variable)} |" for variable in honoured),
            "",
            "As a server's key, `VLLM_API_KEY` is one key, commas and all. Commands that call a server send it too, after",
            "`JAXLLM_API_KEY` and `OPENAI_API_KEY`.\n",
            "## Nothing to do\n",
            *(_filled(f"- {text}: {names}", "  ") for text, names in _by_text(harmless)),
            "",
            "## Without effect\n",
            "| variables | what to do instead |",
            "|---|---|",
            *(f"| {names} | {text} |" for text, names in _by_text(missing)),
            "",
            "## Older names\n",
            _filled(f"Not read by vLLM 0.33, among the above: {_listed(OLDER)}."),
            "",
        ]
    )


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _target(variable: VllmVariable) -> str:
    if variable.option is None:
        return f"`${variable.own}`"
    name = spelling(variable.option)
    is_negated = variable.option == "compilation_cache"
    needs = f", with `{spelling(variable.needs)}`" if variable.needs else ""
    return f"`{f'--no-{name[2:]}' if is_negated else name}`{needs}"


def _winner(variable: VllmVariable) -> str:
    return f"`${variable.own}`" if variable.own else "–"


def _by_text(variables: Iterable[VllmVariable]) -> list[tuple[str, str]]:
    """Each text with the names that have it."""
    groups: dict[str, list[VllmVariable]] = defaultdict(list)
    for variable in variables:
        groups[variable.text].append(variable)
    return [(text, ", ".join(f"`{each.name}`{_unless(each)}" for each in group)) for text, group in groups.items()]


def _unless(variable: VllmVariable) -> str:
    values = [value for value in variable.unless if value not in ("0", "false")]
    return f" ({', '.join(values)})" if values else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FILE.write_text(page(), encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
