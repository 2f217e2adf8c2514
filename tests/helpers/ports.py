"""Ports for processes that get theirs as an option."""

import os
import random
import re
import socket

FIRST, LAST = 10_000, 32_000
"""Below those that systems give to connections and to whoever asks for any."""
NUM_SHARES = 16


def _own_share() -> range:
    """Ports that no process which runs tests side by side with this one chooses."""
    found = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    size = (LAST - FIRST) // NUM_SHARES
    share = int(found[1]) % NUM_SHARES if found else NUM_SHARES - 1
    return range(FIRST + share * size, FIRST + (share + 1) * size)


_share = _own_share()
_next = random.choice(_share)  # another run of the tests may be under way


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, which were not given before."""
    global _next
    while True:
        if _next + count > _share.stop:
            _next = _share.start
        first, _next = _next, _next + count
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
