"""Logs what requests have without effect: once, because clients send it with every request."""

import functools

from jaxllm.log import logger, safe

MAX_CHARACTERS = 300


@functools.lru_cache(256)  # not unbounded: clients choose the names in these messages
def log_once(message: str) -> None:
    """Log a message the first time."""
    logger.info("%s", safe(message, MAX_CHARACTERS))
