"""Terminal output other than a command's result: colours, notes on stderr, the closing line."""

import logging
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "cyan": "36"}


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style, on a terminal that is not dumb, unless NO_COLOR is set (no-color.org)."""
    has_styles = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{_STYLES[style]}m{text}\033[0m" if has_styles else text


def note(text: str, style: str = "dim") -> None:
    """A line on stderr."""
    sys.stdout.flush()
    print(styled(text, style, sys.stderr), file=sys.stderr, flush=True)


class LogLines(logging.Formatter):
    """Format log messages as notes: information dimmed without level, all others with their level."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno <= logging.INFO:
            return styled(text, "dim", sys.stderr)
        return styled(record.levelname.lower(), "red", sys.stderr) + f": {text}"


@dataclass
class RunStats:
    """The figures of the closing line, for one answer or a batch. Times in seconds since the work began."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_seconds: Sequence[float] = ()
    """One per request whose first token was timed."""
    total_seconds: float = 0.0

    def tokens_per_second(self) -> float:
        """One request: speed after its first token, which is the writing speed. Several: all output over the whole time."""
        tokens, seconds = self.num_output_tokens, self.total_seconds
        if len(self.first_token_seconds) == 1 and tokens > 1:
            tokens, seconds = tokens - 1, seconds - self.first_token_seconds[0]
        return tokens / seconds if seconds > 0 else 0.0

    def line(self) -> str:
        """`12 prompt tokens, 64 output tokens, time to first token 0.31 s, 210.4 tokens/s`"""
        parts = [counted(self.num_prompt_tokens, "prompt token"), counted(self.num_output_tokens, "output token")]
        if self.first_token_seconds:
            median = " (median)" if len(self.first_token_seconds) > 1 else ""
            parts.append(f"time to first token {duration(statistics.median(self.first_token_seconds))}{median}")
        parts.append(f"{self.tokens_per_second():.1f} tokens/s")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """`42 ms`, `3.14 s`, `2 min 5 s`"""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def size(num_bytes: float) -> str:
    """`512 B`, `3.2 MiB`, `15.0 GiB`"""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def counted(number: int, noun: str) -> str:
    """`1 program`, `2 programs`"""
    return f"{number} {noun}{'' if number == 1 else 's'}"
