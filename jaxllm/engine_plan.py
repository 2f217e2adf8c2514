"""Plans an engine: resolves all options and computes the memory plan, without loading weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxllm.cache_spec import CacheLayout
from jaxllm.config import EngineConfig
from jaxllm.encoder_sizes import most_patches
from jaxllm.engine.features import check_own_store, check_speculative_config
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.engine.stage_plans import lay_out
from jaxllm.errors import JaxLLMError
from jaxllm.layers.build import num_parameters, weight_bytes
from jaxllm.loaders.formats import has_checkpoint
from jaxllm.loaders.load import check_weights
from jaxllm.media import load_processor
from jaxllm.model_config import ModelConfig
from jaxllm.options.kv_transfer import check_policies
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.request_processor import load_texts
from jaxllm.runner import memory
from jaxllm.runner.features import host_plan
from jaxllm.runner.host_plan import HostPlan
from jaxllm.runner.stage import tightest
from jaxllm.sampling.processors import load_processors
from jaxllm.text.model_files import text_files

if TYPE_CHECKING:
    from jaxllm.media.audio import AudioProcessor
    from jaxllm.media.processor import MediaProcessor

IMAGE_SIZES = ((640, 480), (1920, 1080), (4000, 3000))
"""Width and height in pixels of the images whose token counts `EnginePlan.described` tells."""


@dataclass(frozen=True)
class EnginePlan:
    """An engine before its weights are loaded."""

    config: EngineConfig
    """Without "auto", except where it depends on the weights."""
    model_config: ModelConfig
    memory: memory.MemoryPlan
    media: "MediaProcessor | AudioProcessor | None" = None
    """Preprocessor of images or audio; None: the model takes text alone, or its files have a fault."""
    faults: tuple[JaxLLMError, ...] = ()
    """Reasons why this machine could not start it, apart from memory."""
    host: HostPlan | None = None
    """Blocks in host memory; None: there are none."""

    @property
    def cache(self) -> CacheLayout:
        """Layout of all layers; `memory` has those of one stage."""
        return memory.whole_cache(self.config, self.model_config)

    @property
    def fault(self) -> JaxLLMError | None:
        """Why the plan does not fit or could not start on this machine."""
        try:
            self.memory.check()
        except JaxLLMError as error:
            return error
        return next(iter(self.faults), None)

    def described(self) -> dict[str, Any]:
        """The model's own numbers as JSON values, then its memory use over all devices."""
        cache, longest = self.cache, self.memory.max_model_len
        per_token = cache.block_bytes // cache.block_size
        groups = [
            {
                "keeps": str(group.policy),
                "layers": list(group.layers),
                "bytes_per_token": per_token,
                "bytes_per_longest_request": cache.block_bytes
                * group.policy.num_blocks_for(longest, cache.block_size, cache.max_step_tokens),
            }
            for group in cache.groups
        ]
        if by_row := [layer for layer, place in enumerate(cache.places) if place.group is None]:
            sizes = {"bytes_per_token": 0, "bytes_per_longest_request": cache.row_bytes}
            if self.config.cache.enable_prefix_caching:
                sizes["blocks_per_cached_prefix"] = cache.state_blocks
            groups.append({"keeps": "a state by row", "layers": by_row, **sizes})
        described = self.model_config.described()
        del described["vision"]
        return {
            "model": self.config.model.model,
            **described,
            "images": self._images(),
            "num_parameters": num_parameters(self.model_config),
            "weight_bytes": weight_bytes(self.model_config),
            "kv_cache_bytes_per_token": len(cache.groups) * cache.block_bytes // cache.block_size,
            "cache_groups": groups,
            "longest_request_tokens": longest,
            "longest_request_bytes": sum(group["bytes_per_longest_request"] for group in groups),
        }

    def describe_memory(self) -> str:
        """Format the memory of devices and host as a few lines for the log."""
        return "\n".join(plan.describe() for plan in (self.memory, self.host) if plan is not None)

    def _images(self) -> dict[str, Any] | None:
        """How the model sees images, and how many tokens some sizes have; None: it takes text alone."""
        vision, media = self.model_config.vision, self.media
        if vision is None:
            return None
        from jaxllm.media.processor import MediaProcessor  # imports Pillow

        return {
            "family": vision.family,
            "encoder_layers": vision.num_layers,
            "encoder_width": vision.hidden_size,
            "patch_size": vision.patch_size,
            "patches_of_a_token": vision.merge_size**2,
            "max_patches": most_patches(vision, self.config.multimodal.mm_max_patches),
            "tokens": {}
            if not isinstance(media, MediaProcessor)
            else {f"{w}x{h}": media.count_tokens(w, h) for w, h in IMAGE_SIZES},
        }


def plan_engine(asked: EngineConfig, *, device_bytes: int | None = None) -> EnginePlan:
    """Resolve the model and all options, and compute the memory plan, even with fewer devices than it needs.

    device_bytes: plan for GPUs with this much memory instead of this machine's devices.
    """
    model, topology = asked.model, Topology.of(asked.parallel)
    load_processors(model.logits_processors or ())
    check_speculative_config(asked)
    check_own_store(asked)
    check_policies(asked.kv_transfer)
    faults: list[JaxLLMError] = []
    if device_bytes is None:
        memory.reserve_device_memory(asked.cache.gpu_memory_utilization, topology)
        _note(faults, lambda: memory.check_free_memory(topology))
    directory = text_files(model.model, revision=model.revision, download_dir=model.download_dir)
    usable_bytes = None if device_bytes is None else memory.usable_bytes(asked, device_bytes)
    config, model_config = resolve_sizes(asked, directory, device_bytes=usable_bytes)
    if device_bytes is None:
        _note(faults, lambda: meshes_of(topology))
    if has_checkpoint(directory):  # else it may be no more than a config.json to plan for
        _note(faults, lambda: load_texts(config))
        _note(faults, lambda: check_weights(model_config, directory, load_format=config.model.load_format))
    media: list[MediaProcessor | AudioProcessor | None] = [None]
    _note(faults, lambda: media.append(load_processor(directory, model_config, config.multimodal)))
    stages = lay_out(config, model_config, partial(memory.memory_plan, config, model_config, device_bytes=device_bytes))
    plan = tightest(stages)
    host = host_plan(config, model_config, plan)
    if host is not None and host.fault is not None and device_bytes is None:
        faults.append(host.fault)
    return EnginePlan(config, model_config, plan, media[-1], tuple(faults), host)


def _note(faults: list[JaxLLMError], check: Callable[[], object]) -> None:
    try:
        check()
    except JaxLLMError as error:
        faults.append(error)
