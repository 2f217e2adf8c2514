"""Decodes with logprobs, penalties or masks: whether a decode-shaped forward pass computes them, or a mixed step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxllm.runner.step_programs import ProgramKey


@contextmanager
def sampling_apart(core: Any, is_apart: bool = True) -> Iterator[set[int]]:
    """Have every such decode of an engine take one of the two ways. Yields the numbers of rows of those sampled apart.

    An engine chooses by which programs are ready; here a missing one is waited for.
    """
    runner = getattr(core.runner, "last", core.runner)  # of stages, the one that samples
    batches, programs, sizes = runner.batches, runner.programs, set[int]()

    def make(num_rows: int, adapted: bool) -> bool:
        programs.get(ProgramKey("forward_rows", num_rows, adapted=adapted))
        sizes.add(num_rows)
        return True

    before = batches.may_sample_apart, batches.buckets
    batches.may_sample_apart = make if is_apart else lambda num_rows, adapted: False
    batches.buckets = replace(batches.buckets, rows_apart=batches.buckets.rows_apart or batches.buckets.decode_rows)
    try:
        yield sizes
    finally:
        batches.may_sample_apart, batches.buckets = before
