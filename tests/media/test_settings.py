"""Image processor settings of checkpoints and options, and those that are refused at the start."""

import json
from typing import Any

import pytest

from jaxllm.errors import ConfigError
from jaxllm.media import load_processor
from jaxllm.media.options import MediaOptions
from jaxllm.media.processor import make_processor
from jaxllm.served_model import ServedModel
from tests.helpers.images import SETTINGS, VISIONS, write_settings


def make(directory, family="qwen3_vl", kwargs: dict[str, Any] | None = None, **changed: Any):
    write_settings(directory, family, **changed)
    return make_processor(directory, VISIONS[family], MediaOptions(mm_processor_kwargs=kwargs))


def test_a_model_of_text_alone_has_no_processor(tmp_path) -> None:
    model = ServedModel("LlamaForCausalLM", 10, 10)
    assert load_processor(tmp_path, model, MediaOptions()) is None
    write_settings(tmp_path, "qwen3_vl")
    seeing = ServedModel("Qwen3VLForConditionalGeneration", 10, 10, vision=VISIONS["qwen3_vl"])
    assert load_processor(tmp_path, seeing, MediaOptions()).vision is VISIONS["qwen3_vl"]


def test_settings_are_read_from_either_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no preprocessor_config.json"):
        make_processor(tmp_path, VISIONS["qwen3_vl"], MediaOptions())
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    write_settings(tmp_path, "qwen3_vl", size={"shortest_edge": 1024, "longest_edge": 2048})
    assert make_processor(tmp_path, VISIONS["qwen3_vl"], MediaOptions()).count_tokens(500, 500) == 1
    inner = {**SETTINGS["qwen3_vl"], "size": {"shortest_edge": 4096, "longest_edge": 4096, "height": None}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert make_processor(tmp_path, VISIONS["qwen3_vl"], MediaOptions()).count_tokens(500, 500) == 4
    (tmp_path / "processor_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        make_processor(tmp_path, VISIONS["qwen3_vl"], MediaOptions())


@pytest.mark.parametrize("family", VISIONS)
@pytest.mark.parametrize("kind", ["", "Fast", "Pil"])
def test_processors_of_transformers_are_known_by_name(tmp_path, family, kind: str) -> None:
    name = SETTINGS[family]["image_processor_type"].removesuffix("Fast")
    expected = make(tmp_path, family).count_tokens(300, 200)
    for given in (name + kind, None):
        assert make(tmp_path, family, image_processor_type=given).count_tokens(300, 200) == expected


@pytest.mark.parametrize(
    ("family", "changed", "text"),
    [
        (
            "qwen3_vl",
            {"image_processor_type": "LlavaImageProcessor"},
            "image_processor_type is 'LlavaImageProcessor', known for this",
        ),
        ("qwen3_vl", {"image_processor_type": ["x"]}, "image_processor_type is"),
        ("gemma3", {"image_processor_type": "PixtralImageProcessor"}, "known for this model: Gemma3ImageProcessor"),
        ("qwen3_vl", {"do_resize": False}, "do_resize is False, must be True"),
        ("qwen3_vl", {"do_normalize": False}, "do_normalize is False, must be True"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is True, must be False"),
        ("qwen3_vl", {"image_mean": [0.4, 0.5, 0.5]}, r"image_mean is \[0.4, 0.5, 0.5\], must be 0.5, 0.5, 0.5"),
        ("qwen3_vl", {"image_std": 10**400}, "image_std is 1000"),
        ("qwen3_vl", {"patch_size": {"height": [16], "width": {}}}, "patch_size is .* but 16 in config.json"),
        ("qwen3_vl", {"image_std": "x"}, "image_std is 'x', must be"),
        ("qwen2_5_vl", {"image_mean": [0.5] * 3}, "image_mean is"),
        ("pixtral", {"rescale_factor": 1}, "rescale_factor is 1, must be 0.0039"),
        ("qwen3_vl", {"patch_size": 14}, "patch_size is 14, but 16 in config.json"),
        ("qwen3_vl", {"patch_size": {"height": 14, "width": 16}}, "patch_size is .* but 16 in config.json"),
        ("qwen3_vl", {"merge_size": 4}, "merge_size is 4, but 2 in config.json"),
        ("qwen3_vl", {"temporal_patch_size": 1}, "temporal_patch_size is 1, but 2 in config.json"),
        ("qwen3_vl", {"size": 5}, "size is 5, must be an object with shortest_edge, longest_edge"),
        ("qwen3_vl", {"size": {"height": 5}}, "size has 'height', must have shortest_edge"),
        ("qwen3_vl", {"size": {"shortest_edge": 0}}, "size.shortest_edge is 0, must be a positive integer"),
        ("qwen3_vl", {"min_pixels": "x"}, "min_pixels is 'x', must be a positive integer"),
        ("qwen3_vl", {"max_pixels": 2**31}, "max_pixels is 2147483648, must be a positive integer up to 2147483647"),
        ("qwen3_vl", {"max_pixels": 1024, "min_pixels": 2048}, "min_pixels is 2048, more than max_pixels, 1024; lower it"),
        ("qwen3_vl", {"min_pixels": 5_000_000}, "more than 4194304, the pixels of mm_max_patches=16384; lower it"),
        ("qwen3_vl", {"resample": 9}, r"resample is 9, must be one of 0 \(NEAREST\)"),
        ("gemma3", {"size": {"height": 448, "width": 448}}, "must be 896 x 896, which the encoder has positions for"),
        ("gemma3", {"size": {"height": 896, "width": 448}}, "must be 896 x 896"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, family, changed: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path, family, **changed)


def test_options_are_laid_over_the_file(tmp_path) -> None:
    assert make(tmp_path).count_tokens(1920, 1080) == 2040
    assert make(tmp_path, kwargs={"max_pixels": 100 * 1024}).count_tokens(1920, 1080) <= 100
    size = {"shortest_edge": 3136, "longest_edge": 300_000}
    small = make(tmp_path, "qwen2_5_vl", kwargs={"size": size})  # whose file has max_pixels
    assert small.count_tokens(1920, 1080) <= 300_000 // 784
    assert make(tmp_path, "qwen2_5_vl", kwargs={"size": size, "max_pixels": 100_000}).count_tokens(1920, 1080) <= 100_000 // 784
    assert make(tmp_path, "gemma3", kwargs={"do_pan_and_scan": False}).count_tokens(9, 9) == 256
    with pytest.raises(
        ConfigError, match="mm_processor_kwargs has 'fps'; of this model it takes min_pixels, max_pixels, size, resample"
    ):
        make(tmp_path, kwargs={"fps": 2})
    with pytest.raises(ConfigError, match="do_resize is False, must be True"):
        make(tmp_path, kwargs={"do_resize": False})
    with pytest.raises(ConfigError, match="max_pixels is -1, must be a positive integer"):
        make(tmp_path, kwargs={"max_pixels": -1})


def test_the_patch_size_of_the_file_does_not_matter_to_pixtral(tmp_path) -> None:
    assert make(tmp_path, "pixtral", patch_size={"height": 16, "width": 16}).count_tokens(1920, 1080) == 31 * 55 + 31


def test_unknown_keys_of_files_change_nothing(tmp_path) -> None:
    assert make(tmp_path, unheard_of=[1], auto_map={"x": "y"}).count_tokens(1920, 1080) == 2040
