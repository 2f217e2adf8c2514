"""Writes docs/VLLM_FLAGS.md from the table of vLLM's flags: python scripts/make_vllm_flags_page.py"""

import argparse
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.flag_arguments import spelling
from jaxllm.vllm_flags import OLDER, SHORT_NAMES, TABLE, TAKEN, TAKEN_BY_SERVER, WORDS, VllmFlag

FILE = Path(__file__).resolve().parent.parent / "docs" / "VLLM_FLAGS.md"
INTRODUCTION = """# vLLM's flags

Written by `scripts/make_vllm_flags_page.py` from `jaxllm/vllm_flags.py`; tests hold it up to date and complete.

Every flag of `vllm serve` 0.33, and older ones that scripts still use, is one of these:

- **taken**: it is an option of jaxllm with the same name and meaning ([CONFIGURATION.md](CONFIGURATION.md)), or it sets one;
- **no effect**: accepted, and a line of the log says what is made of it;
- **refused**: its effect is missing, so the command ends with the reason and the way out. Values that say what is so anyway
  (in brackets), none, false and empty ones are accepted.

This holds for `jaxllm serve` and every other command that runs a model, for keys of a `--config` file, and for the keywords of
`LLM(...)`, `EngineArgs(...)` and `AsyncEngineArgs(...)`. There, flags of the server alone have no effect.
"""


def page() -> str:
    """The whole text."""
    by_option = [flag for flag in TABLE.values() if flag.option is not None]
    others = [flag for flag in TABLE.values() if flag.option is None]
    renamed = [
        f"`{_called(flag.name)}` sets `{spelling(str(flag.option))}{'.' * bool(flag.key)}{flag.key or ''}`"
        for flag in by_option
    ]
    words = [f"`{spelling(name)} {theirs}` is `{ours}`" for name, pairs in WORDS.items() for theirs, ours in pairs.items()]
    return "\n".join(
        [
            INTRODUCTION,
            "## Taken\n",
            _lines(f"By all commands that run a model: {_listed(TAKEN)}."),
            _lines(f"By `jaxllm serve`: {_listed(TAKEN_BY_SERVER)}."),
            _lines(f"Under another name: {', '.join(renamed)}. Values: {', '.join(words)}."),
            "`-q METHOD` is `--quantization METHOD`; `-q` alone is `--quiet`.",
            "`--api-key` and `--served-model-name` take several words; write the model before them.\n",
            "## No effect\n",
            *_table("what is made of it", (flag for flag in others if not flag.refused)),
            "## Refused\n",
            *_table("why, and what to do instead", (flag for flag in others if flag.refused)),
            "## Older names\n",
            _lines(f"Of vLLM before 0.33, among the above: {_listed(OLDER)}.").rstrip("\n") + "\n",
        ]
    )


def _table(heading: str, flags: Iterable[VllmFlag]) -> list[str]:
    """A row for each flag."""
    rows = [f"| `{_called(flag.name)}`{_accepted(flag)} | {flag.text} |" for flag in sorted(flags, key=lambda flag: flag.name)]
    return [f"| flag | {heading} |", "|---|---|", *rows, ""]


def _accepted(flag: VllmFlag) -> str:
    values = [*map(str, flag.harmless), *(f"{key} …" for key in flag.harmless_keys)]
    return f" ({', '.join(values)})" if values else ""


def _lines(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def _called(name: str) -> str:
    return f"{spelling(name)}, {SHORT_NAMES[name]}" if name in SHORT_NAMES else spelling(name)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{_called(name)}`" for name in sorted(names))


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FILE.write_text(page(), encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
