"""Compiles many programs at once: lowered one after the other, compiled side by side, failures kept as results."""

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

import jax

UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}
"""Compiler options of references: how fast their products are is of no account, and timing them takes most of a check."""


class Compiler:
    """A pool of compiling threads."""

    def __init__(self) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 2))

    def submit(
        self, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
    ) -> concurrent.futures.Future[Any]:
        """The compiled program to come, or the exception."""
        try:
            return self.pool.submit(jax.jit(function, donate_argnums=donate).lower(*shapes).compile)
        except Exception as error:
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def first_line(error: BaseException, limit: int = 200) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}"
