"""Compiles an engine's programs ahead of time, without weights, into a directory that engines of the same options start from."""

from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import ConfigError
from jaxllm.log import logger
from jaxllm.progress import Progress
from jaxllm.runner.program_store import new_artifact, write_manifest
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.runner import ModelRunner
from jaxllm.start_times import StartTimes


@dataclass(frozen=True)
class Compiled:
    """The result of compiling an artifact."""

    num_programs: int
    num_bytes: int
    times: StartTimes


def compile_artifact(config: EngineConfig, model_dir: Path, output: Path, progress: Progress) -> Compiled:
    """Write the programs of an engine to `output`, a new directory. Reads only config.json of the model.

    Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {config.parallel.pipeline_parallel_size}, but an artifact has the programs of one stage; leave it "
            "out: an engine with stages keeps its programs on this machine by itself"
        )
    if config.parallel.num_ranks > 1:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.num_ranks} and enable_expert_parallel is set, but an artifact has the programs of "
            "one data-parallel rank; leave one of them out: an engine with several keeps its programs on this machine by itself"
        )
    times = StartTimes()
    if config.model.logits_processors:
        logger.info("programs with logits processors are no part of an artifact: the engine compiles them at its start")
    prepared = Prepared.of(config.replace(compiled_artifact=None), model_dir, (), times)
    prepared.fingerprint()  # raises before compiling if there can be none
    artifact = new_artifact(output, list(prepared.mesh.devices.flat))
    try:
        prepared.runner.start_programs(rare_later=False)
        prepared = prepared.settled(rare_later=False)
        runner = prepared.runner
        assert isinstance(runner, ModelRunner), "an artifact of one stage"
        runner.wait_for_programs(progress, rare=True)
        programs, cached = runner.programs, runner.store
        keys = [*runner.shapes.all_keys(), ProgramKey("new_caches")]
        for key in keys:
            # Some backends cannot serialize a program that was itself read from a cache.
            if cached is None or not artifact.copy(cached, key):
                artifact.save(key, programs.get(key))
            artifact.load(key)  # verify that it can be read before shipping it
        write_manifest(output, prepared.fingerprint())
    finally:
        prepared.runner.close()
    return Compiled(len(keys), sum(path.stat().st_size for path in output.iterdir()), times)
