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
from jaxllm.http_client import view_text

if TYPE_CHECKING:
    from rich.console import RenderableType

ABOUT = "A live view of a running server (jaxllm or vLLM): load, speed and latencies. Ctrl-C leaves."
EXAMPLES = """examples:
  jaxllm top                                       http://127.0.0.1:8000
  jaxllm top --url http://host:8000 --interval 5
  jaxllm top --once --json                         one reading, for scripts"""

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
        print(json.dumps(found) if arguments.json else "\n".join(view_text.as_lines(found)))
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
                    print(", ".join(f"{name} {text}" for name, text in view_text.figures(found)), flush=True)
                else:
                    live.update(_picture(found, arguments.url, speeds), refresh=True)


def _picture(found: Mapping[str, Any], url: str, speeds: "deque[float]") -> "RenderableType":
    from rich.panel import Panel
    from rich.text import Text

    text = Text("\n".join([*view_text.as_lines(found), "", "generated tokens/s:", view_text.sparkline(speeds)]))
    return Panel(text, title=f"{url}  {time.strftime('%H:%M:%S')}", subtitle="Ctrl-C leaves")
