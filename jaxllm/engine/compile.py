"""Compiles an engine's programs ahead of time, without weights, into a directory that engines of the same options start from."""

from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.prepare import Prepared
from jaxllm.log import logger
from jaxllm.progress import Progress
from jaxllm.runner.program_store import new_artifact, write_manifest
from jaxllm.runner.step_programs import ProgramKey
from jaxllm.start_times import StartTimes


@dataclass(frozen=True)
class Compiled:
    """What was written."""

    num_programs: int
    num_bytes: int
    times: StartTimes


def compile_artifact(config: EngineConfig, model_dir: Path, output: Path, progress: Progress) -> Compiled:
    """Write the programs of an engine to `output`, a new directory. Of the model, config.json is all that is read.

    Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """
    times = StartTimes()
    if config.model.logits_processors:
        logger.info("programs with logits processors are no part of an artifact: the engine compiles them at its start")
    prepared = Prepared.of(config.replace(compiled_artifact=None), model_dir, (), times)
    prepared.fingerprint()  # what cannot have one is refused before it is compiled
    artifact = new_artifact(output, list(prepared.mesh.devices.flat))
    try:
        prepared.runner.start_programs(rare_later=False)
        prepared = prepared.settled(rare_later=False)
        prepared.runner.wait_for_programs(progress, rare=True)
        programs, cached = prepared.runner.programs, prepared.runner.store
        keys = [*prepared.runner.shapes.all_keys(), ProgramKey("new_caches")]
        for key in keys:
            # What was itself read from a cache cannot be serialized again on every backend.
            if cached is None or not artifact.copy(cached, key):
                artifact.save(key, programs.get(key))
            artifact.load(key)  # what cannot be read must not be shipped
        write_manifest(output, prepared.fingerprint())
    finally:
        prepared.runner.delete_arrays()
    return Compiled(len(keys), sum(path.stat().st_size for path in output.iterdir()), times)
