"""Ends the engines that a program leaves running when it exits."""

import atexit
import weakref
from typing import Protocol


class Engine(Protocol):
    """What can be ended, also more than once."""

    def shutdown(self) -> None: ...


def shut_down_at_exit(engine: Engine) -> None:
    """Have the engine shut down before the interpreter goes, if it still exists then.

    JAX tells Python of each result that has reached the host. Should a step end while the interpreter is going away, that call
    aborts the whole process.
    """
    reference = weakref.ref(engine)

    def shut_down() -> None:
        if (alive := reference()) is not None:
            alive.shutdown()

    atexit.register(shut_down)
