"""Checks that a server stays healthy under long, mixed load with misbehaving clients.

soak         20 000 requests of all kinds (scripts/soaking/kinds.py): each is answered as it must be, memory stays flat, nothing is left
hold         1 000 streams at the same time: every one gets all its tokens
disconnect   1 000 streams of which 500 are cut off in the middle: the others get all their tokens, nothing is left

The server is started by the script (--command) unless --url names one that runs (then --pid tells whose memory to watch). Start it with
--warmup all: a program that is compiled in the middle is memory that stays, and no leak.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.cli.progress_bars import make_progress
from jaxllm.http_client.client import ServerClient, ServerError
from jaxllm.http_client.datasets import LoadPrompt
from jaxllm.http_client.load import RequestMaker, ask
from jaxllm.http_client.scrape import read_scrape
from scripts.soaking.kinds import KINDS, Asker, UnexpectedError, choose
from scripts.soaking.processes import DEFAULT_COMMAND, MemoryCurve, MemorySampler, started_server

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
QUIET_SECONDS = 20.0
"""How long the gauges may take to be 0 again."""
SETTLED_AFTER = 1000
"""Requests in which caches fill and every kind of work is done for the first time: memory counts from there."""
FEWEST_TO_JUDGE = 4000
"""With fewer requests the memory is reported and not judged."""
MAX_GROWTH = 1.05
SLACK_BYTES = 8 << 20
"""Growth that is no leak however small the process: an allocator's arena, a lazy import."""
COMPLETIONS = "/v1/completions"


async def soak(url: str, model: str, count: int, concurrency: int, seed: int, sampler: MemorySampler | None) -> dict[str, Any]:
    """Send the mix. Returns counts by kind and everything that was not as it must be."""
    progress = make_progress(quiet=False)
    progress.start("soaking", count, "request")
    rng = random.Random(seed)
    kinds = iter(choose(rng, count))
    done: Counter[str] = Counter()
    faults: list[str] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        asker = Asker(session, url, model, rng)

        async def worker() -> None:
            for name in kinds:
                kind = KINDS[name]
                try:
                    await kind.ask(asker, kind.path, kind.body(asker))
                except (UnexpectedError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                    faults.append(f"{name}: {type(error).__name__}: {error}")
                done[name] += 1
                progress.advance()
                if sampler is not None:
                    sampler.done += 1

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    progress.finish()
    return {"requests": dict(done), "num_faults": len(faults), "faults": faults[:20]}


async def hold(url: str, model: str, count: int, num_tokens: int, num_leaving: int) -> dict[str, Any]:
    """Open streams all at once; the first `num_leaving` leave when their first tokens come. Returns what became of the others."""
    maker = RequestMaker("openai", model, ignore_eos=True)
    body = maker.body(LoadPrompt([5, 6, 7, 8], num_tokens))
    began = time.perf_counter()
    async with ServerClient(url) as client:

        async def leave() -> bool:
            async with contextlib.aclosing(client.stream(COMPLETIONS, body)) as pieces:
                async for _ in pieces:
                    return True
            return False

        leaving = [asyncio.create_task(leave()) for _ in range(num_leaving)]
        staying = [asyncio.create_task(ask(client, COMPLETIONS, body)) for _ in range(count - num_leaving)]
        outcomes = await asyncio.gather(*staying)
        left = await asyncio.gather(*leaving, return_exceptions=True)
    wrong = [outcome.error or "too few tokens" for outcome in outcomes if outcome.num_output_tokens != num_tokens]
    wrong += [f"a client that was to leave: {each}" for each in left if each is not True]
    return {
        "streams": count,
        "left": sum(each is True for each in left),
        "whole": len(outcomes) - sum(outcome.num_output_tokens != num_tokens for outcome in outcomes),
        "tokens_each": num_tokens,
        "seconds": time.perf_counter() - began,
        "num_faults": len(wrong),
        "faults": [f"{number} × {fault}" for fault, number in Counter(wrong).most_common(20)],
    }


async def gauges_at_rest(url: str, timeout_seconds: float = QUIET_SECONDS) -> dict[str, float]:
    """The gauges once they are 0, or as they are when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    async with ServerClient(url) as client:
        while True:
            scrape = read_scrape((await client.get("/metrics")).decode(), 0.0)
            gauges = {name: scrape.values.get(name, 0.0) for name in GAUGES}
            if not any(gauges.values()) or time.monotonic() > deadline:
                return gauges
            await asyncio.sleep(0.1)


def memory_report(curve: MemoryCurve, count: int) -> dict[str, Any]:
    """Memory of each process once settled and at the end, and whether it stayed flat (None: too few requests)."""
    settled = min(SETTLED_AFTER, count // 2)
    growth = curve.growth((settled, settled + count // 20), (count - count // 20, count))
    processes = [
        {
            "process": curve.names[pid],
            "early_mib": round(early / 2**20, 1),
            "late_mib": round(late / 2**20, 1),
            "is_flat": late <= max(early * MAX_GROWTH, early + SLACK_BYTES),
        }
        for pid, (early, late) in growth.items()
    ]
    flat = all(process["is_flat"] for process in processes)
    return {"processes": processes, "is_flat": flat if count >= FEWEST_TO_JUDGE else None}


def draw(curve: MemoryCurve, path: str) -> None:
    """The memory of each process over the requests done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for pid, samples in curve.samples.items():
        axes.plot([done for _, done, _ in samples], [size / 2**20 for _, _, size in samples], label=curve.names[pid])
    axes.set(xlabel="requests done", ylabel="resident memory in MiB", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


async def run(arguments: argparse.Namespace, url: str, pid: int | None) -> tuple[dict[str, Any], MemoryCurve]:
    """Do what is asked. Returns the report, and the memory curve (empty without a process to watch)."""
    async with ServerClient(url) as client:
        models = await client.models()
    model = models[0]
    count = arguments.requests or (20_000 if arguments.mode == "soak" else 1000)
    began = time.perf_counter()
    sampler = MemorySampler(pid) if pid is not None else None
    with sampler or contextlib.nullcontext():
        if arguments.mode == "soak":
            report = await soak(url, model, count, arguments.concurrency, arguments.seed, sampler)
        else:
            report = await hold(url, model, count, arguments.tokens, count // 2 if arguments.mode == "disconnect" else 0)
    gauges = await gauges_at_rest(url)
    report = {"mode": arguments.mode, "elapsed_seconds": time.perf_counter() - began, **report, "gauges_at_rest": gauges}
    passed = not report["num_faults"] and not any(gauges.values())
    curve = sampler.curve if sampler is not None else MemoryCurve()
    if sampler is not None and arguments.mode == "soak":
        report["memory"] = memory_report(curve, count)
        passed = passed and report["memory"]["is_flat"] is not False
    return {"passed": passed, **report}, curve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print the report. Returns 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["soak", "hold", "disconnect"])
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, whose memory and whose children's is watched")
    parser.add_argument("--command", default=DEFAULT_COMMAND, help="what starts a server (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300, metavar="SECONDS", help="(default: 300)")
    parser.add_argument("--requests", type=int, metavar="N", help="default: 20000 to soak, else 1000")
    parser.add_argument("--concurrency", type=int, default=48, metavar="N", help="of soak (default: 48)")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="of each stream of hold and disconnect (default: 64)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", metavar="FILE", help="write the report, with all memory samples, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the memory curve (needs matplotlib)")
    found = parser.parse_args(arguments)
    try:
        if found.url is not None:
            report, curve = asyncio.run(run(found, found.url, found.pid))
        else:
            log = Path(tempfile.mkstemp(prefix="soak_server_", suffix=".log")[1])
            print(f"the server's log: {log}", file=sys.stderr)
            with started_server(found.command, log, timeout_seconds=found.start_timeout) as (url, pid):
                report, curve = asyncio.run(run(found, url, pid))
    except ServerError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if found.output:
        samples = [{"process": curve.names[pid], "samples": rows} for pid, rows in curve.samples.items()]
        Path(found.output).write_text(json.dumps({**report, "memory_samples": samples}) + "\n", encoding="utf-8")
    if found.plot:
        draw(curve, found.plot)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
