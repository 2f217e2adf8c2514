"""Hashes, the cache, settings of requests, and what else `MediaProcessor` does around the preparation of an image."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media
from tests.helpers.images import encoded, media, picture, pixels, processor

NAME = "messages[0].content[1]"


def refusal(prepare, item: Media, kwargs: dict | None = None) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare.process(item, kwargs)
    return caught.value


def test_files_images_and_arrays_give_the_same_patches(tmp_path) -> None:
    prepare = processor(tmp_path)
    by_form = [prepare.process(media(data)) for data in (encoded(picture(90, 70)), picture(90, 70), pixels(90, 70))]
    assert len({item.payload for item in by_form}) == 1
    file, image, array = (item.content_hash for item in by_form)
    assert image == array != file and len(file) == 32


def test_equal_hashes_mean_equal_content_and_settings(tmp_path) -> None:
    image = picture(90, 70)
    transparent = Image.fromarray(np.dstack([pixels(90, 70), pixels(90, 70)[..., 0]]))
    usual = {"min_pixels": 4096}
    variants = [
        ("qwen3_vl", {}, media(image)),
        ("qwen3_vl", {}, media(picture(90, 70, seed=1))),
        ("qwen3_vl", {}, media(encoded(image))),
        ("qwen3_vl", {}, media(encoded(image, "BMP"))),
        ("qwen3_vl", {}, media(image, uuid="a")),
        ("qwen3_vl", {}, media(image, uuid="b")),
        ("qwen3_vl", {"mm_processor_kwargs": usual}, media(image)),
        ("qwen3_vl", {"mm_processor_kwargs": {**usual, "resample": 1}}, media(image)),
        ("qwen3_vl", {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}, media(encoded(transparent))),
        ("qwen3_vl", {}, media(encoded(transparent))),
        ("qwen3_vl", {"mm_hasher_algorithm": "sha512"}, media(image)),
        ("qwen2_5_vl", {}, media(image)),
        ("pixtral", {}, media(image)),
    ]
    hashes = [processor(tmp_path, family, **options).process(item).content_hash for family, options, item in variants]
    assert len(set(hashes)) == len(variants) and {len(each) for each in hashes} == {32}
    again = [processor(tmp_path, family, **options).process(item).content_hash for family, options, item in variants]
    assert again == hashes


def test_pixels_of_another_shape_have_another_hash(tmp_path) -> None:
    prepare = processor(tmp_path)
    flat = np.full((40, 60, 3), 9, np.uint8)
    one, other = prepare.process(media(flat)), prepare.process(media(flat.reshape(60, 40, 3)))
    assert one.content_hash != other.content_hash


def test_a_uuid_replaces_the_content_but_not_the_grid(tmp_path) -> None:
    prepare, elsewhere = processor(tmp_path), processor(tmp_path)
    first = prepare.process(media(picture(90, 70), uuid="a"))
    assert prepare.process(media(picture(90, 70, seed=1), uuid="a")) is first
    assert prepare.process(media(None, uuid="a")) is first
    assert elsewhere.process(media(picture(90, 70, seed=1), uuid="a")).content_hash == first.content_hash
    assert processor(tmp_path).process(media(picture(900, 70), uuid="a")).content_hash != first.content_hash
    assert "no image of that uuid is kept here; send its content" in str(refusal(prepare, media(None, uuid="b")))
    assert refusal(prepare, media(None)).param == NAME
    prepare.process(media(picture(9, 9), uuid="\ud800"))


def test_an_image_sent_again_is_not_prepared_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = processor(tmp_path)
    data = encoded(picture(90, 70))
    first = prepare.process(media(data))
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("it was opened again"))
    assert prepare.process(media(data, name="elsewhere")) is first
    assert (prepare.cache.num_queries, prepare.cache.num_hits) == (2, 1)


def test_the_cache_keeps_what_was_used_last_up_to_its_bytes(tmp_path) -> None:
    size = len(processor(tmp_path).process(media(picture(64, 64))).payload)
    prepare = processor(tmp_path, mm_processor_cache_gb=2.5 * size / 2**30)
    one, two, three = (media(picture(64, 64, seed)) for seed in range(3))
    kept = [prepare.process(item) for item in (one, two)]
    assert prepare.process(one) is kept[0]
    prepare.process(three)
    prepare.cache.check_integrity()
    assert len(prepare.cache) == 2
    assert prepare.process(one) is kept[0]
    assert prepare.process(two) is not kept[1]
    prepare.process(media(picture(520, 500)))  # larger than the cache
    prepare.cache.check_integrity()
    assert len(prepare.cache) == 2
    nothing = processor(tmp_path, mm_processor_cache_gb=0)
    assert nothing.process(one) is not nothing.process(one)
    assert len(nothing.cache) == nothing.cache.num_bytes == 0


def test_threads_share_a_processor(tmp_path) -> None:
    data = [encoded(picture(200 + seed, 100, seed)) for seed in range(6)]
    expected = [processor(tmp_path).process(media(each)).content_hash for each in data]
    prepare = processor(tmp_path, mm_processor_cache_gb=3e-4)
    start = threading.Barrier(4)

    def run(thread: int) -> list[bytes]:
        start.wait()
        return [prepare.process(media(data[(thread + turn) % 6])).content_hash for turn in range(30)]

    with ThreadPoolExecutor(4) as pool:
        for thread, found in enumerate(pool.map(run, range(4))):
            assert found == [expected[(thread + turn) % 6] for turn in range(30)]
    prepare.cache.check_integrity()
    assert prepare.cache.num_queries == 120


def test_threads_share_an_image_that_is_not_loaded_yet(tmp_path) -> None:
    data = encoded(picture(800, 600), "JPEG")
    expected = processor(tmp_path).process(media(Image.open(io.BytesIO(data)))).payload
    for _ in range(5):
        prepare, lazy = processor(tmp_path, mm_processor_cache_gb=0), media(Image.open(io.BytesIO(data)))
        with ThreadPoolExecutor(4) as pool:
            assert {item.payload for item in pool.map(lambda _, p=prepare, m=lazy: p.process(m), range(8))} == {expected}


def test_settings_of_requests_need_trust(tmp_path) -> None:
    item = media(picture(640, 480))
    closed = processor(tmp_path)
    assert closed.process(item, {}) is closed.process(item, None)
    error = refusal(closed, item, {"max_pixels": 65536})
    assert error.param == "mm_processor_kwargs" and "--trust-request-mm-kwargs" in str(error)
    trusting = processor(tmp_path, trust_request_mm_kwargs=True, mm_max_patches=1024)
    usual, small = trusting.process(item), trusting.process(item, {"max_pixels": 65536})
    assert small.num_tokens <= 64 < usual.num_tokens <= 256 and small.content_hash != usual.content_hash
    assert trusting.process(item, {"max_pixels": 10**9}).num_tokens == usual.num_tokens
    for wrong in (
        {"max_pixels": 0},
        {"fps": 1},
        {"size": {"height": 3}},
        {"min_pixels": 10**8},
        {"max_pixels": float("nan")},
        {"x": object()},
    ):
        assert refusal(trusting, item, wrong).param == "mm_processor_kwargs"


def test_other_kinds_and_types_are_refused(tmp_path) -> None:
    prepare = processor(tmp_path)
    error = refusal(prepare, Media("video", b"", None, NAME))
    assert error.param == NAME and "is of kind video; this model takes text and images" in str(error)
    error = refusal(prepare, media("image.png"))
    assert error.param == NAME and "is a str, must be the bytes of a file, a Pillow image, or an array of uint8" in str(error)


def test_images_of_scripts_obey_the_limits_too(tmp_path) -> None:
    prepare = processor(tmp_path, mm_max_image_pixels=10_000)
    assert "has 200 x 100 pixels, 20000, must have at most 10000" in str(refusal(prepare, media(picture(200, 100))))
    assert "must have at most 10000" in str(refusal(prepare, media(pixels(200, 100))))
    assert "has 0 x 5 pixels, must have at least 1 x 1" in str(refusal(prepare, media(Image.new("RGB", (0, 5)))))
    assert "200 times" in str(refusal(prepare, media(pixels(1000, 1))))
    data = encoded(picture(80, 60), "JPEG")
    broken = Image.open(io.BytesIO(data[: len(data) // 2]))
    assert "is damaged or incomplete: its JPEG data cannot be decoded" in str(refusal(prepare, media(broken)))
