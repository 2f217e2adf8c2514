"""Processes that end with the test that started them, also where a signal ends it: python ending_with_parent.py PARENT ARGUMENTS

Linux alone: the process asks the kernel for SIGKILL at its parent's death, and then becomes python ARGUMENTS.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def python(*arguments: str) -> list[str]:
    """The command of a Python process with these arguments. It ends with the thread of this process that starts it."""
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), *arguments]


def main(parent: str, *arguments: str) -> None:
    """Become that process, unless the parent has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == int(parent):
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
