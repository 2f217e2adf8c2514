"""Options that the scripts' command lines have in common."""

import argparse
import json
from typing import Any


def script_parser(doc: str | None, num_head: int = 1) -> argparse.ArgumentParser:
    """A parser whose help begins with the first line of a script's docstring and ends with all but its first `num_head` lines."""
    lines = (doc or "").splitlines()
    return argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[num_head:]), formatter_class=argparse.RawTextHelpFormatter
    )


def engine_option(text: str) -> tuple[str, Any]:
    """Name and value of `name=value`; a value that is not JSON is text. For `type` of an argument."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
