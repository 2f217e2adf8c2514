"""`encode_clip`: the program that turns features of a clip into what the decoder's layers keep of it in a row."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxllm.model_parts import Audio
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.features.audio.step import Hearing
    from jaxllm.runner.step_programs import StepPrograms


class EncodeClip(ProgramKind):
    """See `Hearing.encode`. With data-parallel ranks, a rank without a clip encodes silence meanwhile and writes nothing."""

    name = "encode_clip"
    only = "common"

    def __init__(self, hearing: "Hearing"):
        self.hearing = hearing

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        audio, first = self.hearing.audio, len(programs.cache.arrays)
        features = programs.shape((audio.num_frames, audio.num_bins), jnp.float32)
        arguments = (programs.params, programs.caches[first:], features, programs.ints(1))
        return programs.lower_on_each(self.hearing.encode, arguments, programs.cache_shardings[first:], donate=(1,))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        run(runner, program, map(runner.ranks.repeated, nothing(runner, self.hearing.audio)))


def nothing(runner: Any, audio: Audio) -> tuple[np.ndarray, np.ndarray]:
    """Silence, and a row behind the last."""
    return np.zeros((audio.num_frames, audio.num_bins), np.float32), np.array([runner.buckets.num_rows], np.int32)


def run(runner: Any, program: CompiledProgram, arrays: Iterable[Any]) -> None:
    """Start to encode a clip of each rank."""
    first = len(runner.shapes.cache.arrays)
    states = program(runner.params, runner.caches[first:], *runner.put(tuple(arrays)))
    runner.caches = (*runner.caches[:first], *states)
