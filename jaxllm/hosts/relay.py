"""Carries the connection of this host's JAX to the coordinator on host 0, and keeps this end of it open when host 0 is lost.

JAX aborts a process as soon as it loses the coordinator, with a stack trace of C++. Through a relay it does not notice, and the process
ends by itself (`follower.Member`). Only the start sends much here.
"""

import contextlib
import socket
import threading

_CHUNK_BYTES = 1 << 16


class Relay:
    """Listens on this machine's loopback and connects to `host`, `port` for each connection that it accepts."""

    def __init__(self, host: str, port: int):
        self._target = host, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="relay", daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        while True:
            self._start(self._carry, self._listening.accept()[0])

    def _carry(self, local: socket.socket) -> None:
        try:
            remote = socket.create_connection(self._target)
        except OSError:
            local.close()  # JAX tries again
            return
        self._start(self._receive, local, remote)
        self._send(local, remote)

    def _send(self, local: socket.socket, remote: socket.socket) -> None:
        """Forward what JAX sends to host 0. If JAX closes its end, so does the relay."""
        with contextlib.suppress(OSError):
            while data := local.recv(_CHUNK_BYTES):
                with contextlib.suppress(OSError):  # host 0 is lost
                    remote.sendall(data)
        for end in (local, remote):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _receive(self, local: socket.socket, remote: socket.socket) -> None:
        """Forward what host 0 sends to JAX. If host 0 closes its end, JAX is not notified."""
        with contextlib.suppress(OSError):
            while data := remote.recv(_CHUNK_BYTES):
                local.sendall(data)
