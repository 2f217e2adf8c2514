"""docs/SECURITY.md says of every limit what the code has, and names only options that exist."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import flags
from scripts.attacking.groups import ATTACKS
from scripts.rehearse_attacks import SEVERITIES
from server.options import server_flags

PAGE = (Path(__file__).parent.parent / "docs" / "SECURITY.md").read_text(encoding="utf-8")
FLAGS = {f"--{flag.name.replace('_', '-')}": flag for flag in (*flags(), *server_flags())}
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
OPTIONS = re.findall(r"^\| `(--[\w-]+)` \| ([^|]+?) \|", PAGE, re.MULTILINE)
CONSTANTS = re.findall(r"^\| `([a-z_.]+\.[A-Z_]+)` \| ([^|]+?) \|", PAGE, re.MULTILINE)


def value_of(text: str) -> float | None:
    """The number that a cell says, in seconds, bytes or pieces; None for no limit."""
    if text == "none":
        return None
    number, _, unit = text.partition(" ")
    return float(number) * UNITS[unit]


@pytest.mark.parametrize(("option", "text"), OPTIONS)
def test_limits_are_the_defaults_of_their_options(option: str, text: str) -> None:
    assert (FLAGS[option].default or None) == value_of(text)  # 0 stands for no limit


@pytest.mark.parametrize(("name", "text"), CONSTANTS)
def test_limits_without_an_option_are_the_constants(name: str, text: str) -> None:
    module, _, constant = name.rpartition(".")
    found: Any = getattr(importlib.import_module(module), constant)
    assert found == value_of(text)


def test_both_tables_are_found_and_every_limit_of_the_server_is_in_them() -> None:
    assert len(CONSTANTS) > 5
    limits = {option for option, flag in FLAGS.items() if flag.group == "Limits" and isinstance(flag.default, int | float)}
    limits -= {"--ignore-unknown-fields"}
    assert limits <= {option for option, _ in OPTIONS}


def test_the_page_names_only_options_that_exist() -> None:
    own = {"--list", "--quick", "--tree"}  # of scripts/rehearse_attacks.py
    negated = {f"--no-{option[2:]}" for option in FLAGS}
    assert set(re.findall(r"`?(--[a-z][a-z-]+)", PAGE)) - own <= FLAGS.keys() | negated


def test_every_group_of_attacks_is_carried_out() -> None:
    files = {
        file.stem
        for file in (Path(__file__).parents[1] / "scripts" / "attacking").glob("*.py")
        if "@attack(" in file.read_text("utf-8")
    }
    assert {attack.group for attack in ATTACKS.values()} == files
    assert {attack.severity for attack in ATTACKS.values()} <= set(SEVERITIES)
