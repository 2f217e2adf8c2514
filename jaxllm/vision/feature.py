"""Images in prompts as the options of an engine ask for them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.config import EngineConfig, ParallelOptions
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts.vision import Vision
from jaxllm.options.hosts import MAX_PLAN_BYTES
from jaxllm.scheduler.encoder_cache import EncoderCache


@dataclass(frozen=True)
class Images:
    """See `jaxllm.engine.features.Items`."""

    sizes: EncoderSizes
    kinds: tuple[str, ...]
    whole_tokens: int
    """Tokens of the largest image, where a step computes an image whole; 0: steps may cut images."""
    in_steps = ("images", "rope_delta")

    @property
    def described(self) -> Mapping[str, Any]:
        """See Items."""
        return asdict(self.sizes)

    def new_room(self) -> EncoderCache:
        """See Items."""
        return EncoderCache(self.sizes, whole_tokens=self.whole_tokens, kinds=self.kinds)


def make_items(config: EngineConfig, model_config: ModelConfig) -> Images | None:
    """For a model that sees images, as it does not with language_model_only. Raises ConfigError for options that exclude images."""
    vision = model_config.vision
    if vision is None:
        return None
    _check_parallel(config.parallel, model_config.architecture)
    sizes = EncoderSizes.of(vision, config.multimodal.mm_max_patches, config.multimodal.mm_max_decode_step_patches)
    _check_plans(config, vision, sizes)
    return Images(sizes, vision.item_kinds, _whole_tokens(config, model_config, vision, sizes))


def _whole_tokens(config: EngineConfig, model_config: ModelConfig, vision: Vision, sizes: EncoderSizes) -> int:
    """See Images. Raises ConfigError if a step cannot compute the largest image."""
    see_each_other, most, least = vision.attends_within, config.scheduler.max_num_batched_tokens, sizes.max_item_embeddings
    if not (see_each_other or config.multimodal.disable_chunked_mm_input):
        return 0
    assert most is not None
    if least > most:
        tokens_do = f"the tokens of an image of {model_config.architecture} see each other", "raise it"
        option_is = "disable_chunked_mm_input is set", "raise it, or lower mm_max_patches"
        reason, way_out = tokens_do if see_each_other else option_is
        raise ConfigError(
            f"{reason}, so a step computes all {least} tokens of an image, but max_num_batched_tokens is {most}; {way_out}"
        )
    # Pixtral ends each row of embeddings with a break token; others write text around each tile.
    return min(most, 2 * least) if vision.family == "pixtral" or vision.has_tiles else least


def _check_parallel(parallel: ParallelOptions, architecture: str) -> None:
    faults = (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, "stages of a pipeline do not encode images"),
        (
            "prefill_context_parallel_size",
            parallel.prefill_context_parallel_size,
            "devices that split tokens do not split images",
        ),
    )
    for name, size, reason in faults:
        if size > 1:
            raise ConfigError(
                f"{name} is {size}, but {architecture} sees images, and {reason}; leave the option out, or set language_model_only for "
                "text alone"
            )


def _check_plans(config: EngineConfig, vision: Vision, sizes: EncoderSizes) -> None:
    """A plan brings the images that it encodes to every host."""
    num_ranks, patch_bytes = config.parallel.num_ranks, vision.max_patch_values
    num_bytes = num_ranks * sizes.max_encoded_patches * patch_bytes
    if config.parallel.nnodes > 1 and num_bytes > MAX_PLAN_BYTES // 2:
        most, step = MAX_PLAN_BYTES // 2 // (num_ranks * patch_bytes), sizes.max_step_patches
        way_out = f"lower it to {most}"
        if most < step:  # however small an image is, a step encodes so many patches
            most_ranks = MAX_PLAN_BYTES // 2 // (step * patch_bytes)
            way_out = (
                f"use at most {most_ranks} ranks, with mm_max_patches up to {step}, or set language_model_only for text alone"
            )
        raise ConfigError(
            f"mm_max_patches is {sizes.max_item_patches}: with {sizes.max_encoded_patches} patches for each of {num_ranks} data-parallel "
            f"ranks a step sends {num_bytes >> 20} MiB to other hosts, and may send {MAX_PLAN_BYTES >> 21}; {way_out}"
        )
