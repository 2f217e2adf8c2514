"""Qwen3-VL with a video and an image in a prompt, against what transformers computed (tests/goldens/qwen3_vl/video.json)."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.layers.patch_indices import patch_indices
from jaxllm.media import Media, MediaOptions
from jaxllm.media.processor import make_processor
from jaxllm.models.load_config import load_model_config
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import engines, pictures, videos, vision_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_checkpoint.write(tmp_path_factory.mktemp("qwen3_vl"), **videos.golden().checkpoint)


def encoded(config, tower, video):
    """[tokens, result_width] of a video whose sides are whole cells."""
    grid, patches = videos.patches(video, config.vision)
    packed = patch_indices(config.vision, [grid], 96).pack()
    padded = np.full((96, patches.shape[1]), 255, np.uint8)
    padded[: len(patches)] = videos.in_order_of_frames(patches, config.vision)
    return np.asarray(pictures._encode(config)(tower, padded, packed))[: len(patches) // config.vision.merge_size**2]


def prepared(directory, video, fps, image, prompt=videos.PROMPT):
    """The token ids of a prompt, and its items, as an engine's front prepares them."""
    config, tokenizer = load_model_config(directory), load_tokenizer(directory)
    processor = make_processor(directory, config.vision, MediaOptions())
    media = [processor.process(Media("video", (video, {"fps": fps}))), processor.process(Media("image", image))]
    ids = tokenizer.encode(processor.expand_text(prompt, media), add_special_tokens=False)
    return processor.expand(ids, media)


def test_features_of_a_video_equal_those_of_transformers(directory):
    config, _, tower = pictures.load(directory)
    found = encoded(config, tower, videos.frames(*videos.golden().video))
    np.testing.assert_allclose(found, videos.golden().features, atol=1e-5)


@pytest.mark.slow
def test_two_equal_frames_are_a_still_picture(directory):
    config, _, tower = pictures.load(directory)
    image = pictures.picture(3, 64, 96)
    still = pictures.encode(config, tower, [image], num_patches=96)
    np.testing.assert_allclose(encoded(config, tower, np.stack([image, image])), still, atol=1e-5)


@pytest.mark.slow
def test_engines_say_what_transformers_says(directory):
    """In steps of at most 16 tokens, which cut time steps of the video, and in one."""
    golden = videos.golden()
    token_ids, items = prepared(directory, videos.frames(*golden.video), golden.fps, pictures.picture(*golden.picture))
    assert token_ids == golden.prompt
    assert [(item.kind, item.grid) for item in items] == [*[("video", (1, 2, 3))] * 3, ("image", (1, 2, 2))]
    core = EngineCore(
        EngineConfig.from_options(
            **{
                **engines.SMALL,
                "model": str(directory),
                "dtype": "float32",
                "max_num_batched_tokens": 112,
                "token_buckets": (16, 112),
                "mm_max_patches": 256,
            }
        )
    )
    for size in (112, 16):
        engines.reschedule(core, max_num_batched_tokens=size)
        made = engines.request("0", token_ids, max_tokens=len(golden.tokens), logprobs=0, prompt_logprobs=0)
        answer = engines.run(core, [replace(made, items=items)])["0"]
        assert answer.tokens == golden.tokens
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], golden.logprobs, atol=1e-4)
        np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], golden.prompt_logprobs, atol=1e-4)
    again = engines.request("1", token_ids, max_tokens=len(golden.tokens))
    answer = engines.run(core, [replace(again, items=items)])["1"]
    assert answer.tokens == golden.tokens and answer.num_cached_tokens == (len(token_ids) - 1) // 16 * 16
    kinds = {key.kind for key in core.runner.programs._compiled}
    core.shutdown()
    assert {"encode", "encode_video"} <= kinds


@pytest.mark.torch
def test_other_videos_equal_transformers_itself(tmp_path):
    torch = pytest.importorskip("torch")
    from scripts.make_video_goldens import VideoReference

    vision_checkpoint.write(tmp_path, "qwen3_vl", seed=78)
    config, text, tower = pictures.load(tmp_path)
    video, image = videos.frames(5, 4, 96, 64), pictures.picture(6, 64, 128)
    prompt = f"{videos.IMAGE}, then {videos.VIDEO}."
    token_ids, items = prepared(tmp_path, video, 0.7, image, prompt)
    given = np.concatenate([pictures.encode(config, tower, [image], num_patches=64), encoded(config, tower, video)])
    found = jax.nn.log_softmax(pictures.logits(config, text, token_ids, items, given, pad_to=96))
    with torch.no_grad():
        reference = VideoReference(tmp_path)
        assert token_ids == reference.tokens(prompt, video, 0.7, image)
        np.testing.assert_allclose(encoded(config, tower, video), reference.video_features(video), atol=1e-5)
        np.testing.assert_allclose(found, reference.logprobs_of(token_ids, video, image).numpy(), atol=1e-4)
