"""The options of images, videos and audio in prompts: which are taken, how large, how prepared. vLLM's names where it has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxllm.errors import ConfigError, InvalidRequestError

NO_COUNT_LIMIT = 999
"""Images of a prompt where limit_mm_per_prompt says nothing; vLLM's number."""
MAX_IMAGE_PIXELS = 178_956_970
"""Pillow reads no larger ones."""


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Images, videos and audio"""

    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        'JSON object: most images, videos and clips of audio of a prompt, as {"image": 4, "video": 1, "audio": 2}; 0 takes none; '
        "default: 999",
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        "hosts that images and audio of http(s) addresses may come from, several after one flag; * is any public host; default: only "
        "data: URLs",
    ] = None
    allowed_local_media_path: Annotated[
        str | None, "directory whose files requests may name with file:// addresses; default: none"
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        'JSON object: how files are read, as {"image": {"rgba_background_color": [0, 0, 0]}}; transparent pixels show this colour; '
        'default: white; or {"video": {"fps": 1}}, or num_frames: how frames are taken from files; fps is also the rate '
        "of frames that come as a list, default: 1",
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        "JSON object laid over the model's preprocessor_config.json, such as min_pixels and max_pixels of Qwen models, or size",
    ] = None
    trust_request_mm_kwargs: Annotated[bool, "let requests bring mm_processor_kwargs of their own"] = False
    mm_processor_cache_gb: Annotated[
        float,
        "GiB of host memory of an API server that keep prepared images and audio, so that one sent again costs nothing; 0: none",
    ] = 4.0
    mm_hasher_algorithm: Annotated[
        Literal["sha256", "sha512"], "hash by which equal images are found; vLLM's default, blake3, needs a package"
    ] = "sha256"
    mm_max_patches: Annotated[
        int | None,
        "most patches of an image or a frame; larger ones are made smaller; more take memory on the device and hold up other requests; "
        "default: 16384, or with Idefics 3 and SmolVLM as many as 17 tiles have, if these are more",
    ] = None
    mm_max_image_pixels: Annotated[
        int, "most pixels of an image as it came; larger ones are refused before they are decoded"
    ] = 1 << 26
    mm_max_image_bytes: Annotated[int, "most bytes of the file of an image"] = 20 << 20
    mm_max_video_pixels: Annotated[
        int,
        "most pixels of all frames of a video together, as a file or as files, which are decoded; longer and larger ones are refused",
    ] = 1 << 34
    mm_max_video_bytes: Annotated[int, "most bytes of the file of a video, or of its frames together"] = 64 << 20
    mm_max_audio_bytes: Annotated[int, "most bytes of a file of audio"] = 25 << 20
    mm_max_audio_seconds: Annotated[
        float,
        "most seconds of a file of audio; Whisper gets it in clips of what it hears at a time, 30 seconds; others take no longer clips",
    ] = 600.0
    mm_fetch_timeout: Annotated[float, "seconds that fetching an image from its address may take"] = 5.0

    def max_count(self, kind: str = "image") -> int:
        """The most items of a kind that a prompt may have."""
        limit = (self.limit_mm_per_prompt or {}).get(kind, NO_COUNT_LIMIT)
        return int(limit.get("count", NO_COUNT_LIMIT) if isinstance(limit, Mapping) else limit)

    def check_count(self, count: int, kind: str = "image", param: str = "prompt") -> None:
        """Raise InvalidRequestError if a prompt has more items of a kind than it may."""
        if count > (limit := self.max_count(kind)):
            raise InvalidRequestError(
                f"At most {limit} {kind}(s) may be provided in one prompt, and this one has {count}; send fewer, or raise "
                "--limit-mm-per-prompt",
                param,
            )

    @property
    def background(self) -> tuple[int, int, int]:
        """The colour, red, green and blue, that transparent pixels show."""
        red, green, blue = (self.media_io_kwargs or {}).get("image", {}).get("rgba_background_color", (255, 255, 255))
        return red, green, blue

    @property
    def video_io(self) -> Mapping[str, Any]:
        """How frames are taken from files of videos."""
        found: Mapping[str, Any] = (self.media_io_kwargs or {}).get("video", {})
        return found

    def max_bytes(self, kind: str) -> int:
        """The most bytes of the file of an item."""
        of_kinds = {"image": self.mm_max_image_bytes, "video": self.mm_max_video_bytes, "audio": self.mm_max_audio_bytes}
        return of_kinds[kind]

    def __post_init__(self) -> None:
        if faults := media_faults(vars(self)):
            raise ConfigError("; ".join(faults))


def media_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with the options of images, beyond their types."""
    faults = [*_limit_faults(flat["limit_mm_per_prompt"]), *_io_faults(flat["media_io_kwargs"])]
    least = {"mm_processor_cache_gb": 0, "mm_max_patches": 256, "mm_max_image_pixels": 1, "mm_max_image_bytes": 1}
    least |= {"mm_max_video_pixels": 1, "mm_max_video_bytes": 1}
    least |= {"mm_max_audio_bytes": 1, "mm_max_audio_seconds": 1}
    for name, low in least.items():
        if isinstance(flat[name], int | float) and flat[name] < low:
            faults.append(f"{name} is {flat[name]}, must be at least {low}")
    if isinstance(most := flat["mm_max_image_pixels"], int) and most > MAX_IMAGE_PIXELS:
        faults.append(f"mm_max_image_pixels is {most}, must be at most {MAX_IMAGE_PIXELS}")
    if isinstance(flat["mm_fetch_timeout"], int | float) and flat["mm_fetch_timeout"] <= 0:
        faults.append(f"mm_fetch_timeout is {flat['mm_fetch_timeout']}, must be positive")
    return faults


def _limit_faults(limits: Any) -> list[str]:
    if not isinstance(limits, Mapping):
        return []  # the type is reported elsewhere
    faults = []
    for kind, limit in limits.items():
        if kind not in ("image", "video", "audio"):
            faults.append(f"limit_mm_per_prompt has {kind!r}, must have image, video or audio")
            continue
        count = limit.get("count", NO_COUNT_LIMIT) if isinstance(limit, Mapping) else limit
        if type(count) is not int or count < 0:
            faults.append(f"limit_mm_per_prompt says {limit!r} for {kind}, must be a count, not negative")
    return faults


def _io_faults(settings: Any) -> list[str]:
    if not isinstance(settings, Mapping):
        return []
    faults = [f"media_io_kwargs has {kind!r}, must have image or video" for kind in settings if kind not in ("image", "video")]
    faults += _video_io_faults(settings.get("video", {}))
    image = settings.get("image", {})
    if not isinstance(image, Mapping):
        return [*faults, f"media_io_kwargs.image is {image!r}, must be a JSON object"]
    faults += [
        f"media_io_kwargs.image has {name!r}; it takes rgba_background_color"
        for name in image
        if name != "rgba_background_color"
    ]
    color = image.get("rgba_background_color", [255, 255, 255])
    is_color = (
        isinstance(color, list | tuple) and len(color) == 3 and all(type(part) is int and 0 <= part < 256 for part in color)
    )
    if not is_color:
        faults.append(f"media_io_kwargs.image.rgba_background_color is {color!r}, must be three integers from 0 to 255")
    return faults


def _video_io_faults(video: Any) -> list[str]:
    if not isinstance(video, Mapping):
        return [f"media_io_kwargs.video is {video!r}, must be a JSON object"]
    faults = [
        f"media_io_kwargs.video has {name!r}; it takes fps and num_frames"
        for name in video
        if name not in ("fps", "num_frames")
    ]
    for name, kinds in (("fps", (int, float)), ("num_frames", (int,))):
        if name in video and not (type(video[name]) in kinds and 0 < video[name] < 1 << 20):
            faults.append(f"media_io_kwargs.video.{name} is {video[name]!r}, must be a positive number")
    return faults
