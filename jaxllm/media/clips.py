"""Videos as frames, of which some are read: given frames, lists of image files, animations, and, with the package `av`, mp4 and webm."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from PIL import Image, ImageSequence

from jaxllm.errors import InvalidRequestError
from jaxllm.media.image_files import check_size, load, open_image
from jaxllm.media.media import Check, MediaUnwantedError, unchecked
from jaxllm.media.options import MediaOptions
from jaxllm.media.rgb import from_array, to_rgb

CONTAINERS = {"mp4": "MP4 or MOV", "matroska": "WebM or Matroska"}
"""Formats of videos, by FFmpeg's names. Others are not tried: some name further files and addresses, which would then be read."""
MAX_FRAMES = 1 << 18
"""Frames of a file: more than an hour at 60 frames a second."""
MAX_ANIMATION_PIXELS = 1 << 30
"""Pixels of all frames of an animation: 500 frames of 1920 x 1080. Its readers decode about 40 million a second, and each frame twice."""
SECONDS_OF_A_STILL = 0.1
"""Duration of a frame of an animation that gives none, as viewers show it."""
_GIF_FRAME, _GIF_EXTENSION, _GIF_END = b"\x2c\x21\x3b"
"""First bytes of the blocks of a GIF."""
_GIF_START = re.compile(rb"[\x2c\x21\x3b]")
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
"""By the degrees to the left that a camera's file asks for."""
ASKED_OF_FRAMES = ("fps", "frames_indices", "do_sample_frames")
TOLD_OF_FRAMES = ("total_num_frames", "duration", "video_backend", "width", "height")
"""Keys of vLLM's metadata of frames; the second ones say nothing that the frames do not."""


@dataclass(frozen=True)
class Clip:
    """The frames of a video, not read yet."""

    width: int
    height: int
    seconds: Sequence[float]
    """When each frame is shown."""
    fps: float
    is_chosen: bool
    """Whether all frames are to be taken, because the caller has chosen them."""
    read: Callable[[Sequence[int]], Iterator[Image.Image]]
    """The frames with these numbers, ascending, in RGB. Raises InvalidRequestError."""


def open_clip(data: Any, name: str, options: MediaOptions, check: Check = unchecked) -> Clip:
    """The video that is a file, a list of frames, or (frames, metadata). Raises InvalidRequestError.

    check: called before each frame that is decoded, now and while the clip is read."""
    metadata: Mapping[str, Any] = {}
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        data, metadata = data
        if unknown := [key for key in metadata if key not in (*ASKED_OF_FRAMES, *TOLD_OF_FRAMES)]:
            refuse(name, f"has {', '.join(map(repr, unknown))} beside its frames; it may have {', '.join(ASKED_OF_FRAMES)}")
    if isinstance(data, bytes):
        if metadata:
            refuse(name, "is a file with metadata beside it, which only frames have; leave that out")
        return _of_file(data, name, options, check)
    is_array = isinstance(data, np.ndarray) and data.ndim == 4
    if not is_array and not (isinstance(data, list | tuple) and all(isinstance(each, _FRAME) for each in data)):
        refuse(
            name,
            f"is {_described(data)}, must be an array of uint8 [frames, height, width, 3], a list of Pillow images, or the bytes of a file",
        )
    return _of_frames(data, metadata, name, options, check)


_FRAME = (bytes, Image.Image, np.ndarray)


def has_pictures(data: Any) -> bool:
    """Whether a video comes as Pillow images, with or without metadata."""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        data = data[0]
    return isinstance(data, list | tuple) and any(isinstance(each, Image.Image) for each in data)


def refuse(name: str, fault: str) -> NoReturn:
    """Raise the error of the video that is called `name`; `fault` goes on after it."""
    raise InvalidRequestError(f"the video at {name} {fault}", name) from None


def _described(data: Any) -> str:
    return f"an array of shape {data.shape}" if isinstance(data, np.ndarray) else f"a {type(data).__name__}"


# Frames


def _of_frames(frames: Sequence[Any], metadata: Mapping[str, Any], name: str, options: MediaOptions, check: Check) -> Clip:
    if not len(frames):
        refuse(name, "has no frames")
    fps, sampled = metadata.get("fps"), metadata.get("do_sample_frames") or False
    if fps is not None and not (type(fps) in (int, float) and 0 < fps < 1e6):
        refuse(name, f"has {fps!r} as fps, must be a positive number")
    if type(sampled) is not bool:
        refuse(name, f"has {sampled!r} as do_sample_frames, must be true or false")
    fps = options.video_io.get("fps", 1) if fps is None else fps
    numbers = metadata.get("frames_indices")
    numbers = range(len(frames)) if numbers is None else list(numbers)
    if len(numbers) != len(frames) or not all(isinstance(number, int | np.integer) for number in numbers):
        refuse(name, f"has frames_indices that are not {len(frames)} integers, one for each frame")

    def frame(number: int) -> Image.Image:
        return _frame(frames[number], f"{name}, frame {number}", name, options)

    first = frame(0)
    if isinstance(frames[0], bytes):
        _check_work(*first.size, len(frames), name, options)

    def read(wanted: Sequence[int]) -> Iterator[Image.Image]:
        for number in wanted:
            check()
            found = frame(number)
            if found.size != first.size:
                refuse(
                    name,
                    f"has a frame {number} of {found.width} x {found.height} pixels, its first has {first.width} x {first.height}; make "
                    "them equal",
                )
            yield found

    return Clip(*first.size, [number / fps for number in numbers], fps, not sampled, read)


def _frame(data: Any, where: str, name: str, options: MediaOptions) -> Image.Image:
    """One frame in RGB."""
    try:
        if isinstance(data, bytes):
            image = open_image(data, where, options)
        elif isinstance(data, np.ndarray):
            image = from_array(data, where)
        else:
            image = data
        check_size(*image.size, where, options)
        load(image, where)
        return to_rgb(image, where, options.background)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), name) from None


# Files


def _of_file(data: bytes, name: str, options: MediaOptions, check: Check) -> Clip:
    if len(data) > options.mm_max_video_bytes:
        refuse(
            name,
            f"has {len(data)} bytes, must have at most {options.mm_max_video_bytes}; send a smaller one, or raise --mm-max-video-bytes",
        )
    if data.startswith((b"GIF8", b"\x89PNG")) or data[8:12] == b"WEBP":
        return _of_animation(data, name, options, check)
    if data[4:8] == b"ftyp":
        return _of_container(data, "mp4", name, options, check)
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return _of_container(data, "matroska", name, options, check)
    kinds = ", ".join((*CONTAINERS.values(), "an animated GIF, PNG or WebP"))
    refuse(name, f"is a file of an unknown format; send {kinds}, or its frames as data:video/jpeg;base64,frame,frame,…")


def _check_work(width: int, height: int, count: int, name: str, options: MediaOptions) -> None:
    """Refuse a file with too many frames, or whose frames, which are all decoded, have too many pixels."""
    if count > MAX_FRAMES:
        refuse(name, f"has {count} frames or more, must have at most {MAX_FRAMES}; send a shorter one")
    if (pixels := width * height * count) > options.mm_max_video_pixels:
        refuse(
            name,
            f"has {count} frames of {width} x {height} pixels, together {pixels}, must have at most {options.mm_max_video_pixels}; send "
            "a shorter or smaller one, or raise --mm-max-video-pixels",
        )


def _check_animation(width: int, height: int, count: int, name: str, options: MediaOptions) -> None:
    _check_work(width, height, count, name, options)
    if (pixels := width * height * count) > MAX_ANIMATION_PIXELS:
        refuse(
            name,
            f"is an animation of {count} frames of {width} x {height} pixels, together {pixels}, must have at most {MAX_ANIMATION_PIXELS}; "
            "send it as MP4 or WebM, or fewer frames",
        )


def _of_animation(data: bytes, name: str, options: MediaOptions, check: Check) -> Clip:
    image = open_image(data, name, options)
    # Pillow knows how many frames PNG and WebP have, and would decode part of a GIF to count its own.
    count = _count_gif_frames(data, MAX_FRAMES + 1) if image.format == "GIF" else getattr(image, "n_frames", 1)
    _check_animation(*image.size, count, name, options)
    seconds: list[float] = []
    now = 0.0
    try:
        for each in ImageSequence.Iterator(image):
            check()
            check_size(*image.size, name, options)  # a later frame of a GIF may be larger than the first
            _check_animation(*image.size, len(seconds) + 1, name, options)
            each.load()  # before it WebP does not say how long
            seconds.append(now)
            now += (each.info.get("duration") or 0) / 1000 or SECONDS_OF_A_STILL
    except (InvalidRequestError, MediaUnwantedError):
        raise
    except Exception:  # readers of damaged files raise anything
        refuse(name, "is damaged or incomplete; send the whole file")

    def read(wanted: Sequence[int]) -> Iterator[Image.Image]:
        whole = open_image(data, name, options)
        for number in wanted:
            # One by one, as readers decode those between anyway, in one call.
            for place in range(whole.tell(), number + 1):
                check()
                try:
                    whole.seek(place)
                    whole.load()
                except Exception:
                    refuse(name, f"is damaged or incomplete: its frame {place} cannot be decoded; send the whole file")
            yield to_rgb(whole.copy(), name, options.background)

    return Clip(*image.size, seconds, len(seconds) / now, False, read)


def _count_gif_frames(data: bytes, most: int) -> int:
    """How many frames the blocks of a GIF have, up to `most`. Decodes nothing. A damaged file has some number of frames."""

    def behind_palette(place: int, flags: int) -> int:
        return place + (3 << (flags % 8 + 1) if flags & 0x80 else 0)

    def behind_pieces(place: int) -> int:
        while place < len(data) and data[place]:
            place += 1 + data[place]
        return place + 1

    count, place = 0, behind_palette(13, data[10] if len(data) > 10 else 0)
    while place + 10 < len(data) and count < most and (kind := data[place]) != _GIF_END:
        if kind == _GIF_FRAME:
            count += 1
            place = behind_pieces(behind_palette(place + 10, data[place + 9]) + 1)
        elif kind == _GIF_EXTENSION:
            place = behind_pieces(place + 2)
        else:  # as Pillow does
            found = _GIF_START.search(data, place)
            place = len(data) if found is None else found.start()
    return count


def _of_container(data: bytes, format: str, name: str, options: MediaOptions, check: Check) -> Clip:
    try:
        import av
    except ImportError:
        refuse(
            name,
            f"is {CONTAINERS[format]}, which needs the package av: pip install 'jaxllm[video]'; or send its frames as "
            "data:video/jpeg;base64,frame,frame,…",
        )

    def opened() -> Any:
        container = av.open(io.BytesIO(data), format=format)
        if not container.streams.video:
            refuse(name, "has no video stream, only others")
        return container

    def damaged() -> NoReturn:
        refuse(name, "is damaged, incomplete, or of a codec that is not known; send the whole file")

    try:
        with opened() as container:
            stream = container.streams.video[0]
            if stream.codec_context is None:
                damaged()
            size, fps = (stream.codec_context.width, stream.codec_context.height), float(stream.average_rate or 0)
            count = stream.frames or round(float(container.duration or 0) / av.time_base * fps)
            check_size(*size, name, options)
            _check_work(*size, count, name, options)
            turn = next(container.decode(stream)).rotation % 360
    except InvalidRequestError:
        raise
    except (av.FFmpegError, ValueError, OSError, StopIteration):
        damaged()
    if not 0 < fps < 1e6:
        damaged()

    def read(wanted: Sequence[int]) -> Iterator[Image.Image]:
        chosen, found = iter(wanted), None
        number = next(chosen, None)
        try:
            with opened() as container:
                for place, frame in enumerate(container.decode(container.streams.video[0])):
                    check()
                    if (frame.width, frame.height) != size:
                        refuse(
                            name, f"has frames of {frame.width} x {frame.height} pixels, its header says {size[0]} x {size[1]}"
                        )
                    if place == number:
                        found = frame.to_image()
                        found = found.transpose(_TURNS[turn]) if turn in _TURNS else found
                        yield found
                        if (number := next(chosen, None)) is None:
                            return
        except InvalidRequestError:
            raise
        except (av.FFmpegError, ValueError, OSError):
            damaged()
        # A header may count a few frames more than there are.
        if found is None or count - place > max(2, fps):
            damaged()
        for _ in (number, *chosen):
            yield found

    upright = size[::-1] if turn in (90, 270) else size
    return Clip(*upright, [number / fps for number in range(count)], fps, False, read)
