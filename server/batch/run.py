"""Runs a batch: a limited number of requests at a time; writes each answer once all before it are written."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from server.batch.in_process import post
from server.batch.lines import BatchLine, answer, refusal
from server.batch.output_file import BatchOutput, Key

RETRY_SECONDS = 1.0
"""Seconds before a request that the engine rejected for lack of capacity is retried."""


@dataclass
class BatchResult:
    """The outcome of a batch."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    """Number of requests answered by an earlier run."""


class EngineStopped(Exception):
    """Raised when the engine cannot serve the rest of the batch."""


async def run_batch(
    app: ASGIApp,
    lines: Iterable[BatchLine],
    output: BatchOutput,
    *,
    max_in_flight: int,
    is_alive: Callable[[], bool],
    on_done: Callable[[], None] = lambda: None,
) -> BatchResult:
    """Answer every line that is not in the output yet. Raises EngineStopped if the engine dies.

    Keeps all answers received so far when it is cancelled or fails. Calls `on_done` for each line.
    """
    result = BatchResult()
    window: deque[tuple[BatchLine, asyncio.Task[dict[str, Any]]]] = deque()
    keys: list[Key] = []

    def keep(line: BatchLine, record: dict[str, Any], *, is_in_order: bool = True) -> None:
        output.write(_key(line), record, is_in_order=is_in_order)
        is_failed = record["response"] is None or record["response"]["status_code"] != 200
        result.num_failed += is_failed
        result.num_answered += not is_failed
        on_done()

    try:
        for line in lines:
            keys.append(_key(line))
            if keys[-1] in output:
                result.num_skipped += 1
                on_done()
                continue
            while len(window) >= max_in_flight:
                await _next(window, keep)
            window.append((line, asyncio.create_task(_answered(app, line, is_alive))))
        while window:
            await _next(window, keep)
    except BaseException:
        try:
            await _keep_finished(window, keep)
        finally:
            output.close()
        raise
    output.finish(keys)
    return result


def _key(line: BatchLine) -> Key:
    return line.number if line.custom_id is None or line.fault is not None else line.custom_id


async def _next(window: deque[tuple[BatchLine, asyncio.Task[dict[str, Any]]]], keep: Callable[..., None]) -> None:
    """Wait for the oldest request and write its answer."""
    line, task = window[0]
    await asyncio.wait([task])
    record = task.result()
    window.popleft()
    keep(line, record)


async def _keep_finished(window: deque[tuple[BatchLine, asyncio.Task[dict[str, Any]]]], keep: Callable[..., None]) -> None:
    """Write the finished answers, even where earlier ones are missing, and cancel the rest."""
    for line, task in window:
        if task.done() and not task.cancelled() and task.exception() is None:
            keep(line, task.result(), is_in_order=False)
        task.cancel()
    await asyncio.gather(*(task for _, task in window), return_exceptions=True)


async def _answered(app: ASGIApp, line: BatchLine, is_alive: Callable[[], bool]) -> dict[str, Any]:
    if line.fault is not None:
        return refusal(line)
    body = json.dumps(line.body).encode()
    while True:
        reply = await post(app, line.url, body)
        if reply.status == 503:
            if not is_alive():
                raise EngineStopped("the engine cannot serve any more")
            await asyncio.sleep(RETRY_SECONDS)
            continue
        return answer(line, reply.status, json.loads(reply.body), reply.headers.get("x-request-id"))
