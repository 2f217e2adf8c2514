"""The options of images: those of their preparation, `MediaOptions`, and what the engine and chats do with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jaxllm.encoder_sizes import DECODE_STEP_PATCHES
from jaxllm.media.options import MediaOptions, media_faults


@dataclass(frozen=True, kw_only=True)
class MultiModalOptions(MediaOptions):
    """Images"""

    interleave_mm_strings: Annotated[
        bool, "for chat templates that take texts alone, put images where their parts are; default: before the message's text"
    ] = False
    language_model_only: Annotated[
        bool, "load the text model of a checkpoint alone, without its encoders of images or audio"
    ] = False
    skip_mm_profiling: Annotated[
        bool, "plan no memory for encoding an image of the largest size; the KV cache gets it, and such an image may not fit"
    ] = False
    mm_max_decode_step_patches: Annotated[
        int,
        "most patches that a step encodes in which requests also decode; larger images are encoded in parts, some layers of the encoder in "
        "each step; an image of N patches counts as N + N²/8192, because of attention; 0: whole, up to 8192 patches or one image a step",
    ] = DECODE_STEP_PATCHES
    disable_chunked_mm_input: Annotated[bool, "compute all tokens of an image in the same step"] = False

    def __post_init__(self) -> None:
        """`EngineConfig.checked` reports faults of all groups together."""


def multimodal_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with the options of images, beyond their types."""
    limits, faults = flat["limit_mm_per_prompt"], media_faults(flat)
    if isinstance(most := flat["mm_max_decode_step_patches"], int) and most < 0:
        faults.append(f"mm_max_decode_step_patches is {most}, must be at least 0, which encodes images whole")
    return faults + [
        f"limit_mm_per_prompt has {limit!r} for {kind}, must be a count or have count alone: memory is planned for an image of "
        "mm_max_patches; lower that if all images are smaller"
        for kind, limit in (limits.items() if isinstance(limits, Mapping) else ())
        if isinstance(limit, Mapping) and set(limit) != {"count"}
    ]
