"""Videos from frames and files to time steps: which frames are taken, their size and patches, times, hashes, and what is refused."""

import dataclasses
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media import Media, MediaOptions
from jaxllm.media.clips import _count_gif_frames, open_clip
from jaxllm.media.media import MediaUnwantedError
from jaxllm.media.payload import unpack
from jaxllm.media.processor import MediaProcessor, make_processor
from tests.helpers import videos
from tests.helpers.images import VISIONS, encoded, picture, pixels, write_settings
from tests.helpers.videos import frames

VIDEO_PAD, IMAGE_PAD = 503, 500
SETTINGS = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 25165824}}


def processor(directory: Path, settings: dict[str, Any] | None = SETTINGS, **options: Any) -> MediaProcessor:
    write_settings(directory, "qwen3_vl")
    if settings is not None:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    vision = dataclasses.replace(VISIONS["qwen3_vl"], video_token_id=VIDEO_PAD)
    return make_processor(directory, vision, MediaOptions(**options))


def video(data: Any, uuid: str | None = None) -> Media:
    return Media("video", data, uuid, "here")


def labels(found) -> list[str]:
    return [step.label for step in found.steps]


def animation(format: str, count: int = 4, **options: Any) -> bytes:
    first, *rest = (picture(64, 32, seed) for seed in range(count))
    return encoded(first, format, save_all=True, append_images=rest, **options)


def test_a_time_step_has_the_patches_of_its_frames(tmp_path) -> None:
    prepare, given = processor(tmp_path), frames(0, 5, 64, 96)
    found = prepare.process(video((given, {"fps": 2})))
    assert (found.kind, found.grid, found.num_tokens, found.payload) == ("video", (3, 2, 3), 18, b"")
    _, expected = videos.patches(given, prepare.vision)
    expected = videos.in_order_of_frames(expected, prepare.vision).reshape(3, 24, -1)
    for step, patches in zip(found.steps, expected, strict=True):
        grid, own = unpack(step.payload)
        assert (grid, step.grid, step.num_tokens) == ((1, 4, 6), (1, 2, 3), 6)
        np.testing.assert_array_equal(own, patches)
    assert labels(found) == ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]


def test_frames_get_the_size_of_the_image_processor_where_their_area_is_enough(tmp_path) -> None:
    """Pillow's bicubic filter, as for images."""
    prepare, image = processor(tmp_path), picture(333, 250)
    found = prepare.process(video([image, image]))
    (step,) = found.steps
    _, patches = unpack(step.payload)
    as_image = prepare.process(Media("image", image))
    np.testing.assert_array_equal(patches, np.tile(unpack(as_image.payload)[1], 2))


@pytest.mark.torch
def test_frames_sizes_and_times_are_those_of_transformers(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as kind
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    prepare = processor(tmp_path, mm_max_patches=1 << 20)
    rule, draw = prepare._video, np.random.RandomState(0)
    assert rule is not None
    for _ in range(3000):
        total, fps, width, height = draw.randint(2, 3000), draw.uniform(0.2, 60), *draw.randint(1, 3000, 2)
        clip = SimpleNamespace(seconds=range(total), fps=fps, is_chosen=False)
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        expected = kind.sample_frames(SimpleNamespace(fps=2, min_frames=4, max_frames=768), metadata)
        numbers = rule.chosen(clip, "here")
        assert numbers == expected.tolist()
        if max(width, height) <= 200 * min(width, height):
            size = smart_resize(len(numbers), height, width, 2, 32, 4096, 25165824)
            assert rule.resized(len(numbers), width, height)[::-1] == size
        seconds = Qwen3VLProcessor._calculate_timestamps(None, list(numbers), fps)
        assert [*rule.labels([number / fps for number in numbers])] == [f"<{each:.1f} seconds>" for each in seconds]
    given = frames(0, 6, 64, 96)
    expected, *grid = kind.patchify(None, torch.tensor(given.transpose(0, 3, 1, 2))[None], 16, 2, 2)
    found_grid, found = videos.patches(given, prepare.vision)
    assert found_grid == tuple(grid)
    np.testing.assert_array_equal(found, expected[0].numpy())


def test_which_frames_are_taken(tmp_path) -> None:
    prepare, given = processor(tmp_path), frames(0, 40, 32, 32)
    assert len(prepare.process(video(given)).steps) == 20, "a caller's frames are all taken"
    assert labels(prepare.process(video(given)))[:2] == ["<0.5 seconds>", "<2.5 seconds>"], "one a second"
    sampled = prepare.process(video((given, {"fps": 10, "do_sample_frames": True})))
    assert labels(sampled) == ["<0.3 seconds>", "<1.4 seconds>", "<2.5 seconds>", "<3.6 seconds>"]
    chosen = prepare.process(video((given[:4], {"fps": 10, "frames_indices": [0, 20, 40, 60], "total_num_frames": 80})))
    assert labels(chosen) == ["<1.0 seconds>", "<5.0 seconds>"]
    fast = processor(tmp_path, media_io_kwargs={"video": {"fps": 4}})
    assert labels(fast.process(video(given)))[1] == "<0.6 seconds>"
    few = processor(tmp_path, media_io_kwargs={"video": {"num_frames": 6}})
    assert len(few.process(video((given, {"fps": 10, "do_sample_frames": True}))).steps) == 3
    kwargs = {"videos_kwargs": {"fps": 1}, "min_pixels": 4096}
    slow = processor(tmp_path, mm_processor_kwargs=kwargs)
    assert len(slow.process(video((given, {"fps": 5, "do_sample_frames": True}))).steps) == 4


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_animations_are_videos(tmp_path, format: str) -> None:
    prepare = processor(tmp_path)
    found = prepare.process(video(animation(format, duration=250)))
    assert labels(found) == ["<0.1 seconds>", "<0.6 seconds>"] and found.grid == (2, 1, 2)
    listed = prepare.process(video([encoded(picture(64, 32, seed)) for seed in range(4)]))
    if format == "PNG":  # the others change colours
        assert [step.payload for step in found.steps] == [step.payload for step in listed.steps]


def test_files_of_videos_need_a_package(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    for head in (b"\0\0\0\x20ftypisom", b"\x1a\x45\xdf\xa3"):
        with pytest.raises(InvalidRequestError, match=r"needs the package av: pip install 'jaxllm\[video\]'"):
            processor(tmp_path).process(video(head + bytes(100)))


@pytest.mark.parametrize(("format", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_files_of_videos(tmp_path, format: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(25):
            image = Image.new("RGB", (96, 64), (10 * number,) * 3)
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    prepare = processor(tmp_path)
    found = prepare.process(video(file.getvalue()))
    assert labels(found) == ["<0.3 seconds>", "<1.5 seconds>", "<2.4 seconds>"] and found.grid == (3, 2, 3)
    means = [unpack(step.payload)[1].reshape(24, 2, -1).mean(axis=(0, 2)) for step in found.steps]
    np.testing.assert_allclose(np.concatenate(means), [0, 60, 120, 180, 240, 240], atol=6)
    for damaged in (file.getvalue()[: len(file.getvalue()) // 2], file.getvalue()[:40]):
        with pytest.raises(InvalidRequestError, match="is damaged, incomplete"):
            prepare.process(video(damaged))
    monkeypatch.setattr("jaxllm.media.clips._TURNS", {0: Image.Transpose.ROTATE_90})
    turned = processor(tmp_path).process(
        video([*map(np.asarray, open_clip(file.getvalue(), "", MediaOptions()).read([0, 24]))])
    )
    assert turned.grid == (1, 3, 2), "its header would say so"
    small = processor(tmp_path, mm_max_video_pixels=100_000)
    with pytest.raises(InvalidRequestError, match="has 25 frames of 96 x 64 pixels, together 153600"):
        small.process(video(file.getvalue()))


def test_hashes_cover_frames_their_order_and_times(tmp_path) -> None:
    prepare, given = processor(tmp_path), frames(0, 4, 32, 32)
    variants = [
        video(given),
        video((given, {"fps": 3})),
        video((given, {"fps": 3, "frames_indices": [0, 1, 2, 4]})),
        video(given[::-1]),
        video(given[:2]),
        video([encoded(Image.fromarray(frame)) for frame in given]),
        video(given, uuid="a"),
    ]
    found = [prepare.process(each) for each in variants]
    steps = [step.content_hash for each in found for step in each.steps]
    assert len({*steps}) == len(steps) and {len(each) for each in steps} == {32}
    again = processor(tmp_path)
    assert [again.process(each).content_hash for each in variants] == [each.content_hash for each in found]
    assert prepare.process(video(None, uuid="a")) is found[-1]
    assert prepare.cache.num_bytes == sum(each.num_bytes for each in found)
    other = processor(tmp_path, mm_processor_kwargs={"videos_kwargs": {"min_pixels": 20_000}})
    assert other.process(variants[0]).content_hash != found[0].content_hash


def test_all_numbers_of_frames_count(tmp_path) -> None:
    """NumPy writes long arrays with dots."""
    prepare, given = processor(tmp_path), frames(0, 20, 32, 32)
    one, other = np.arange(20), np.arange(20)
    other[10] = 9
    with np.printoptions(threshold=10):
        hashes = {prepare.process(video((given, {"frames_indices": indices}))).content_hash for indices in (one, other)}
    assert len(hashes) == 2


def test_a_file_and_a_list_of_it_are_not_the_same(tmp_path) -> None:
    prepare, file = processor(tmp_path), animation("GIF")
    prepare.process(video(file))
    with pytest.raises(InvalidRequestError, match=r"has 1 frame\(s\)"):
        prepare.process(video([file]))


def test_text_and_tokens_of_a_video(tmp_path) -> None:
    prepare = processor(tmp_path)
    clip, image = prepare.process(video(frames(0, 4, 32, 64))), prepare.process(Media("image", pixels(256, 256)))
    placeholder = prepare.placeholder("video")
    text = prepare.expand_text(f"a{placeholder}b", [clip])
    assert text == f"a<0.5 seconds>{placeholder}<2.5 seconds>{placeholder}b"
    ids = [1, VIDEO_PAD, 2, VIDEO_PAD, 3, IMAGE_PAD, 4]
    expanded, items = prepare.expand(ids, [image, clip])
    assert expanded == [1, *[VIDEO_PAD] * 2, 2, *[VIDEO_PAD] * 2, 3, *[IMAGE_PAD] * 64, 4]
    assert [(item.kind, item.position, item.grid) for item in items] == [
        ("video", 1, (1, 1, 2)),
        ("video", 4, (1, 1, 2)),
        ("image", 7, (1, 8, 8)),
    ]
    assert prepare.expand(expanded, [clip, image]) == (expanded, items)
    with pytest.raises(InvalidRequestError, match=r"has 1 video placeholder\(s\) \(token 503\) and 2 time step"):
        prepare.expand([VIDEO_PAD], [clip])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (np.zeros((0, 32, 32, 3), np.uint8), "has no frames"),
        ([], "has no frames"),
        (frames(0, 1, 32, 32), r"has 1 frame\(s\), must have at least 2; send a still as an image"),
        (frames(0, 769, 2, 2), "has 769 frames, must have at most 768; send fewer"),
        ([pixels(32, 32), pixels(64, 32)], "has a frame 1 of 64 x 32 pixels, its first has 32 x 32; make them equal"),
        (frames(0, 2, 8, 2000), "one side more than 200 times the other"),
        (np.zeros((2, 32, 32, 3), np.float32), "must be uint8 of values from 0 to 255"),
        (np.zeros((2, 2, 32, 32, 3), np.uint8), r"is an array of shape \(2, 2, 32, 32, 3\), must be an array of uint8"),
        (3, "is a int, must be an array of uint8"),
        ([b"no image", b"no image"], "of an unknown format, or damaged"),
        (b"no video", "is a file of an unknown format; send MP4"),
        (b"#EXTM3U\nfile:///etc/passwd", "is a file of an unknown format"),
        (b"", "is a file of an unknown format"),
        (animation("GIF")[:-2000], "is damaged or incomplete"),
        ((frames(0, 2, 32, 32), {"fps": 0}), "has 0 as fps, must be a positive number"),
        ((frames(0, 2, 32, 32), {"rate": 2}), "has 'rate' beside its frames"),
        ((frames(0, 2, 32, 32), {"frames_indices": [1]}), "has frames_indices that are not 2 integers"),
        ((frames(0, 2, 32, 32), {"do_sample_frames": 1}), "has 1 as do_sample_frames, must be true or false"),
        ((b"GIF89a", {"fps": 1}), "is a file with metadata beside it"),
        (None, "no video of that uuid is kept here"),
    ],
)
def test_videos_that_are_refused(tmp_path, data: Any, fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        processor(tmp_path).process(video(data))
    assert caught.value.param == "here"


def test_frames_of_a_file_are_counted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.media.clips.MAX_FRAMES", 3)
    with pytest.raises(InvalidRequestError, match="has 4 frames or more, must have at most 3; send a shorter one"):
        processor(tmp_path).process(video(animation("GIF")))


def test_frames_of_animations_are_counted_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[None] = []
    for format in ("GIF", "PNG", "WEBP"):
        file = animation(format, 7, duration=50)
        with pytest.raises(InvalidRequestError, match="has 7 frames of 64 x 32 pixels, together 14336"):
            open_clip(file, "here", MediaOptions(mm_max_video_pixels=6 * 2048), lambda: checks.append(None))
        monkeypatch.setattr("jaxllm.media.clips.MAX_ANIMATION_PIXELS", 6 * 2048)
        with pytest.raises(InvalidRequestError, match="is an animation of 7 frames .* send it as MP4 or WebM, or fewer frames"):
            open_clip(file, "here", MediaOptions(), lambda: checks.append(None))
        monkeypatch.undo()
    assert not checks
    for seed in range(20):  # with and without own palettes, transparent parts, comments
        rng = np.random.default_rng(seed)
        images = [picture(24, 16, int(each)).quantize(int(rng.integers(2, 256))) for each in rng.integers(0, 999, 1 + seed % 5)]
        file = encoded(images[0], "GIF", save_all=True, append_images=images[1:], comment=b"!," * seed, duration=seed)
        assert _count_gif_frames(file, 100) == Image.open(io.BytesIO(file)).n_frames  # type: ignore[attr-defined]
        assert _count_gif_frames(file[:-1] + b"\0" * 99 + file[-1:], 100) == Image.open(io.BytesIO(file)).n_frames  # type: ignore[attr-defined]
        for _ in range(20):
            _count_gif_frames(rng.bytes(13) + file[: rng.integers(len(file))], 100)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_a_video_that_nobody_waits_for_ends_at_its_next_frame(format: str) -> None:
    left = [3]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MediaUnwantedError

    with pytest.raises(MediaUnwantedError):
        open_clip(animation(format, 9), "here", MediaOptions(), check)
    left[0] = 9 + 5
    clip = open_clip(animation(format, 9), "here", MediaOptions(), check)
    with pytest.raises(MediaUnwantedError):
        [*clip.read([8])]
    left[0] = 2
    clip = open_clip([picture(8, 8)] * 4, "here", MediaOptions(), check)
    with pytest.raises(MediaUnwantedError):
        [*clip.read(range(4))]


def test_pictures_of_a_script_may_be_in_several_prompts(tmp_path) -> None:
    """Pillow reads them from their files when they are first used."""
    prepare, expected = processor(tmp_path), processor(tmp_path).process(video([picture(64, 32, i) for i in range(4)]))
    files = [Image.open(io.BytesIO(encoded(picture(64, 32, i)))) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(prepare.process, [video((files, {"fps": fps})) for fps in range(1, 9)])]
    for each in found:
        assert [step.payload for step in each.steps] == [step.payload for step in expected.steps]


def test_limits_are_options(tmp_path) -> None:
    file = animation("GIF")
    with pytest.raises(InvalidRequestError, match="must have at most 100; send a smaller one, or raise --mm-max-video-bytes"):
        processor(tmp_path, mm_max_video_bytes=100).process(video(file))
    with pytest.raises(InvalidRequestError, match="4 frames of 64 x 32 pixels, together 8192, .* raise --mm-max-video-pixels"):
        processor(tmp_path, mm_max_video_pixels=8191).process(video(file))
    few = processor(tmp_path, mm_max_patches=256)
    assert few.process(video(frames(0, 2, 640, 640))).grid == (1, 8, 8)


def test_settings_of_videos(tmp_path) -> None:
    given = frames(0, 4, 64, 64)
    assert processor(tmp_path, None).process(video(given)).grid == (2, 4, 4), "without own ones, those of images: 65536 pixels"
    for wrong, fault in (
        ({"video_processor_type": "OtherVideoProcessor"}, "video_processor_type is 'OtherVideoProcessor', known"),
        ({"fps": -1}, "fps is -1, must be a positive number"),
        ({"do_sample_frames": 1}, "do_sample_frames is 1, must be true or false"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "min_pixels of videos is 9, more than max_pixels, 8"),
        ({"patch_size": 14}, "patch_size is 14, but 16 in config.json"),
    ):
        with pytest.raises(ConfigError, match=fault):
            processor(tmp_path, {**SETTINGS, **wrong})
    with pytest.raises(ConfigError, match="videos_kwargs of mm_processor_kwargs is 3, must be an object"):
        processor(tmp_path, mm_processor_kwargs={"videos_kwargs": 3})


def test_frames_of_files_together_have_a_limit_of_pixels() -> None:
    options, files = MediaOptions(mm_max_video_pixels=3000), [encoded(picture(32, 32), "PNG")] * 3
    assert len(open_clip(files[:2], "here", options).seconds) == 2
    with pytest.raises(InvalidRequestError, match="has 3 frames of 32 x 32 pixels, together 3072"):
        open_clip(files, "here", options)


def test_a_later_frame_of_a_gif_is_no_larger_than_an_image_may_be() -> None:
    small, large = (encoded(picture(side, side), "GIF") for side in (16, 64))
    grown = small[:-1] + large[13 + 3 * 256 :]  # of the second its frame alone, without header and palette
    assert open_clip(grown, "here", MediaOptions()).width == 64
    with pytest.raises(InvalidRequestError, match="has 64 x 64 pixels"):
        open_clip(grown, "here", MediaOptions(mm_max_image_pixels=64 * 64 - 1))
