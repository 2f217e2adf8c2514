"""How long one thread's Python holds up another's. It is a setting of the process, which may have several engines."""

import sys
import threading

SECONDS = 0.0001
"""By default it is 5 ms, twice the time of a copy: whenever a thread gives Python up to launch something, it may have to wait so long for
the threads of copies, and these for it."""


class ShortTurns:
    """Lowers the process's switch interval to SECONDS while engines copy blocks. What the process sets itself meanwhile stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = self._own = 0.0

    def begin(self) -> None:
        """An engine starts to copy blocks."""
        with self._lock:
            if not self._num_users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SECONDS))
                self._own = sys.getswitchinterval()
            self._num_users += 1

    def end(self) -> None:
        """An engine that had begun ends."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users and sys.getswitchinterval() == self._own:
                sys.setswitchinterval(self._before)


SHORT_TURNS = ShortTurns()
"""The one switch interval that the process has."""
