"""Compares `jaxllm serve --prefill 1 --decode 1` with two plain engines, each on a separate GPU; prints a Markdown table with goals.

usage: bench_prefill_decode.py MODEL_DIR [--each 2] [--parts answers,first,between] [--only roles|plain] [--json FILE]
                                [--server-flags='…']

answers  the same prompts, greedy: how many answers are equal
first    time to the first token of prompts of 8192 and 32768 tokens, on idle engines
between  time between the tokens of 32 running requests: alone, and while prompts of 8192 tokens arrive one after the other

The plain engines are replicas that compute prompts in chunks among their decodes; both servers have the same flags otherwise. Weights are
random unless the flags say another --load-format. An engine that compiles all programs comes first, so that all run the same.
--tiny: the demo model and short prompts, for a machine without GPUs.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.http_client.client import ServerClient
from scripts.measuring.command_line import script_parser
from scripts.measuring.parts import Rows
from scripts.soaking.processes import RUN, started_server

FLAGS = "--load-format dummy --skip-tokenizer-init --max-num-seqs 64 --decode-buckets 64 --token-buckets 64,2048"
FLAGS += " --max-num-batched-tokens 2048 --warmup all --num-gpu-blocks-override 12288"
# Programs depend on the number of blocks, which would differ between engines with and without staging memory.
TINY_FLAGS = "--max-num-seqs 32 --decode-buckets 32 --token-buckets 128 --max-num-batched-tokens 128"
SERVERS = {
    "roles": "--prefill {each} --decode {each} --prefill-threshold {threshold} --kv-offloading-size {host_gib}",
    "plain": "--data-parallel-size {engines}",
}
PARTS = ("answers", "first", "between")
TOLD = {"roles": "prefill and decode", "plain": "plain engines", "compiling": "one engine, which compiles for all"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; lengths are in tokens."""

    vocabulary: int = 100_000
    first: tuple[int, ...] = (8192, 32768)
    arriving: int = 8192
    running: tuple[int, int] = (256, 700)
    """Prompt and most tokens of the answer of running requests."""
    num_running: int = 32
    seconds: float = 6.0
    """Duration of each part of `between`: alone, and with arriving prompts."""
    repeats: int = 5
    threshold: int = 1024
    host_gib: float = 48.0
    start_seconds: float = 300.0


TINY = Sizes(1000, (300, 600), 300, (16, 300), 8, 1.5, 2, 64, 0.25)


class Client:
    """Requests of token ids to a server."""

    def __init__(self, client: ServerClient, sizes: Sizes, seed: int):
        self._client, self._sizes, self._random = client, sizes, random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._sizes.vocabulary) for _ in range(length)]

    async def events(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        """When each piece of an answer comes."""
        body = self._body(prompt, max_tokens, stream=True)
        async for chunks in self._client.stream("/inference/v1/generate", body):
            if any(chunk.choices for chunk in chunks):
                yield time.perf_counter()

    async def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens of an answer."""
        answer = await self._client.post("/inference/v1/generate", self._body(prompt, max_tokens, stream=False))
        return msgspec.json.decode(answer)["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    def _body(self, prompt: Sequence[int], max_tokens: int, *, stream: bool) -> bytes:
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return msgspec.json.encode({"token_ids": prompt, "sampling_params": params, "stream": stream})

    async def first_ms(self, prompt: Sequence[int]) -> float:
        """Milliseconds to the first token."""
        began = time.perf_counter()
        times = [at async for at in self.events(prompt, 2)]
        return 1e3 * (times[0] - began)


@dataclass
class Found:
    """Results of one server; what was not asked for is empty."""

    answers: list[list[int]]
    first_ms: dict[int, list[float]]
    """By the length of prompts, in order; without that of the first one."""
    between: "Between | None"


@dataclass
class Between:
    """Median and 99th percentile of the time between tokens, in milliseconds."""

    alone: tuple[float, float]
    beside: tuple[float, float]
    num_arrived: int


async def measure(url: str, sizes: Sizes, parts: Sequence[str]) -> Found:
    """These parts on one server."""
    async with ServerClient(url, timeout_seconds=120) as client:
        asked = Client(client, sizes, 1)
        lengths = (sizes.first[0] - 7, sizes.first[0], 40, sizes.first[0] // 3)
        prompts = [asked.prompt(length) for _ in range(3) for length in lengths] if "answers" in parts else []
        answers = [await asked.tokens(prompt, 32) for prompt in prompts]
        first_ms = {
            length: [await asked.first_ms(asked.prompt(length)) for _ in range(sizes.repeats + 1)][1:]
            for length in (sizes.first if "first" in parts else ())
        }
        return Found(answers, first_ms, await _between(asked, sizes) if "between" in parts else None)


async def _between(asked: Client, sizes: Sizes) -> Between:
    """Time between tokens of running requests, alone and while prompts arrive."""
    gaps: list[tuple[float, float]] = []

    async def run() -> None:
        length, most = sizes.running
        while True:  # those that end are replaced; the wait for their first token is none between tokens
            last = None
            async for at in asked.events(asked.prompt(length), most):
                if last is not None:
                    gaps.append((at, at - last))
                last = at

    running = [asyncio.create_task(run()) for _ in range(sizes.num_running)]
    try:
        await asyncio.sleep(sizes.seconds / 2)  # until all run
        began = time.perf_counter()
        await asyncio.sleep(sizes.seconds)
        alone, num_arrived = time.perf_counter(), 0
        while time.perf_counter() < alone + sizes.seconds:
            await asked.first_ms(asked.prompt(sizes.arriving))
            num_arrived += 1
        ended = time.perf_counter()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Between(_figures(gaps, began, alone), _figures(gaps, alone, ended), num_arrived)


def _figures(gaps: Sequence[tuple[float, float]], began: float, ended: float) -> tuple[float, float]:
    """Median and 99th percentile of those within a time, in milliseconds."""
    found = sorted(1e3 * gap for at, gap in gaps if began <= at < ended)
    if not found:
        raise RuntimeError("no request ran")
    return found[len(found) // 2], found[int(0.99 * (len(found) - 1))]


def note(rows: Rows, found: dict[str, Found], sizes: Sizes) -> None:
    """The rows of what was measured."""
    for name, each in found.items():
        for length, ms in each.first_ms.items():
            told = "median of " + ", ".join(f"{one:.0f}" for one in ms)
            rows.note(f"first token, {length} tokens, {TOLD[name]}", statistics.median(ms), "ms", note=told)
        if (between := each.between) is None:
            continue
        median, tail = between.alone
        rows.note(
            f"between tokens of {sizes.num_running} requests, p99, {TOLD[name]}", tail, "ms", note=f"median {median:.2f} ms"
        )
        median, tail = between.beside
        told = f"median {median:.2f} ms; {between.num_arrived} prompts of {sizes.arriving} tokens"
        rows.note(f"the same beside prompts, {TOLD[name]}", tail, "ms", note=told)
        goal = 1.15 if name == "roles" else None
        rows.note(f"beside prompts over alone, p99, {TOLD[name]}", tail / between.alone[1], "×", goal)
    if len(found) == len(SERVERS):
        roles, plain = found["roles"], found["plain"]
        for length in roles.first_ms:
            goal = 40.0 if length == sizes.first[0] else None
            added = statistics.median(roles.first_ms[length]) - statistics.median(plain.first_ms[length])
            rows.note(f"first token, what two engines add, {length} tokens", added, "ms", goal)
        if roles.between and plain.between:
            rows.note(
                "p99 between tokens beside prompts, plain over roles", plain.between.beside[1] / roles.between.beside[1], "×"
            )
        if pairs := list(zip(roles.answers, plain.answers, strict=True)):
            equal = sum(one == other for one, other in pairs)
            begins = sum(one[0] == other[0] for one, other in pairs)
            rows.note(
                "equal answers", equal, f"of {len(pairs)}", len(pairs), more=True, note=f"{begins} first tokens are equal"
            )


def main() -> None:
    """Measure one server after the other."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("model", nargs="?", default="demo", help="a directory with config.json, or with weights")
    parser.add_argument("--each", type=int, default=1, help="engines of each role; twice as many plain ones, a GPU for each")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="of answers, first, between")
    parser.add_argument("--only", choices=list(SERVERS), help="one of both")
    parser.add_argument("--server-flags", default="", help="further flags of both servers")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this directory")
    parser.add_argument("--tiny", action="store_true", help="the demo model and short prompts")
    args: argparse.Namespace = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    sizes, found = TINY if args.tiny else Sizes(), dict[str, Found]()
    rows = Rows(Path(args.model).name, args.json)
    with tempfile.TemporaryDirectory() as directory:

        @contextlib.contextmanager
        def server(name: str, flags: str) -> Iterator[str]:
            length = max(*sizes.first, sum(sizes.running)) + 64
            words = f"{TINY_FLAGS if args.tiny else FLAGS} --enable-scale-out --max-model-len {length} {flags}"
            command = f"{sys.executable} -c {shlex.quote(RUN)} serve {args.model} {words} {args.server_flags} --port {{port}}"
            log, began = (args.logs or Path(directory)) / f"{name}.log", time.monotonic()
            with started_server(command, log, timeout_seconds=sizes.start_seconds) as (url, _):
                print(f"{TOLD[name]}: ready after {time.monotonic() - began:.0f} s", flush=True)
                yield url

        if not args.tiny:
            # Engines that compile at the same time choose kernels apart, whose sums differ in the last bits.
            with server("compiling", ""):
                pass
        for name, flags in SERVERS.items():
            if args.only in (None, name):
                engines = {"each": args.each, "engines": 2 * args.each}
                given: Any = {"threshold": sizes.threshold, "host_gib": sizes.host_gib, **engines}
                with server(name, flags.format(**given)) as url:
                    found[name] = asyncio.run(measure(url, sizes, args.parts))
                print(json.dumps({name: found[name].answers}), flush=True)
    note(rows, found, sizes)
    print(f"\n{rows.table()}")


if __name__ == "__main__":
    main()
