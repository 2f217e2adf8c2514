"""What an engine would be: everything resolved and the memory planned, without loading weights (`--dry-run`, `inspect`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig, unknown_name
from jaxllm.errors import ModelLoadError

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig
    from jaxllm.runner.memory import MemoryPlan


@dataclass(frozen=True)
class Plan:
    """An engine before its weights."""

    config: EngineConfig
    """Without any "auto" that does not depend on the weights."""
    model_config: "ModelConfig"
    memory: "MemoryPlan"


def plan(options: Mapping[str, Any]) -> Plan:
    """Resolve the model and all options, and compute the memory plan."""
    from jaxllm.engine.prepare import resolve as resolve_for_model
    from jaxllm.runner.memory import memory_plan, reserve_device_memory

    asked = EngineConfig.from_options(**options)
    reserve_device_memory(asked.cache.gpu_memory_utilization, tensor_parallel_size=asked.parallel.tensor_parallel_size)
    directory = model_directory(asked)
    config, model_config, _ = resolve_for_model(asked, directory)
    return Plan(config, model_config, memory_plan(config, model_config))


def model_directory(config: EngineConfig, *, files: Sequence[str] | None = None) -> Path:
    """Where the model is, downloaded if need be (`files`: patterns of what is needed; default: all of it)."""
    from jaxllm import hub

    options = config.model
    try:
        return hub.resolve_model(options.model, options.revision, options.download_dir, files=files or hub.FILES)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{meant_model(options.model, error)}") from error


def dry_run(options: Mapping[str, Any]) -> int:
    """Print what the engine would be. Returns the exit code."""
    planned = plan(options)
    print(f"model: {planned.config.model.model} ({planned.model_config.architecture}, {planned.model_config.dtype})")
    defaults = EngineConfig().flat()
    for name, value in planned.config.flat().items():
        if value != defaults[name]:
            print(f"{name}: {value}")
    print(planned.memory.describe())
    planned.memory.check()
    return 0


def cached_models(download_dir: str | None = None) -> list[Any]:
    """The models in the hub's cache on this machine, as huggingface_hub's CachedRepoInfo, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(download_dir)
    except (CacheNotFound, ValueError):
        return []
    return sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def meant_model(name: str, error: Exception) -> str:
    """`; did you mean 'demo'?`, unless the error says so already or nothing here is called like that."""
    if "did you mean" in str(error):
        return ""
    _, separator, rest = unknown_name("model", name, ["demo", *(repo.repo_id for repo in cached_models())]).partition("; did")
    return separator + rest
