"""Runs programs on empty steps: the first runs of a program take longer than all later ones."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxllm.runner.layout import StepLayout
from jaxllm.runner.step_programs import ProgramKey
from jaxllm.sampling.variants import Variant

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
    shapes, workspace = runner.shapes, runner.workspace
    for key in keys:
        program = runner.programs.get(key)
        if key.kind in ("forward", "forward_rows", "decode"):
            layout = shapes.layout(key)
            runner.run_step(program, layout, runner.batches.empty(layout), _nothing_enters(runner, layout))
        if key.kind == "sample" and key.variant < Variant.MASKED:
            hidden_NWD, columns_NC = runner.put(shapes.nothing_to_sample())
            runner.row_arrays, *_ = program(
                runner.params, runner.row_arrays, hidden_NWD, columns_NC, None, None, None, workspace
            )
        if key.kind == "propose":
            runner.caches, runner.row_arrays = program(
                runner.params, runner.caches, runner.row_arrays, *runner.put(shapes.nothing_to_propose(key)), workspace
            )
        for feature in {*runner.op_features.values()}:
            if feature.program == key.kind:
                feature.run_on_nothing(key)
    jax.block_until_ready((runner.row_arrays, runner.caches))


def _nothing_enters(runner: "ModelRunner", layout: StepLayout) -> tuple[jax.Array, ...]:
    """Hidden states of a step without requests, where such enter from an earlier stage of a pipeline."""
    return runner.put(tuple(np.zeros(x.shape, x.dtype) for x in runner.shapes.entering(layout)))  # type: ignore[no-any-return]
