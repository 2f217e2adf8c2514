"""The logger of the project: one line a message, on stderr."""

import functools
import logging
import os
import sys

from jaxllm import env
from jaxllm.errors import ConfigError

logger = logging.getLogger("jaxllm")


LEVELS = ("debug", "info", "warning", "error")


def set_up(level: str | None = None, formatter: logging.Formatter | None = None) -> None:
    """Send the project's messages to stderr, from `level` (default: $JAXLLM_LOG_LEVEL, else info) upward. May be called again.

    Raises ConfigError for an unknown level in the environment.
    """
    name = (level or os.environ.get(env.LOG_LEVEL) or "info").lower()
    if name not in LEVELS:
        raise ConfigError(f"{env.LOG_LEVEL} is {name!r}, must be one of {', '.join(LEVELS)}")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.propagate = False
    logger.handlers[0].setFormatter(formatter or logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S"))
    logger.setLevel(name.upper())


def set_up_if_asked() -> None:
    """`set_up`, if $JAXLLM_LOG_LEVEL is set and nobody did it before: a script gets the log that it asked for."""
    if os.environ.get(env.LOG_LEVEL) and not logger.handlers:
        set_up()


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time that this very message is given."""
    logger.warning(message)
