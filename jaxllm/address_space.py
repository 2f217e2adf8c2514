"""The limit of a process's address space (`ulimit -v`), at which XLA ends the process instead of raising an error."""

import errno
import functools
import resource
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.log import logger

LEAST_BYTES = 1 << 30
"""JAX alone maps more than half of this, with two threads; each of more threads takes 8 MiB for its stack."""
_SIGNS = ("failed to map segment", "annot allocate memory", "can't start new thread")
"""Fragments of the errors, other than MemoryError, that a full address space causes."""


def limit_bytes() -> int | None:
    """The limit; None: there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def left_bytes() -> int | None:
    """Bytes left of the limit; None: there is no limit."""
    if (limit := limit_bytes()) is None:
        return None
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return limit
    return max(0, limit - num_pages * resource.getpagesize())


def describe_limit() -> str:
    """For the end of an error's text; empty without a limit."""
    limit = limit_bytes()
    return "" if limit is None else f"; the address space of a process is limited to {limit / 2**30:.2f} GiB (ulimit -v)"


def is_full(error: BaseException) -> bool:
    """Whether an error means that the process cannot get memory or a thread."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, (ImportError, RuntimeError)) and any(sign in str(error) for sign in _SIGNS)


@functools.cache
def check() -> None:
    """Warn of a limit, because a process that reaches it may end without an error message. Raises ConfigError if JAX cannot start."""
    limit = limit_bytes()
    if limit is None:
        return
    if limit < LEAST_BYTES:
        raise ConfigError(
            f"no room for JAX{describe_limit()}, it takes {LEAST_BYTES / 2**30:g} GiB beside the model; raise it (ulimit -v unlimited), "
            "and limit memory by a cgroup instead (systemd's MemoryMax, docker's --memory)"
        )
    logger.warning(
        "the address space of a process is limited to %.2f GiB (ulimit -v): XLA aborts where that is too little; a cgroup limits "
        "memory better (systemd's MemoryMax, docker's --memory)",
        limit / 2**30,
    )
