"""Times a server on a CPU from its start through its first requests of each kind, with a cold and a warm cache.

    python scripts/bench_first_requests.py [MODEL] [options of `jaxllm serve`]

Cold: an empty cache directory. Warm: the one that the server before left. Each kind of request is sent once, in this order, so that a
program which an earlier one compiled is there for a later one. Memory is the largest of all processes together, resident.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "import sys; from jaxllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "the same chat": {},
    "next turn": {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "The capital of France is Paris."},
            {"role": "user", "content": "And of Italy?"},
        ]
    },
    "n = 2": {"n": 2},
    "greedy": {"temperature": 0},
    "JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "penalties": {"presence_penalty": 0.5},
    "600 tokens": {"messages": [{"role": "user", "content": "one two three " * 200}]},
}


def resident_bytes(pid: int) -> int:
    """Resident bytes of a process and all its children."""
    total = 0
    try:
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return total
    return total + sum(map(resident_bytes, map(int, children)))


def pieces(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def time_request(client: httpx.Client, fields: dict[str, Any]) -> tuple[float, float, str]:
    """Seconds to the first token and to the end, and the text of a streamed chat."""
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 16, "stream": True, "temperature": 0.8, "top_k": 40, **fields}
    start, first, text = time.perf_counter(), 0.0, ""
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {reply.read().decode()}")
        for event in pieces(reply.iter_lines()):
            if "error" in event:
                raise SystemExit(f"{event}")
            said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            first = first or (time.perf_counter() - start if said else 0.0)
            text += said
    return first, time.perf_counter() - start, text


def time_server(model: str, cache: str, options: list[str], between_seconds: float) -> None:
    """Start a server, send the requests, and print how long each took."""
    environment = {**os.environ, "JAXLLM_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as directory:
        socket, log = f"{directory}/http", Path(directory, "log")
        command = [sys.executable, "-c", COMMAND, "serve", model, "--uds", socket, "--served-model-name", "m", *options]
        began = time.perf_counter()
        with log.open("wb") as stderr:
            server = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=environment, cwd=ROOT)
        most, done = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.05):
                most = max(most, resident_bytes(server.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://localhost", timeout=600) as client:
                while True:
                    if server.poll() is not None:
                        raise SystemExit(f"the server ended:\n{log.read_text()}")
                    try:
                        if client.get("/ready").status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                    time.sleep(0.02)
                print(f"| ready | {time.perf_counter() - began:.2f} | |", flush=True)
                for kind, fields in KINDS.items():
                    first, total, text = time_request(client, fields)
                    print(f"| {kind} | {first:.2f} | {total:.2f} | {text[:40]!r}", flush=True)
                    time.sleep(between_seconds)
        finally:
            server.terminate()
            server.wait()
            done.set()
            watcher.join()
        print(f"| memory | {most / 2**30:.2f} GiB | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--between", type=float, default=0.0, help="seconds between two requests")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            print(f"\n{state}\n\n| | first token, s | all, s |\n|---|---|---|", flush=True)
            time_server(args.model, cache, options, args.between)


if __name__ == "__main__":
    main()
