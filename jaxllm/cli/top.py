"""`jaxllm top`: a live view of a running server, read from its metrics."""

import argparse
import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.cli import options, terminal
from jaxllm.cli.numbers import above_zero
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.server_arguments import add_connection_arguments, make_client, run_async

if TYPE_CHECKING:
    from rich.console import RenderableType

ABOUT = "A live view of a running server (jaxllm or vLLM): load, speed and latencies. Ctrl-C leaves."
EXAMPLES = """examples:
  jaxllm top                                       http://127.0.0.1:8000
  jaxllm top --url http://host:8000 --interval 5
  jaxllm top --once --json                         one reading, for scripts"""

LATENCY_NAMES = {"ttft": "first token", "itl": "between tokens", "queue": "in the queue", "e2el": "whole request"}
NUM_KEPT = 60
"""Number of readings in the curve."""
TIMEOUT_SECONDS = 10.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    parser.add_argument("--interval", type=above_zero, default=2.0, metavar="SECONDS", help="between readings")
    parser.add_argument("--once", action="store_true", help="one reading: rates over one interval, then end")
    parser.add_argument("--json", action="store_true", help="with --once: as a JSON object")
    add_connection_arguments(parser)
    options.add_log_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the server until Ctrl-C. Returns the exit code."""
    if arguments.json and not arguments.once:
        raise UsageError("--json needs --once")
    if arguments.once:
        found = run_async(_once(arguments))
        print(json.dumps(found) if arguments.json else "\n".join(as_lines(found)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        run_async(_watch(arguments))
    return 0


async def _once(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxllm.http_client.scrape import scrape, view

    async with make_client(arguments, arguments.url, timeout_seconds=TIMEOUT_SECONDS) as client:
        before = await scrape(client)
        await asyncio.sleep(arguments.interval)
        return view(before, await scrape(client))


async def _watch(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from jaxllm.http_client.client import ServerError
    from jaxllm.http_client.scrape import scrape, view

    console = Console()
    speeds: deque[float] = deque(maxlen=NUM_KEPT)
    async with make_client(arguments, arguments.url, timeout_seconds=TIMEOUT_SECONDS) as client:
        before = await scrape(client)
        shown = contextlib.nullcontext() if not console.is_terminal else Live(console=console, auto_refresh=False, screen=True)
        with shown as live:
            while True:
                await asyncio.sleep(arguments.interval)
                try:
                    now = await scrape(client)
                except ServerError as error:  # the server may come back
                    if live is None:
                        terminal.note(str(error), "red")
                    else:
                        live.update(f"{error}; trying again", refresh=True)
                    continue
                found = view(before, now)
                before = now
                speeds.append(found["generation_tokens_per_second"])
                if live is None:
                    print(", ".join(f"{name} {text}" for name, text in _figures(found)), flush=True)
                else:
                    live.update(_picture(found, arguments.url, speeds), refresh=True)


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """The view as text, a line for each figure."""
    return [f"{name:<20}{text}" for name, text in _figures(found)]


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and formatted values of the figures on the screen."""
    hit_rate, drafts = found["prefix_cache_hit_rate"], found["drafts"]
    rows = [
        ("model", ", ".join(found["models"])),
        ("running", f"{found['num_requests_running']:.0f} requests"),
        ("waiting", f"{found['num_requests_waiting']:.0f} requests"),
        ("compiling", _compiling(found)),
        ("stalled", _stalled(found)),
        ("KV cache", f"{found['kv_cache_usage']:.1%}"),
        ("prefix cache hits", "–" if hit_rate is None else f"{hit_rate:.1%}"),
        ("prompt", f"{found['prompt_tokens_per_second']:.1f} tokens/s"),
        ("generation", f"{found['generation_tokens_per_second']:.1f} tokens/s"),
        ("drafts", "" if drafts is None else _drafts(drafts)),
        ("encoder", _encoder(found["encoder"])),
        ("preemptions", f"{found['preemptions']:.0f}" if found["preemptions"] else ""),
    ]
    for name, percentiles in found["latency_ms"].items():
        text = "–" if percentiles is None else "  ".join(f"{key} {_ms(value)}" for key, value in percentiles.items())
        rows.append((LATENCY_NAMES[name], text))
    rows += [("ended", _counts(found["finished"])), ("HTTP", _counts(found["http"]))]
    return [(name, text) for name, text in rows if text]


def _picture(found: Mapping[str, Any], url: str, speeds: "deque[float]") -> "RenderableType":
    from rich.panel import Panel
    from rich.text import Text

    from jaxllm.http_client.scrape import sparkline

    text = Text("\n".join([*as_lines(found), "", "generated tokens/s:", sparkline(speeds)]))
    return Panel(text, title=f"{url}  {time.strftime('%H:%M:%S')}", subtitle="Ctrl-C leaves")


def _compiling(found: Mapping[str, Any]) -> str:
    programs = found["compiling"]
    return f"program {programs['ready'] + 1:.0f} of {programs['total']:.0f}; requests wait for it" if programs else ""


def _stalled(found: Mapping[str, Any]) -> str:
    return f"{found['stalled_engines']:.0f} engines seem to hang" if found["stalled_engines"] else ""


def _drafts(report: Mapping[str, Any]) -> str:
    if not report["spec_decode_num_drafts"]:
        return "–"
    rate, length = report["spec_decode_acceptance_rate"], report["spec_decode_acceptance_length"]
    return f"{rate:.1f}% accepted, {length:.2f} tokens a step of a request"


def _encoder(report: Mapping[str, float] | None) -> str:
    if report is None:
        return ""
    padding = 1 - report["patches"] / report["computed_patches"]
    return f"{report['patches']:.0f} patches of images, {padding:.0%} of what it computed was padding"


def _counts(found: Mapping[str, Mapping[str, float]]) -> str:
    shown = [f"{label} {count['total']:.0f} (+{count['new']:.0f})" for label, count in found.items() if count["total"]]
    return ", ".join(shown) or "–"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"
