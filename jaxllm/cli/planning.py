"""Plans an engine: resolves all options and computes the memory plan, without loading weights (`--dry-run`, `inspect`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli.terminal import size
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError

if TYPE_CHECKING:
    from jaxllm.cache_spec import CacheLayout
    from jaxllm.model_config import ModelConfig
    from jaxllm.runner.memory import MemoryPlan


@dataclass(frozen=True)
class Plan:
    """An engine's plan before its weights are loaded."""

    config: EngineConfig
    """Without "auto", except where it depends on the weights."""
    model_config: "ModelConfig"
    memory: "MemoryPlan"
    host_bytes: int
    """Peak host memory in bytes while weights are loaded onto GPUs, without the system's file cache."""
    faults: tuple[JaxLLMError, ...] = ()
    """Reasons why this machine could not start it, apart from memory."""

    @property
    def cache(self) -> "CacheLayout":
        """Layout of all layers; `memory` has those of one stage."""
        from jaxllm.runner.memory import whole_cache

        return whole_cache(self.config, self.model_config)

    def describe(self) -> str:
        """The memory plan, including the host's, in a few readable lines."""
        return f"{self.memory.describe()}\n  host      {size(self.host_bytes)} at most while weights are loaded onto GPUs"

    def check(self) -> None:
        """Raise an error if the plan does not fit or could not start on this machine."""
        self.memory.check()
        for fault in self.faults:
            raise fault


def plan(options: Mapping[str, Any], *, device_bytes: int | None = None) -> Plan:
    """Resolve the model and all options, and compute the memory plan, even with fewer devices than it needs.

    device_bytes: plan for GPUs with this much memory instead of this machine's devices.
    """
    from jaxllm.engine import prepare
    from jaxllm.engine.features import check_speculative_config
    from jaxllm.engine_front import load_texts
    from jaxllm.loaders.formats import has_checkpoint
    from jaxllm.loaders.load import check_weights, loading_bytes
    from jaxllm.parallel.mesh import meshes_of
    from jaxllm.parallel.topology import Topology
    from jaxllm.runner import memory
    from jaxllm.runner.stage import tightest
    from jaxllm.sampling.processors import load_processors

    asked = EngineConfig.from_options(**options)
    topology = Topology.of(asked.parallel)
    load_processors(asked.model.logits_processors or ())
    check_speculative_config(asked)
    faults: list[JaxLLMError] = []
    if device_bytes is None:
        memory.reserve_device_memory(asked.cache.gpu_memory_utilization, topology)
        _note(faults, lambda: memory.check_free_memory(topology))
    directory = model_directory(asked)
    usable_bytes = None if device_bytes is None else memory.usable_bytes(asked, device_bytes)
    config, model_config = prepare.resolve_sizes(asked, directory, device_bytes=usable_bytes)
    if device_bytes is None:
        _note(faults, lambda: meshes_of(topology))
    if has_checkpoint(directory):  # else it may be no more than a config.json to plan for
        _note(faults, lambda: load_texts(config))
        _note(faults, lambda: check_weights(model_config, directory, load_format=config.model.load_format))
    stages = prepare.lay_out(config, model_config, partial(memory.memory_plan, config, model_config, device_bytes=device_bytes))
    host_bytes = max(loading_bytes(model_config, stage.model, topology.tensor) for stage in stages)
    return Plan(config, model_config, tightest(stages), host_bytes, tuple(faults))


def _note(faults: list[JaxLLMError], check: Callable[[], object]) -> None:
    try:
        check()
    except JaxLLMError as error:
        faults.append(error)


def model_directory(config: EngineConfig) -> Path:
    """The directory of the model's small files, downloaded if needed; weights are not downloaded."""
    from jaxllm.text.model_files import text_files

    options = config.model
    return text_files(options.model, revision=options.revision, download_dir=options.download_dir)


def dry_run(options: Mapping[str, Any]) -> int:
    """Print the plan. Returns the exit code."""
    if options.get("chat_template") is not None:
        from jaxllm.text.chat_template import load_chat_template  # imports Jinja

        load_chat_template(options["chat_template"])
    planned = plan(options)
    print(f"model: {planned.config.model.model} ({planned.model_config.architecture}, {planned.model_config.dtype})")
    defaults = EngineConfig().flat()
    for name, value in planned.config.flat().items():
        if value != defaults[name]:
            print(f"{name}: {value}")
    print(planned.describe())
    planned.check()
    return 0
