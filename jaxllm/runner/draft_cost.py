"""Measures how much longer a step takes with drafts than without."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.runner.layout import Column
from jaxllm.runner.step_programs import ProgramKey, StepPrograms

_RUNS = 3
_MOST_SECONDS = 2.0
"""After so long, larger steps are not measured any more."""


def measure_costs(programs: StepPrograms, trash: int, run: Callable[[ProgramKey, np.ndarray], Any]) -> dict[int, float]:
    """By number of rows: the time of a decode with the most drafts over that of one without. Greedy, of short requests.

    run: starts a decode program with a buffer; it returns arrays to wait for. trash: the row that nothing reads.
    """
    until = time.perf_counter() + _MOST_SECONDS
    found: dict[int, float] = {}
    for num_rows in programs.buckets.decode_rows:
        widths = programs.buckets.widths_of(num_rows)
        if len(widths) == 1 or time.perf_counter() > until:
            break
        seconds = [_seconds(programs, trash, run, ProgramKey("decode", num_rows, width=width)) for width in (1, widths[-1])]
        found[num_rows] = seconds[1] / seconds[0]
    return found


def _seconds(programs: StepPrograms, trash: int, run: Callable[[ProgramKey, np.ndarray], Any], key: ProgramKey) -> float:
    """Of the fastest run."""
    layout = programs.layout(key)
    buffer = np.zeros(layout.size, np.int32)
    views = layout.views(buffer)
    columns = views.columns_RC
    columns[:, [Column.ROW, Column.TOKEN_ROW]] = trash
    columns[:, Column.NUM_TOKENS] = key.width
    columns[:, Column.NUM_DRAFTS] = key.width - 1
    columns[:, Column.WRITE_FROM] = np.iinfo(np.int32).max  # nothing is written
    views.token_ids_T[:] = np.arange(key.size) % programs.model.vocab_size
    views.update_index_U[:] = np.iinfo(np.int32).max
    return min(_timed(partial(run, key, buffer)) for _ in range(_RUNS))


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
