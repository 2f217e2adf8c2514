"""Ends the engines that a program leaves running when it exits."""

import atexit
import weakref
from typing import Protocol


class Engine(Protocol):
    """What can be ended, also more than once."""

    def shutdown(self) -> None: ...


def shut_down_at_exit(engine: Engine) -> None:
    """Shut down the engine before the interpreter exits, if the engine still exists then.

    JAX calls Python when a result reaches the host. If a step ends while the interpreter shuts down, that call aborts the
    process.
    """
    reference = weakref.ref(engine)

    def shut_down() -> None:
        if (alive := reference()) is not None:
            alive.shutdown()

    atexit.register(shut_down)
