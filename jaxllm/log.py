"""The logger of the project: one line a message on stderr, for people or as JSON."""

import datetime
import functools
import json
import logging
import os
import re
import sys
from typing import Any, TextIO

from jaxllm import env
from jaxllm.errors import ConfigError

logger = logging.getLogger("jaxllm")


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]")
"""Characters that could end a line, move the cursor, reverse text or fail to be encoded."""


def set_up(
    level: str | None = None, formatter: logging.Formatter | None = None, format: str | None = None, part: str = ""
) -> None:
    """Send the project's messages to stderr, from `level` upward. May be called again.

    Default of the level: $JAXLLM_LOG_LEVEL, else $VLLM_LOGGING_LEVEL, else info. `format` is "text" or "json" (default:
    $JAXLLM_LOG_FORMAT, else text); `formatter` is what writes text. `part` names the part of a server that writes. Raises ConfigError
    for an unknown level or format in the environment.
    """
    name = _known(level, env.log_level() or ("info", ""), LEVELS)
    if _known(format, (os.environ.get(env.LOG_FORMAT) or "text", env.LOG_FORMAT), FORMATS) == "json":
        formatter = JsonLines(part)
    if not logger.handlers:
        logger.addHandler(_ToStderr())
        logger.propagate = False
    named = f"{part}: " if part else ""
    logger.handlers[0].setFormatter(formatter or logging.Formatter(f"%(levelname)s %(asctime)s {named}%(message)s", "%H:%M:%S"))
    logger.setLevel(name.upper())


def set_up_if_asked() -> None:
    """Call `set_up` if $JAXLLM_LOG_LEVEL is set and it was not called before, so that scripts get a log on request."""
    if env.log_level() and not logger.handlers:
        set_up()


def writes_json() -> bool:
    """Whether stderr is to hold JSON lines, and nothing else."""
    return bool(logger.handlers) and isinstance(logger.handlers[0].formatter, JsonLines)


def adopt(*names: str, level: str) -> None:
    """Have the loggers of libraries write as the project's does, after `set_up`."""
    for name in names:
        library = logging.getLogger(name)
        library.handlers = list(logger.handlers)
        library.propagate = False
        library.setLevel(level.upper())


def safe(text: str, max_chars: int | None = None) -> str:
    """Text from outside for a line of the log: no line ends, terminal codes or other invisible commands, and not too long."""
    num_left_out = 0 if max_chars is None else max(0, len(text) - max_chars)
    shown = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text[: len(text) - num_left_out])
    return f"{shown}… ({num_left_out} more characters)" if num_left_out else shown


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is stderr when a message comes: notebooks and test runners replace it, and close what it was."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class JsonLines(logging.Formatter):
    """A JSON object a line: time, level, logger, message, process, and what `extra=` adds."""

    _ordinary = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}

    def __init__(self, part: str = ""):
        super().__init__()
        self._part = {"part": part} if part else {}

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **self._part,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        line |= {name: value for name, value in vars(record).items() if name not in self._ordinary and name not in line}
        return json.dumps(line, default=str)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time that this very message is given."""
    logger.warning(message)


@functools.cache
def info_once(message: str) -> None:
    """Log once at level info."""
    logger.info(message)


def _known(given: str | None, in_environment: tuple[str, str], names: tuple[str, ...]) -> str:
    """The given name, else that of (value, variable). Raises ConfigError that names the variable."""
    value, variable = in_environment
    name = (given or value).lower()
    if name not in names:
        raise ConfigError(f"{variable} is {name!r}, must be one of {', '.join(names)}")
    return name
