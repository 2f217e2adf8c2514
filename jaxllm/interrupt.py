"""Defers Ctrl-C during work that must not be interrupted."""

import signal
import threading
from typing import Any


class DeferredInterrupt:
    """Within the context, records a Ctrl-C, which `raise_if_noticed` raises later. A second Ctrl-C is raised at once.

    Takes effect only in the main thread and with Python's default handler of Ctrl-C.
    """

    def __init__(self) -> None:
        self._noticed = False
        self._previous: Any = None

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._notice)

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if error[0] is not None:
            self._noticed = False  # the run ends anyway

    def raise_if_noticed(self) -> None:
        """Raise the KeyboardInterrupt of a Ctrl-C that was noticed."""
        if self._noticed:
            self._noticed = False
            raise KeyboardInterrupt

    def _notice(self, signum: int, frame: Any) -> None:
        self.raise_if_noticed()
        self._noticed = True
