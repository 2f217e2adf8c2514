"""Writes docs/VLLM_FLAGS.md from the table of vLLM's flags: python scripts/make_vllm_flags_page.py"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.flag_arguments import spelling
from jaxllm.options import eplb as eplb_options
from jaxllm.speculative.refused import NO_EFFECT as unused_keys
from jaxllm.vllm_compat.flags import OLDER, SHORT_NAMES, TABLE, TAKEN, TAKEN_BY_SERVER, VllmFlag
from jaxllm.vllm_compat.values import VALUES, VllmValue

FILE = Path(__file__).resolve().parent.parent / "docs" / "VLLM_FLAGS.md"
INTRODUCTION = """# vLLM's flags

Written by `scripts/make_vllm_flags_page.py` from `jaxllm/vllm_compat/flags.py`; tests hold it up to date and complete.

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
    words = [
        f"`{spelling(name)} {theirs}` is `{entry.value}`"
        for name, entries in VALUES.items()
        for theirs, entry in entries.items()
        if not entry.text
    ]
    return "\n".join(
        [
            INTRODUCTION,
            "## Taken\n",
            _lines(f"By all commands that run a model: {_listed(TAKEN)}."),
            _lines(f"By `jaxllm serve`: {_listed(TAKEN_BY_SERVER)}."),
            _lines(f"Under another name: {', '.join(renamed)}. Values: {', '.join(words)}."),
            "Each Boolean `--enable-x` has the opposites `--disable-x` and `--no-enable-x`, and the reverse. A unique beginning of a",
            "flag's name is taken for it, and the log names the flag. Keys of objects may follow the short name, as in `-cc.mode 3`.",
            "`-q METHOD` is `--quantization METHOD`; `-q` alone is `--quiet`.",
            "`--api-key` and `--served-model-name` take several words; write the model before them.",
            "`--kv-offloading-size` is for all replicas together, with vLLM for each; `cpu_bytes_to_use` is for each here too.\n",
            "## Values of taken flags\n",
            "| flag | values | what becomes of them |",
            "|---|---|---|",
            *(_row(name, values, entry) for name, entries in VALUES.items() for values, entry in _by_meaning(entries)),
            "",
            _lines(
                f"Keys of `--speculative-config` without effect: {_keys(unused_keys)}; of `--eplb-config`: {_keys(eplb_options.NO_EFFECT)}."
            ),
            "## No effect\n",
            *_table("what is made of it", (flag for flag in others if not flag.refused)),
            "## Refused\n",
            *_table("why, and what to do instead", (flag for flag in others if flag.refused)),
            "## Older names\n",
            _lines(f"Of vLLM before 0.33, or of packages over it, among the above: {_listed(OLDER)}.").rstrip("\n") + "\n",
        ]
    )


def _table(heading: str, flags: Iterable[VllmFlag]) -> list[str]:
    """A row for each flag."""
    rows = [f"| `{_called(flag.name)}`{_accepted(flag)} | {flag.text} |" for flag in sorted(flags, key=lambda flag: flag.name)]
    return [f"| flag | {heading} |", "|---|---|", *rows, ""]


def _by_meaning(entries: Mapping[str, VllmValue]) -> list[tuple[list[str], VllmValue]]:
    """The values of an option that have a text, those of one meaning together."""
    groups: dict[VllmValue, list[str]] = {}
    for value, entry in entries.items():
        if entry.text:
            groups.setdefault(entry, []).append(value)
    return [(values, entry) for entry, values in groups.items()]


def _row(name: str, values: list[str], entry: VllmValue) -> str:
    outcome = "refused" if entry.refused else "no effect" if entry.value is None else f"`{entry.value}`"
    return f"| `{_called(name)}` | {', '.join(f'`{value}`' for value in values)} | {outcome}: {entry.text} |"


def _accepted(flag: VllmFlag) -> str:
    values = [*map(str, flag.harmless), *(f"{key} …" for key in flag.harmless_keys)]
    return f" ({', '.join(values)})" if values else ""


def _lines(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def _keys(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
