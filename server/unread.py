"""Closes connections whose clients read nothing: an answer that waits for them would take memory for ever."""

import asyncio
import fcntl
import struct
import termios

from jaxllm.log import logger

UNSENT_BYTES = 64 << 10
"""Bytes of an answer that the kernel buffers beyond the client's window; its default is megabytes, which no timeout would see."""
_LOOKS = 4
"""Looks within the time limit."""


class SendWatch:
    """Watches one connection while its buffer is full. Every byte that the client takes begins its time anew."""

    num_ended = 0
    """Connections that were closed, in this process."""

    def __init__(self, seconds: float):
        """seconds: in which the client must read something; 0: it need not."""
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._num_waiting = self._num_looks = 0

    def begin(self, transport: asyncio.Transport) -> None:
        """The buffer is full."""
        if self._seconds and self._timer is None:
            self._num_waiting, self._num_looks = _bytes_waiting(transport), 0
            self._wait(transport)

    def end(self) -> None:
        """The buffer has space again, or the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, transport: asyncio.Transport) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        num_waiting = _bytes_waiting(transport)
        self._num_looks = 0 if num_waiting < self._num_waiting else self._num_looks + 1
        self._num_waiting = num_waiting
        if self._num_looks < _LOOKS:
            self._wait(transport)
            return
        self._timer = None
        SendWatch.num_ended += 1
        logger.warning(
            "a client read nothing for %g s, with %d bytes of an answer waiting; its connection is closed (--unread-stream-timeout)",
            self._seconds,
            num_waiting,
        )
        transport.abort()


def _bytes_waiting(transport: asyncio.Transport) -> int:
    """Bytes that the peer has not acknowledged, where the system tells, and those that the kernel has not taken."""
    own = transport.get_write_buffer_size()
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError):
        return own
    return own + int(struct.unpack("i", found)[0])
