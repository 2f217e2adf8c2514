"""Strangers at the ports between hosts while they start, and garbage at the port of gRPC."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target
from scripts.soaking.processes import RUN, processes_below

ANNOUNCED_BYTES = 60_000_000
_PATIENCE_SECONDS = 60.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _connected(port: int, seconds: float) -> socket.socket | None:
    """A connection to a port where somebody may listen only later."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        time.sleep(0.1)
    return None


def _closed_after(stream: socket.socket, seconds: float) -> float:
    """Seconds until the other end closes, after a challenge."""
    began = time.monotonic()
    stream.settimeout(seconds)
    with contextlib.suppress(OSError):
        while stream.recv(1000):
            pass
    return time.monotonic() - began


def _silent_peer(target: Target, seen: Seen, flags: tuple[str, ...]) -> None:
    """One that announces a long frame and sends a byte of it now and then; behind it one whose frame is wrong waits for its answer."""
    port = _free_port()
    words = ("serve", "demo", "--host", "127.0.0.1", "--port", "0", "--nnodes", "2", "--master-port", str(port), *flags)
    with tempfile.NamedTemporaryFile(prefix="attack-", suffix=".log") as log:
        host = subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(target.tree)},
            cwd=target.tree,
            start_new_session=True,
        )
        try:
            silent = _connected(port, 120)
            if silent is None:
                seen.equal("host 0 listens", Path(log.name).read_text(errors="replace")[-200:], "it does")
                return
            done = threading.Event()
            with silent:
                silent.sendall(struct.pack(">I", ANNOUNCED_BYTES))
                dripping = threading.Thread(target=_drip, args=(silent, done), daemon=True)
                dripping.start()
                time.sleep(0.5)
                with socket.create_connection(("127.0.0.1", port)) as other:
                    other.sendall(struct.pack(">I", 1) + b"\xc1")
                    waited = _closed_after(other, _PATIENCE_SECONDS)
                done.set()
                dripping.join()
            seen.seconds("the next host is answered after", waited, 5.0)
            seen.equal("host 0 still starts", host.poll(), None)
        finally:
            for pid in [*processes_below(host.pid), host.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.wait()


def _drip(stream: socket.socket, done: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not done.wait(2):
            stream.sendall(b"\0")


@attack("low", "a silent peer that announced 60 MB at the port of hosts that share each layer")
def silent_peer_of_layers(target: Target, seen: Seen) -> None:
    _silent_peer(target, seen, ("--tensor-parallel-size", "2"))


@attack("low", "a silent peer that announced 60 MB at the port of hosts with replicas")
def silent_peer_of_replicas(target: Target, seen: Seen) -> None:
    _silent_peer(target, seen, ("--data-parallel-size", "2"))


@attack("medium", "garbage at the port of gRPC")
def grpc_garbage(target: Target, seen: Seen) -> None:
    port = _free_port()
    server = target.server("--grpc-port", str(port), fresh=True)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frame = struct.pack(">I", 100_000)[1:] + b"\1\4\0\0\0\1" + b"\xff" * 100_000
    pieces = [os.urandom(10_000), b"GET / HTTP/1.1\r\n\r\n", preface + os.urandom(10_000), preface + frame * 10]
    pieces += [preface + (b"\0\0\0\4\0\0\0\0\0") * 10_000, preface + b"\xff\xff\xff\4\0\0\0\0\0"]
    with Bystander(server) as other:
        for piece in pieces * 5:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
                stream.sendall(piece)
                stream.settimeout(0.5)
                stream.recv(1 << 16)
        num_open = _connected(port, 5)
    seen.equal("gRPC still listens", num_open is not None, True)
    seen.equal("HTTP", wire.get(server, "/health").status, 200)
    other.judge(seen)
