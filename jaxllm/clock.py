"""A clock to measure and order by: seconds since the epoch that do not jump when the machine's time is set."""

import time

_epoch = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, as `time.time` had it when the server, or without one this process, started."""
    return _epoch + time.monotonic()


def wall(moment: float) -> float:
    """What `time.time` is for a moment of `now`, for readers elsewhere."""
    return moment + time.time() - now()


def epoch() -> float:
    """The time that the clock counts from, for `follow`."""
    return _epoch


def follow(epoch: float) -> None:
    """Have the clock show the same as that of another process of this machine."""
    global _epoch
    _epoch = epoch
