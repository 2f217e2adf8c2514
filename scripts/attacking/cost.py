"""Cost of the checks of requests: the CPU time of the API server for a small chat request, on two checkouts in turn.

Both serve at the same time, over fake engines, and get short bursts of requests in turn, so that what else the machine does meets both.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_BURST = 100
_CONNECTIONS = 4
_SERVE = """
import json, os, socket, subprocess, sys
from jaxllm.config import EngineConfig
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
from scripts.measuring.paced_core import FACTORY, STEP_VARIABLE

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
os.environ[STEP_VARIABLE] = "0.002"
with socket_directory() as directory:
    engine = start_engine(EngineStart(EngineConfig.from_options(model="demo"), str(directory), core_factory=FACTORY))
    command = [sys.executable, "scripts/bench_api_server.py", "--api-server", str(directory), str(engine.pid), str(port), "-"]
    api_server = subprocess.Popen(command)
    print(json.dumps([port, api_server.pid]), flush=True)
    sys.stdin.read()
    api_server.kill()
    engine.kill()
    api_server.wait()
    engine.wait()
"""


class _Served:
    """The API server of a checkout, with open connections to it."""

    def __init__(self, port: int, pid: int):
        self.pid = pid
        self._connections = [self._connected(port) for _ in range(_CONNECTIONS)]
        body = json.dumps(
            {"messages": [{"role": "user", "content": "Write something."}], "max_tokens": 1, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def microseconds(self) -> float:
        """CPU time for each request of a burst."""
        before = self._cpu_nanoseconds()
        for _ in range(_BURST // _CONNECTIONS):
            for connection in self._connections:
                connection.sendall(self._request)
            for connection in self._connections:
                received = b""
                while b'"usage"' not in received:
                    piece = connection.recv(1 << 16)
                    assert piece and b" 200 OK" in (received or piece), piece
                    received += piece
        return (self._cpu_nanoseconds() - before) / 1000 / _BURST

    def _cpu_nanoseconds(self) -> int:
        return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{self.pid}/task").glob("*/schedstat"))

    @staticmethod
    def _connected(port: int) -> socket.socket:
        for _ in range(600):
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), timeout=60)
            time.sleep(0.1)
        raise TimeoutError("the API server did not start")


@contextlib.contextmanager
def _served(tree: Path) -> Iterator[_Served]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield _Served(*json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(30)


def compare_cost(before: Path, after: Path, rounds: int) -> int:
    """Print both times and their ratio, with its spread. Returns 0: it judges nothing."""
    with _served(before) as first, _served(after) as second:
        for each in (first, second) * 4:
            each.microseconds()  # what is done once
        found: dict[_Served, list[float]] = {first: [], second: []}
        for number in range(rounds):
            for each in (first, second) if number % 2 == 0 else (second, first):
                found[each].append(each.microseconds())
    ratios = sorted(after / before for before, after in zip(found[first], found[second], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    least = [statistics.mean(sorted(times)[: max(1, rounds // 4)]) for times in found.values()]
    print(
        f"{rounds} bursts of {_BURST} requests on each: median {statistics.median(found[first]):.1f} and "
        f"{statistics.median(found[second]):.1f} µs a request; ratio: median {statistics.median(ratios):.3f} ± {error:.3f}, half of them "
        f"{low:.3f} to {high:.3f}; of the least quarters {least[0]:.1f} and {least[1]:.1f} µs: {least[1] / least[0]:.3f}"
    )
    return 0
