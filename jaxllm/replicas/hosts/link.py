"""One end of a connection between hosts, for an event loop. `jaxllm.hosts.connection` has the one for threads."""

import asyncio
from typing import Any

from jaxllm.framing import BEAT_SECONDS, SILENCE_SECONDS, Accepted, Beat, ClosedError, Incoming, Message, frame
from jaxllm.hosts.connection import Connection


class Link:
    """Sends heartbeats, and expects those of the other end: without, `receive` raises after SILENCE_SECONDS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepted: Accepted):
        self._reader, self._writer, self._incoming = reader, writer, Incoming(accepted)
        self._heard = asyncio.get_running_loop().time()
        self._fault = "the connection was closed"
        self._beats = asyncio.create_task(self._beat())

    @classmethod
    async def of(cls, connection: Connection, accepted: Accepted) -> "Link":
        """Use a connection in this event loop, between two messages. Raises WireError if it is closed."""
        try:
            return cls(*await asyncio.open_connection(sock=connection.stream), accepted)
        except OSError as error:
            raise ClosedError(f"the connection is closed ({error})") from error

    def send(self, message: Message) -> None:
        """Send a message, soon. Nothing happens if the other end has closed: `receive` raises."""
        if not self._writer.is_closing():
            self._writer.write(frame(message, self._incoming.accepted.max_bytes))

    async def drained(self) -> None:
        """Wait until most of the send buffer is written, or the other end has closed."""
        try:
            await self._writer.drain()
        except (ConnectionError, OSError):
            return

    async def receive(self) -> Any:
        """The next message but for heartbeats. Raises WireError if there is none any more or it is malformed."""
        while True:
            try:
                part = await self._reader.read(self._incoming.num_wanted)
            except OSError as error:
                raise ClosedError(self._fault) from error
            if not part:
                raise ClosedError(self._fault)
            self._heard = asyncio.get_running_loop().time()
            message = self._incoming.take(part)
            if message is not None and not isinstance(message, Beat):
                return message

    async def _beat(self) -> None:
        while True:
            self.send(Beat())
            await asyncio.sleep(BEAT_SECONDS)
            silence = asyncio.get_running_loop().time() - self._heard
            if silence > SILENCE_SECONDS:
                self._fault = f"it was silent for {silence:.0f} s"
                self._writer.transport.abort()
                return

    async def close(self, *, within_seconds: float = 0.0) -> None:
        """Close it, after sending what is queued if that takes no longer than so many seconds."""
        self._beats.cancel()
        if within_seconds:
            self._writer.close()
            try:
                async with asyncio.timeout(within_seconds):
                    await self._writer.wait_closed()
            except (TimeoutError, OSError):
                pass
        self._writer.transport.abort()
