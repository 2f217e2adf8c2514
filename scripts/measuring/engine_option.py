"""Engine options on a script's command line."""

import argparse
import json
from typing import Any


def engine_option(text: str) -> tuple[str, Any]:
    """Name and value of `name=value`; a value that is not JSON is text. For `type` of an argument."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
