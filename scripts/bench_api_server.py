"""Measures the cost of the process that handles HTTP: CPU time for each streamed token, and for each short request.

Three processes: a fake engine that gives every stream a token at each step, an API server (uvicorn, guard, routes,
detokenizing, messages from the engine), and this one, whose sockets read the streams. Only the API server's CPU time counts.

    python scripts/bench_api_server.py --streams 64 --seconds 10
    python scripts/bench_api_server.py --endpoint completions --step-ms 20 --json
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
from scripts.measuring.paced_core import FACTORY, STEP_VARIABLE
from scripts.soaking.processes import cpu_seconds

ROOT = Path(__file__).resolve().parent.parent
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def body_of(endpoint: str, stream: bool) -> bytes:
    """A request that runs until it is closed, or, without streaming, ends after one token."""
    fields: dict[str, Any] = {"stream": stream, "max_tokens": 15_000 if stream else 1, "ignore_eos": True}
    if endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": "Write something."}]
    else:
        fields["prompt"] = "import "
    return json.dumps(fields).encode()


def head(endpoint: str, body: bytes) -> bytes:
    lines = [
        f"POST {PATHS[endpoint]} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def run_streams(port: int, api_server: int, endpoint: str, num_streams: int, seconds: float) -> dict[str, float]:
    """CPU of the API server while streams run; tokens are counted as events that carry text."""
    num_events = 0
    marker = b'"delta":{"content":' if endpoint == "chat" else b'"text":'

    async def read(reader: asyncio.StreamReader) -> None:
        nonlocal num_events
        while data := await reader.read(1 << 16):
            num_events += data.count(marker)

    body = body_of(endpoint, True)
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_streams)]
    tasks = [asyncio.create_task(read(reader)) for reader, _ in connections]
    for _, writer in connections:
        writer.write(head(endpoint, body))
    await asyncio.sleep(1.5)
    before, num_before, began = cpu_seconds(api_server), num_events, time.perf_counter()
    await asyncio.sleep(seconds)
    used, count, took = cpu_seconds(api_server) - before, num_events - num_before, time.perf_counter() - began
    for _, writer in connections:
        writer.transport.abort()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": num_streams,
        "events_per_second": round(count / took, 1),
        "api_server_cpu_share": round(used / took, 3),
        "microseconds_per_event": round(1e6 * used / max(1, count), 2),
    }


async def run_requests(port: int, api_server: int, endpoint: str, count: int) -> dict[str, float]:
    """CPU of the API server for requests of one token, one after another on a few connections."""
    body = body_of(endpoint, False)
    data = head(endpoint, body)

    async def worker(share: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(share):
            writer.write(data)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = int(next(line for line in answer.split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
            await reader.readexactly(length)
        writer.close()

    await worker(20)
    before, began = cpu_seconds(api_server), time.perf_counter()
    await asyncio.gather(*(worker(count // 8) for _ in range(8)))
    used, took = cpu_seconds(api_server) - before, time.perf_counter() - began
    return {"requests_per_second": round(count / took, 1), "microseconds_per_request": round(1e6 * used / count, 1)}


def serve_api_server(directory: str, engine_pid: int, port: int, profile: str | None) -> None:
    """The API server: serves until it is ended."""
    import uvicorn

    from server.app import create_app
    from server.connection import uvicorn_config
    from server.options import ServerOptions

    options = ServerOptions.from_options(port=port, host="127.0.0.1", disable_uvicorn_access_log=True)

    async def main() -> None:
        llm = await AsyncLLM.connect(EngineClient(directory, engine_pid))
        await uvicorn.Server(uvicorn_config(create_app(llm, options), options)).serve()
        llm.shutdown()

    import uvloop

    signal.signal(signal.SIGTERM, lambda number, frame: None)  # which uvicorn raises again when it is done
    if profile is None:
        uvloop.run(main())
        return
    import cProfile

    with cProfile.Profile() as found:
        uvloop.run(main())
    found.dump_stats(profile)


async def wait_for(port: int) -> None:
    """Wait until the port accepts connections."""
    for _ in range(3000):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return
    raise TimeoutError("the API server did not start")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all processes, measure, stop them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ[STEP_VARIABLE] = str(arguments.step_ms / 1000)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with socket_directory() as directory:
        config = EngineConfig.from_options(model=arguments.model)
        engine = start_engine(EngineStart(config, str(directory), core_factory=FACTORY))
        command = [
            sys.executable,
            __file__,
            "--api-server",
            str(directory),
            str(engine.pid),
            str(port),
            arguments.profile or "-",
        ]
        api_server = subprocess.Popen(command)
        try:

            async def main() -> dict[str, Any]:
                await wait_for(port)
                found: dict[str, Any] = {"endpoint": arguments.endpoint, "step_ms": arguments.step_ms}
                found |= await run_requests(port, api_server.pid, arguments.endpoint, arguments.requests)
                return found | await run_streams(port, api_server.pid, arguments.endpoint, arguments.streams, arguments.seconds)

            return asyncio.run(main())
        finally:
            api_server.terminate()
            api_server.wait()
            engine.kill()
            engine.wait()


def main() -> None:
    if sys.argv[1:2] == ["--api-server"]:
        directory, pid, port, profile = sys.argv[2:]
        serve_api_server(directory, int(pid), int(port), None if profile == "-" else profile)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", choices=PATHS, default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=400, help="short requests before the streams")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between two tokens of a stream")
    parser.add_argument("--model", default="demo", help="whose tokenizer and chat template are used")
    parser.add_argument("--profile", help="file for a profile of the API server (which slows it down)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:<28}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
