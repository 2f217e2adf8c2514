"""Decodes with logprobs, penalties or masks: whether a decode-shaped forward pass computes them, or a mixed step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.programs.key import ProgramKey


@contextmanager
def sampling_apart(core: Any, is_apart: bool = True) -> Iterator[set[int]]:
    """Have every such decode of an engine take one of the two ways. Yields the numbers of rows of those sampled apart.

    An engine chooses by which programs are ready; here a missing one is waited for.
    """
    runner = getattr(core.runner, "last", core.runner)  # of stages, the one that samples
    (batches,), programs, sizes = runner.batches.builders, runner.programs, set[int]()
    buckets = batches.buckets

    def make(key: ProgramKey) -> bool:
        if key.kind == "forward_rows":
            programs.get(key)
            sizes.add(key.size)
        return True

    rows_apart = (buckets.rows_apart or buckets.decode_rows) if is_apart else ()
    before = batches.choice
    batches.choice = ProgramChoice(replace(buckets, rows_apart=rows_apart), is_there=make)
    try:
        yield sizes
    finally:
        batches.choice = before
