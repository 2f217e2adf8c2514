"""Starts what computes an engine's steps: prepares the model, then loads weights and compiles programs at the same time."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from jaxllm.config import EngineConfig
from jaxllm.device_errors import is_out_of_memory
from jaxllm.engine.executor import Executor
from jaxllm.engine.failures import explain
from jaxllm.engine.features import Hosts, open_hosts
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import JaxLLMError, OutOfMemoryError
from jaxllm.hub import resolve_model, weight_files
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.log import logger
from jaxllm.progress import Progress
from jaxllm.sampling.processors import Processor
from jaxllm.start_times import StartTimes
from jaxllm.text.model_files import text_files


@dataclass(frozen=True)
class Started:
    """An engine without scheduler, ready to run steps."""

    prepared: Prepared
    model_dir: Path
    hosts: Hosts | None = None
    """The other hosts of the engine, if there are any."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        processors: tuple[Processor, ...],
        progress: Progress,
        times: StartTimes,
        policy: KernelPolicy | None = None,
    ) -> "Started":
        """policy: None for the platform's. Raises ConfigError, ModelLoadError, KernelCheckError or OutOfMemoryError.

        With several hosts each of them runs it; an error on one is raised, or ends the process, on all.
        """
        model = config.model
        model_dir = text_files(model.model, revision=model.revision, download_dir=model.download_dir)
        began = time.perf_counter()
        hosts = open_hosts(config, model_dir)
        if hosts is None:
            return cls._of(config, model_dir, processors, progress, times, policy)
        times.add("other hosts", time.perf_counter() - began)
        with hosts.reported():
            started = cls._of(hosts.config, model_dir, processors, progress, times, policy, hosts)
            hosts.agree("started", {})
        hosts.started()
        return started

    @classmethod
    def _of(
        cls,
        config: EngineConfig,
        model_dir: Path,
        processors: tuple[Processor, ...],
        progress: Progress,
        times: StartTimes,
        policy: KernelPolicy | None,
        hosts: Hosts | None = None,
    ) -> "Started":
        model = config.model
        with _explained_out_of_memory():
            prepared = Prepared.of(config, model_dir, processors, times, starts=hosts is None, policy=policy)
            if hosts is not None:
                prepared = _agreed(prepared, hosts, model_dir, processors, times)
        warmup = prepared.config.compile.warmup
        eager, rare_later = warmup in ("all", "background"), warmup == "background"
        logger.info("%s", prepared.describe())
        try:
            if eager:
                prepared.runner.start_programs(rare_later=rare_later)
            prepared.runner.begin_ops()
            if model.load_format != "dummy":
                # Download the weights only after the memory plan shows that they fit, and while programs are compiled.
                model_dir = resolve_model(model.model, model.revision, model.download_dir)
            if hosts is not None:
                hosts.agree("model files", {"the model's weights": weight_files(model_dir)})
            with _explained_out_of_memory():
                prepared.runner.load_weights(model_dir, progress)
                if eager:
                    with times.part("waiting for programs"):
                        prepared = prepared.settled(rare_later=rare_later)
                        prepared.runner.wait_for_programs(progress, rare=warmup == "all")
                if hosts is not None:
                    hosts.agree("loaded", {})  # from here on devices wait for each other
                prepared.runner.allocate_caches()
                if eager:
                    prepared.runner.warm_up()
                elif warmup == "idle":
                    prepared.runner.start_programs_when_idle()
        except BaseException:
            # The error keeps this call's variables alive, but its handler may start a smaller engine in the same memory pool.
            prepared.runner.close()
            raise
        return cls(prepared, model_dir, hosts)

    @property
    def executor(self) -> Executor:
        """The executor of the engine's steps: of all hosts on host 0, of this host's devices elsewhere."""
        return self.prepared.runner if self.hosts is None else self.hosts.executor(self.prepared.runner)


def _agreed(
    prepared: Prepared, hosts: Hosts, model_dir: Path, processors: tuple[Processor, ...], times: StartTimes
) -> Prepared:
    """This, or with a smaller cache if another host has less memory. Raises ConfigError if the hosts differ in anything else."""
    fingerprint = prepared.fingerprint()
    num_blocks = fingerprint.pop("num_gpu_blocks")
    fingerprint.pop("processor", None)
    hosts.agree("prepared", {name: json.dumps(value) for name, value in fingerprint.items()})
    smallest = min(facts["num_gpu_blocks"] for facts in hosts.exchange("cache", {"num_gpu_blocks": num_blocks}))
    config = prepared.config.replace(num_gpu_blocks_override=smallest)  # never smaller, whatever programs turn out to need
    if smallest == num_blocks:
        return replace(prepared, config=config)
    prepared.runner.close()
    return Prepared.of(config, model_dir, processors, times, policy=prepared.policy)


class _explained_out_of_memory:
    """Converts the device's out-of-memory errors to OutOfMemoryError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, JaxLLMError) and is_out_of_memory(error):
            raise OutOfMemoryError(explain(error)) from error
