"""Ends the engines that a program leaves running when it exits."""

import atexit
import weakref
from typing import Any


def shut_down_at_exit(engine: Any) -> None:
    """Call the engine's `shutdown` (perhaps again) before the interpreter exits, if the engine still exists then.

    JAX calls Python when a result reaches the host. If a step ends while the interpreter shuts down, that call aborts the
    process.
    """
    reference = weakref.ref(engine)

    def shut_down() -> None:
        if (alive := reference()) is not None:
            alive.shutdown()

    atexit.register(shut_down)
