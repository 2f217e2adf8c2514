"""What a streamed token costs a front in CPU time: a server over a fake engine core, with clients that only read.

python scripts/bench_front.py --streams 64 --tokens 500
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.served_core import STEP_VARIABLE
from tests.helpers.tiny_tokenizers import write_tokenizer


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def stream(server: ServerProcess, path: str, body: bytes, began: asyncio.Barrier) -> int:
    """Read one stream to its end. Returns the number of events with content."""
    reader, writer = await asyncio.open_unix_connection(server.uds)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    events, tail, is_begun = 0, b"", False
    while data := await reader.read(1 << 16):
        events += (tail + data).count(b"data: {")
        tail = data[-6:]
        if events and not is_begun:
            is_begun = True
            await began.wait()
        if b"data: [DONE]" in tail + data:
            break
    writer.close()
    return events


async def measure(server: ServerProcess, arguments: argparse.Namespace) -> None:
    body = {"model": "model", "max_tokens": arguments.tokens, "ignore_eos": True, "stream": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if arguments.chat else {"prompt": "hi"}
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    [front] = server.children("server.front")
    [engine] = server.children("engine.process")
    began = asyncio.Barrier(arguments.streams + 1)
    work = [asyncio.create_task(stream(server, path, json.dumps(body).encode(), began)) for _ in range(arguments.streams)]
    await began.wait()
    start, before, engine_before = time.perf_counter(), cpu_seconds(front), cpu_seconds(engine)
    events = sum(await asyncio.gather(*work))
    seconds, spent, engine_spent = time.perf_counter() - start, cpu_seconds(front) - before, cpu_seconds(engine) - engine_before
    tokens = arguments.streams * arguments.tokens
    print(
        f"{arguments.streams} streams, {tokens} tokens in {events} events, {tokens / seconds:.0f} tokens/s: "
        f"front {1e6 * spent / tokens:.1f} µs a token ({1e6 * spent / events:.1f} an event), "
        f"engine process {1e6 * engine_spent / tokens:.1f}; front has {resident_bytes(front) >> 20} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--chat", action="store_true")
    arguments = parser.parse_args()
    os.environ[STEP_VARIABLE] = str(arguments.step_seconds)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = write_tokenizer(place / "model")
        with serving(model, place, served_model_name=["model"], web=False) as server:
            asyncio.run(measure(server.wait_ready(), arguments))


if __name__ == "__main__":
    main()
