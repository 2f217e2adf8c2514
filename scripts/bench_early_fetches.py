"""Compares a prompt that one engine computes with one that a decode engine fetches, after it is computed or meanwhile. Needs two GPUs.

usage: bench_early_fetches.py [MODEL_DIR] [--json FILE] [--tiny] [name=value …]

answers  of the same prompts, fetched meanwhile and computed by the prefill engine: how many are equal
first    time to the first token of prompts, on idle engines: computed by the decode engine; fetched after; fetched meanwhile
between  time between the tokens of running requests of the decode engine: alone, and while it fetches prompts in these two ways

Two engine processes without a server, each on a GPU of its own, and a router in this process. All three ways take turns on the same
engines. Weights are random. --tiny: short prompts and few requests, for a machine without GPUs. name=value: options of both engines.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.request import EngineCoreRequest
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.parts import Rows

ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 64,
    "decode_buckets": (64,),
    "token_buckets": (64, 2048),
    "max_num_batched_tokens": 2048,
}
TINY_ENGINE = {**ENGINE, "max_num_seqs": 8, "decode_buckets": (8,), "token_buckets": (128,), "max_num_batched_tokens": 128}
ROLES: dict[str, dict[str, Any]] = {"prefill": {"kv_role": "prefill", "kv_port": 0}, "decode": {"kv_role": "decode"}}
WAYS = ("computed", "fetched after", "fetched meanwhile")
KEEP = {
    "fetched after": KVTransfer(keep_for_decode=True),
    "fetched meanwhile": KVTransfer(keep_for_decode=True, tells_early=True),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; lengths are in tokens."""

    vocabulary: int = 100_000
    first: tuple[int, ...] = (8192, 32768)
    arriving: int = 8192
    running: tuple[int, int] = (256, 2000)
    """Prompt and answer of running requests."""
    num_running: int = 32
    seconds: float = 5.0
    repeats: int = 4
    host_gib: float = 24.0
    locking_seconds: float = 15.0
    """In which the decode engine locks the memory of the other one, from the first fetch on; see docs/PREFILL_DECODE.md."""


TINY = Sizes(1000, (512, 2048), 512, (16, 600), 4, 3.0, 4, 0.25, 0.5)


def run_engine(role: str, gpu: int, pipe: Connection, options: dict[str, Any]) -> None:
    """An engine process: takes requests, and sends when each output came."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    from jaxllm.config import EngineConfig
    from jaxllm.engine.core import EngineCore

    core = EngineCore(EngineConfig.from_options(**options, **ROLES[role]))
    core.finish_compiling()
    pipe.send("ready")
    while True:
        while pipe.poll(0.0 if core.has_unfinished_requests() else 0.1):
            match pipe.recv():
                case None:
                    core.shutdown()
                    return
                case EngineCoreRequest() as request:
                    core.add_request(request)
                case ids:
                    core.abort_requests(ids)
        if core.has_unfinished_requests():
            for output in core.step():
                is_over = output.finish_reason is not None
                pipe.send((time.perf_counter(), output.request_id, output.new_token_ids, is_over, output.kv_transfer_params))


@dataclass
class Router:
    """Sends prompts in the three ways, and notes when tokens come."""

    pipes: dict[str, Connection]
    sizes: Sizes
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    num_sent: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tokens_at: dict[str, list[float]] = field(default_factory=dict)
    """When tokens of each request came."""
    legs: dict[str, EngineCoreRequest] = field(default_factory=dict)
    """The request behind each first leg."""
    running: set[str] = field(default_factory=set)
    keeps_running: bool = False
    arrived: set[str] = field(default_factory=set)
    """Prompts that came during the running requests."""

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        return [self.draw.randrange(10, self.sizes.vocabulary) for _ in range(length)]

    def send(self, prompt: Sequence[int], max_tokens: int, way: str = "computed", engine: str = "decode") -> str:
        """Begin a request. Returns its id. engine: computes it, if one does."""
        self.num_sent += 1
        request = _request(f"r{self.num_sent}", prompt, max_tokens)
        self.tokens[request.request_id], self.tokens_at[request.request_id] = [], []
        if way == "computed":
            self.pipes[engine].send(request)
        else:
            leg = _request(f"{request.request_id}-leg", prompt, 1, KEEP[way])
            self.legs[leg.request_id] = request
            self.pipes["prefill"].send(leg)
        return request.request_id

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> None:
        """Pass on what engines send until something holds."""
        deadline = time.perf_counter() + seconds
        while not holds():
            if time.perf_counter() > deadline:
                raise TimeoutError("the engines do not answer")
            for pipe in wait(list(self.pipes.values()), 0.05):
                self._take(*pipe.recv())  # type: ignore[union-attr]

    def _take(self, at: float, request_id: str, tokens: list[int], is_over: bool, params: Any) -> None:
        if (request := self.legs.get(request_id)) is not None:
            if params is not None or is_over:
                del self.legs[request_id]
                options = RequestOptions(kv_transfer=read_kv_transfer(params))
                self.pipes["decode"].send(
                    _request(request.request_id, request.prompt_token_ids, _most(request), options=options)
                )
            return
        if request_id in self.tokens_at:
            self.tokens[request_id] += tokens
            self.tokens_at[request_id] += [at] * len(tokens)
        if is_over and request_id in self.running:
            self.running.remove(request_id)
            self.run()

    def run(self) -> None:
        """Begin one of the requests that run, if they are to."""
        if self.keeps_running:
            length, most = self.sizes.running
            self.running.add(self.send(self.prompt(length), most))

    def first_ms(self, length: int, way: str) -> float:
        """Milliseconds to the first token."""
        prompt, began = self.prompt(length), time.perf_counter()
        request_id = self.send(prompt, 2, way)
        self.until(lambda: len(self.tokens_at[request_id]) == 2)
        return 1e3 * (self.tokens_at[request_id][0] - began)

    def answer(self, prompt: Sequence[int], way: str) -> list[int]:
        """16 tokens, computed by the prefill engine or fetched by the other."""
        request_id = self.send(prompt, 16, way, "prefill")
        self.until(lambda: len(self.tokens[request_id]) == 16)
        return self.tokens[request_id]

    def gaps_ms(self, began: float, ended: float) -> list[float]:
        """Milliseconds between tokens of running requests in this time, in order of size."""
        times = [self.tokens_at[request_id] for request_id in self.tokens_at if request_id not in self.arrived]
        pairs = [(each[index - 1], each[index]) for each in times for index in range(1, len(each))]
        return sorted(1e3 * (after - before) for before, after in pairs if began <= after < ended)


def _request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    keep: KVTransfer | None = None,
    options: RequestOptions | None = None,
) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        options=options or RequestOptions(kv_transfer=keep),
    )


def _most(request: EngineCoreRequest) -> int:
    assert request.sampling_params.max_tokens is not None
    return request.sampling_params.max_tokens


def measure(router: Router, rows: Rows) -> None:
    """All parts."""
    sizes = router.sizes
    router.first_ms(sizes.first[0], WAYS[1])
    time.sleep(sizes.locking_seconds)
    for length in sizes.first:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(sizes.repeats + 1):
            for way in WAYS:
                found[way].append(router.first_ms(length, way))
        middle = {way: statistics.median(times[1:]) for way, times in found.items()}
        for way in WAYS:
            told = f"{min(found[way][1:]):.0f} to {max(found[way][1:]):.0f}; first {found[way][0]:.0f}"
            rows.note(f"first token, {length} tokens, {way}", middle[way], "ms", note=told)
        goal = 40.0 if length == sizes.first[0] else None
        for way in WAYS[1:]:
            rows.note(f"what two engines add, {length} tokens, {way}", middle[way] - middle[WAYS[0]], "ms", goal)
    prompts = [router.prompt(sizes.first[0] + extra) for extra in (-7, 0, 1, 300)]
    pairs = [(router.answer(prompt, WAYS[2]), router.answer(prompt, WAYS[0])) for prompt in prompts]
    rows.note(
        "equal answers of both engines", sum(one == other for one, other in pairs), f"of {len(pairs)}", len(pairs), more=True
    )
    router.keeps_running = True
    for _ in range(sizes.num_running):
        router.run()
    router.until(lambda: all(len(router.tokens_at[each]) > 5 for each in router.running))
    for _ in range(2):
        alone = _note_gaps(router, rows, "alone", None)
        for way in WAYS[1:]:
            tail = _note_gaps(router, rows, f"beside prompts {way}", way)
            rows.note(f"p99 beside prompts {way}, over alone", tail / alone, "×", 1.15)
    router.keeps_running = False
    router.pipes["decode"].send(list(router.running))


def _note_gaps(router: Router, rows: Rows, name: str, way: str | None) -> float:
    """The 99th percentile of the time between tokens, alone or while prompts arrive one after the other."""
    began = time.perf_counter()
    end, num_arrived = began + router.sizes.seconds, 0
    while time.perf_counter() < end:
        if way is None:
            router.until(lambda: time.perf_counter() >= end)
        else:
            request_id = router.send(router.prompt(router.sizes.arriving), 2, way)
            router.arrived.add(request_id)
            router.until(lambda request_id=request_id: len(router.tokens_at[request_id]) == 2)  # type: ignore[misc]
            num_arrived += 1
    gaps = router.gaps_ms(began, end)
    at = {share: gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.9, 0.95, 0.98, 0.99, 1.0)}
    told = ", ".join(f"{100 * share:g} %: {value:.2f}" for share, value in at.items())
    rows.note(
        f"between tokens of {router.sizes.num_running} requests, p99, {name}",
        at[0.99],
        "ms",
        note=f"{told}; {num_arrived} prompts",
    )
    return at[0.99]


def main() -> None:
    """Start both engines, and measure."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("model", nargs="?", default="demo", help="a directory with config.json")
    parser.add_argument("options", nargs="*", type=engine_option, help="name=value: options of both engines")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--tiny", action="store_true", help="short prompts and few requests")
    args: argparse.Namespace = parser.parse_args()
    sizes, options = (TINY, TINY_ENGINE) if args.tiny else (Sizes(), ENGINE)
    length = max(*sizes.first, sum(sizes.running)) + 64
    given = {
        **options,
        "model": args.model,
        "max_model_len": length,
        "kv_offloading_size": sizes.host_gib,
        **dict(args.options),
    }
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for gpu, role in enumerate(ROLES):
        pipes[role], other = context.Pipe()
        processes.append(context.Process(target=run_engine, args=(role, gpu, other, given), daemon=True))
        processes[-1].start()
        other.close()
    rows, began = Rows(Path(args.model).name, args.json), time.monotonic()
    for pipe in pipes.values():
        if pipe.recv() != "ready":
            raise RuntimeError("an engine did not start")
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    try:
        measure(Router(pipes, sizes), rows)
    finally:
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join(30)
    print(f"\n{rows.table()}")


if __name__ == "__main__":
    main()
