"""The processes of an engine as one of `jax.distributed`, and how they leave it."""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

import jax

from jaxllm.errors import ConfigError

EXIT_FAILED = 1
_NEVER_SECONDS = 30 * 86400
"""JAX aborts a process whose peers are silent, with a stack trace of C++. Long before, `jaxllm.hosts` ends it with a message."""
_LEAVE_SECONDS, _POLL_SECONDS = 5.0, 0.5
_LEAVE_AT_EXIT_SECONDS = 30.0
_leaving: threading.Thread | None = None


def check_unused() -> None:
    """Raise ConfigError if JAX has found its devices already, of this host alone."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:  # not a public name
        return
    if backends_are_initialized() or jax.distributed.is_initialized():
        raise ConfigError(
            "nnodes is above 1, but JAX was used in this process before: start the engine first, in a new process"
        )


def join(coordinator: str, num_hosts: int, rank: int, *, timeout_seconds: int) -> None:
    """Start `jax.distributed`. Waits for all hosts; raises ConfigError if they do not come."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=_NEVER_SECONDS,
            coordinator_bind_address=coordinator if rank == 0 else None,
        )
        atexit.register(_at_exit)
    except RuntimeError as error:
        raise ConfigError(f"jax.distributed cannot start at {coordinator}: {str(error).partition(chr(10))[0]}") from error


def leave() -> None:
    """Leave `jax.distributed`, for which all hosts wait for each other; but not for long."""

    def shut_down() -> None:
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()

    global _leaving
    _leaving = threading.Thread(target=shut_down, name="leave-hosts", daemon=True)
    _leaving.start()
    _leaving.join(_LEAVE_SECONDS)


def _at_exit() -> None:
    """End a process that has not left: JAX's barrier at exit would wait for hosts that are lost, for minutes, and so would a device. The
    others may still compile when this one leaves; the interpreter's end would abort a thread that waits for them."""
    if _leaving is not None:
        _leaving.join(_LEAVE_AT_EXIT_SECONDS)
    if jax.distributed.is_initialized() or (_leaving is not None and _leaving.is_alive()):
        end_process(EXIT_FAILED)


def end_with_main_thread() -> None:
    """When the main thread ends, end the process: the interpreter's exit would wait for threads that wait for devices."""
    while threading.main_thread().is_alive():
        time.sleep(_POLL_SECONDS)
    if jax.distributed.is_initialized():
        end_process(EXIT_FAILED)


def end_process(code: int) -> NoReturn:
    """End at once, whatever threads and devices wait for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
