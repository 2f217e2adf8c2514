"""A second host of a rehearsed server, as a process on loopback, and the cable to it."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.soaking.processes import RUN, processes_below

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60.0


class Cable:
    """Carries connections to a port of host 0, until it is cut: then nothing comes through, and neither end is notified."""

    def __init__(self, port: int):
        self._target = port
        self._is_cut = threading.Event()
        self._was_there = False
        """Whether host 0 has listened before."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()

    def mend(self) -> None:
        """For new connections."""
        self._is_cut = threading.Event()

    def _accept(self) -> None:
        while True:
            local, _ = self._listening.accept()
            remote = self._connected()
            if remote is None:
                local.close()
                continue
            threading.Thread(target=_carry, args=(local, remote, self._is_cut), daemon=True).start()

    def _connected(self) -> socket.socket | None:
        """A connection to host 0, which may be still starting."""
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                remote = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if self._was_there or time.monotonic() > until:
                    return None
                time.sleep(0.1)
            else:
                self._was_there = True
                return remote


def _carry(local: socket.socket, remote: socket.socket, is_cut: threading.Event) -> None:
    with local, remote, contextlib.suppress(OSError):
        while True:
            for source in select.select([local, remote], [], [])[0]:
                data = source.recv(1 << 16)
                if is_cut.is_set():
                    threading.Event().wait()  # for ever, with both ends open
                if not data:
                    return
                (remote if source is local else local).sendall(data)


def host_environment(number: int) -> dict[str, str]:
    """For NCCL, which refuses processes of one machine that share a GPU, and reaches those of others through this interface."""
    return {"NCCL_HOSTID": f"host-{number}", "NCCL_SOCKET_IFNAME": "lo"}


class OtherHost:
    """`jaxllm serve demo --node-rank 1`, which connects to host 0 at this port."""

    def __init__(self, flags: Sequence[str], port: int, directory: Path):
        self._directory = directory
        self.cable = Cable(port)
        self._command = [sys.executable, "-c", RUN, "serve", "demo", *flags, "--headless", "--node-rank", "1"]
        self._command += ["--master-port", str(self.cable.port)]
        self.log = directory / "log of host 1"
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        temporary = self._directory / "t1"
        temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), **host_environment(1)}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def pids(self, module: str = "") -> list[int]:
        """Its processes, or those that run a module ("engine.process")."""
        below = [pid for pid, name in processes_below(self.process.pid).items() if module in name]
        return below if module else list(dict.fromkeys([self.process.pid, *below]))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End it whatever it does."""
        self.signal(signal.SIGKILL)
        self.process.wait()
