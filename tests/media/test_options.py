from typing import Any

import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media.options import MediaOptions


def test_a_prompt_has_at_most_as_many_images_as_the_limit() -> None:
    MediaOptions().check_count(999)
    with pytest.raises(
        InvalidRequestError, match=r"At most 999 image\(s\) may be provided in one prompt, and this one has 1000"
    ):
        MediaOptions().check_count(1000)
    for limit in (2, {"count": 2}):
        options = MediaOptions(limit_mm_per_prompt={"image": limit})
        options.check_count(2)
        with pytest.raises(
            InvalidRequestError, match="At most 2 image.* has 3; send fewer, or raise --limit-mm-per-prompt"
        ) as caught:
            options.check_count(3, param="messages")
        assert caught.value.param == "messages"
    assert MediaOptions(limit_mm_per_prompt={"image": {}, "video": 0}).max_count() == 999
    with pytest.raises(InvalidRequestError, match=r"At most 0 image\(s\)"):
        MediaOptions(limit_mm_per_prompt={"image": 0}).check_count(1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"limit_mm_per_prompt": {"picture": 1}}, "has 'picture', must have image, video or audio"),
        ({"limit_mm_per_prompt": {"image": -1}}, "says -1 for image, must be a count, not negative"),
        ({"limit_mm_per_prompt": {"image": True}}, "says True for image"),
        ({"limit_mm_per_prompt": {"image": {"count": "4"}}}, "must be a count"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs has 'audio', must have image or video"),
        ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs.video is 3, must be a JSON object"),
        ({"media_io_kwargs": {"video": {"rate": 3}}}, "media_io_kwargs.video has 'rate'; it takes fps and num_frames"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps is 0, must be a positive number"),
        ({"media_io_kwargs": {"video": {"num_frames": 1.5}}}, "num_frames is 1.5, must be a positive number"),
        ({"media_io_kwargs": {"image": 3}}, "media_io_kwargs.image is 3, must be a JSON object"),
        ({"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs.image has 'mode'; it takes rgba_background_color"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0]}}}, "must be three integers from 0 to 255"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 256]}}}, "must be three integers from 0 to 255"),
        ({"mm_processor_cache_gb": -1}, "mm_processor_cache_gb is -1, must be at least 0"),
        ({"mm_max_patches": 100}, "mm_max_patches is 100, must be at least 256"),
        ({"mm_max_image_pixels": 0}, "mm_max_image_pixels is 0, must be at least 1"),
        ({"mm_max_image_bytes": 0}, "mm_max_image_bytes is 0, must be at least 1"),
        ({"mm_fetch_timeout": 0}, "mm_fetch_timeout is 0, must be positive"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MediaOptions(**wrong)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="mm_max_patches is 1, .*; mm_fetch_timeout is -1"):
        MediaOptions(mm_max_patches=1, mm_fetch_timeout=-1)


def test_the_background_is_white_unless_said() -> None:
    assert MediaOptions().background == (255, 255, 255)
    assert MediaOptions(media_io_kwargs={"image": {"rgba_background_color": [1, 2, 3]}}).background == (1, 2, 3)
