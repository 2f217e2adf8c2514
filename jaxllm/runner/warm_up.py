"""Runs programs on empty steps: the first runs of a program take longer than all later ones."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax

from jaxllm.runner.programs.key import ProgramKey

if TYPE_CHECKING:
    from jaxllm.runner.runner import ModelRunner

WARM_UP_RUNS = 2
"""The first run of a program loads it on the device; the second records its CUDA graphs, which all later ones launch."""


def run_common(runner: "ModelRunner", keys: Sequence[ProgramKey]) -> None:
    """Run common programs as often as their first runs differ from later ones."""
    peers = runner.peers
    if peers is None:
        for number in range(1, WARM_UP_RUNS + 1):
            with runner.times.part(f"warm-up run {number}"):
                run_on_nothing(runner, keys)
    else:
        with runner.times.part("warm-up runs"):
            peers.first_runs(partial(run_on_nothing, runner, keys))
        peers.note(key for key in keys if runner.shapes.uses_peers(key))


def run_on_nothing(runner: "ModelRunner", keys: Sequence[ProgramKey]) -> None:
    """Run programs on empty steps, which write nothing but trash, and wait until they are done."""
    for key in keys:
        runner.shapes.kind_of(key).run_on_nothing(runner, key, runner.programs.get(key))
    jax.block_until_ready((runner.row_arrays, runner.caches))
