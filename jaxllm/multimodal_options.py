"""The options of images in prompts, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

IMAGE = "image"
OTHER_KINDS = ("video", "audio", "vision_chunk")
"""Kinds that vLLM limits too, and that no model takes here."""
MAX_IMAGES = 999
"""Images of a prompt without a limit of their own, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class MultiModalOptions:
    """Images"""

    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        f'JSON object with the most images of a prompt: {{"image": 4}} or {{"image": {{"count": 4}}}}; default: {MAX_IMAGES}',
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        "hosts that images may be fetched from by http and https, several after one flag; *: every public one; default: none, so that "
        "requests carry their images (docs/IMAGES.md)",
    ] = None
    allowed_local_media_path: Annotated[
        str | None, "directory below which file:// addresses of requests may read images of the server's machine; default: none"
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        'JSON object of how images are read: {"image": {"rgba_background_color": [255, 255, 255]}}; default: transparent ones on white',
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        "JSON object over the checkpoint's preprocessor_config.json, such as min_pixels and max_pixels; the names are the family's",
    ] = None
    mm_processor_cache_gb: Annotated[
        float, "GiB of prepared images that each API server, or a script's engine, keeps for prompts that repeat them; 0: none"
    ] = 1.0
    mm_hasher_algorithm: Annotated[
        Literal["sha256", "sha512"], "hash by which equal images are found; vLLM's default, blake3, needs a package"
    ] = "sha256"
    skip_mm_profiling: Annotated[
        bool, "plan no memory for encoding an image of the largest size; the KV cache gets it, and such an image may not fit"
    ] = False
    language_model_only: Annotated[bool, "load a model that sees images without its encoder, for text alone"] = False
    disable_chunked_mm_input: Annotated[bool, "compute all tokens of an image in the same step"] = False
    interleave_mm_strings: Annotated[
        bool, "for chat templates that take texts alone, put images where their parts are; default: before the message's text"
    ] = False
    trust_request_mm_kwargs: Annotated[
        bool, "let requests to a server set mm_processor_kwargs and media_io_kwargs, which decide how much they cost"
    ] = False
    mm_max_patches: Annotated[
        int, "most patches of one image, which memory is planned for; a larger image is scaled down to it (docs/IMAGES.md)"
    ] = 16384

    @property
    def max_images(self) -> int:
        """Most images of a prompt."""
        limit = (self.limit_mm_per_prompt or {}).get(IMAGE, MAX_IMAGES)
        return limit.get("count", MAX_IMAGES) if isinstance(limit, Mapping) else limit


def multimodal_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong inside the objects among the options of images."""
    limits, faults = flat["limit_mm_per_prompt"], []
    for kind, limit in limits.items() if isinstance(limits, Mapping) else ():
        name = f"limit_mm_per_prompt.{kind}"
        if kind not in (IMAGE, *OTHER_KINDS):
            faults.append(f"{name} is no kind of input, must be {IMAGE}")
        if isinstance(limit, Mapping):
            if unknown := sorted(limit.keys() - {"count"}):
                faults.append(
                    f"{name} has {', '.join(unknown)}, may have count: memory is planned for an image of mm_max_patches; lower that "
                    "if all images are smaller"
                )
            limit = limit.get("count", 0)
        if type(limit) is not int or limit < 0:
            faults.append(f"{name} is {limit!r}, must be a number of at least 0")
    settings = flat["media_io_kwargs"]
    for kind, values in settings.items() if isinstance(settings, Mapping) else ():
        if kind not in (IMAGE, *OTHER_KINDS) or not isinstance(values, Mapping):
            faults.append(
                f'media_io_kwargs has {kind!r}: {values!r}, must be an object by kind of input, such as {{"image": {{}}}}'
            )
    return faults
