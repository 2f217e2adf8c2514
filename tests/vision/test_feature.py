"""Options that exclude images, and sizes of the encoder cache."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import features
from jaxllm.engine.features import Features
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Vision
from jaxllm.models.load_config import load_model_config
from jaxllm.runner import features as step_features
from jaxllm.vision import make_items
from jaxllm.vision.feature import Images
from tests.helpers import engines, goldens

QWEN = Vision(
    "qwen3_vl", 5, patch_size=16, merge_size=2, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, output_size=64
)
GEMMA = replace(QWEN, family="gemma3", merge_size=4, position_grid=64, patch_size=14, attends_within=True)


def config_of(**options: object) -> EngineConfig:
    model = str(goldens.golden("llama_gqa").directory)
    return EngineConfig.from_options(**{**engines.SMALL, "model": model, "max_num_batched_tokens": 2048, **options})


def model_of(vision: Vision | None) -> ModelConfig:
    return replace(load_model_config(goldens.golden("llama_gqa").directory), vision=vision)


def made(vision: Vision | None = QWEN, **options: object) -> Images | None:
    return make_items(config_of(**options), model_of(vision))


def features_of(config: EngineConfig, vision: Vision | None) -> Callable[[], Features]:
    return lambda: Features.of(config, model_of(vision), None, None)  # type: ignore[arg-type]


def test_models_of_text_alone_have_no_images() -> None:
    assert made(None, pipeline_parallel_size=2) is None


def test_sizes_follow_the_largest_image_and_each_scheduler_has_its_own_room() -> None:
    items = made()
    sizes = items.sizes
    assert (sizes.max_item_patches, sizes.max_step_patches, sizes.num_pages) == (16384, 8192, 2 * 16384 // 4 // 64)
    assert items.new_room() is not items.new_room() and items.new_room().item_kinds == ("image", "video")
    assert items.described["num_pages"] == 128
    small = made(mm_max_patches=1000).sizes
    assert (small.max_item_patches, small.num_pages) == (1000, 2 * 8192 // 4 // 64)


def test_by_default_an_ordinary_image_of_every_family_fits() -> None:
    def most(**fields: object) -> int:
        items = made(replace(QWEN, **fields))  # type: ignore[arg-type]
        assert items is not None
        return items.sizes.max_item_patches

    assert most(family="idefics3", position_grid=32, has_tiles=True) == 17 * 32**2, "SmolVLM's tiles of 512 pixels"
    assert most(family="idefics3", position_grid=27, has_tiles=True, patch_size=14) == 16384, (
        "17 tiles of 378 pixels have fewer"
    )
    assert most(family="internvl", position_grid=32, has_tiles=True) == 16384, "13 tiles"
    assert most(family="pixtral") == 16384


def test_images_are_cut_unless_their_tokens_see_each_other_or_the_option_says_no() -> None:
    assert made().whole_tokens == 0 and made().new_room().min_chunk == 1
    assert made(mm_max_patches=4096, disable_chunked_mm_input=True).whole_tokens == 1024
    pixtral = replace(QWEN, family="pixtral")
    assert made(pixtral, mm_max_patches=4096, disable_chunked_mm_input=True, max_num_batched_tokens=1500).whole_tokens == 1500
    tiles = replace(QWEN, family="idefics3", position_grid=32, has_tiles=True)
    assert made(tiles, mm_max_patches=4096, disable_chunked_mm_input=True).whole_tokens == 2048
    gemma = made(GEMMA)
    assert gemma.whole_tokens == gemma.new_room().min_chunk == 256 and gemma.sizes.max_item_patches == 4096


def make_drafter(config: EngineConfig, model_config: ModelConfig) -> SimpleNamespace:
    """A speculation whose drafter has layers if it is to propose three tokens."""
    layers = model_config.layers if config.speculative.speculative_config == {"num_speculative_tokens": 3} else ()
    return SimpleNamespace(drafter=SimpleNamespace(layers=layers))


@pytest.mark.parametrize(("num_drafts", "is_refused"), [(2, False), (3, True)])
def test_drafters_with_layers_do_not_see_images(monkeypatch, num_drafts, is_refused) -> None:
    monkeypatch.setattr(features, "DRAFTERS", f"{__name__}:make_drafter")
    config = config_of(speculative_config={"num_speculative_tokens": num_drafts})
    sees, text = (features_of(config, vision) for vision in (QWEN, None))
    assert not text().items
    if is_refused:
        with pytest.raises(
            ConfigError, match="speculative_config .* LlamaForCausalLM takes images or audio; use the method ngram, or set"
        ):
            sees()
    else:
        assert [*sees().items] == ["jaxllm.vision"]


@pytest.mark.parametrize("lacking", ["images", "rope_delta"])
def test_a_build_whose_steps_have_no_images_takes_text_alone(monkeypatch, lacking) -> None:
    monkeypatch.setattr(step_features, "FEATURES", tuple(name for name in step_features.FEATURES if name != lacking))
    with pytest.raises(
        ConfigError, match="takes images or audio, but the steps of this build take none; set language_model_only"
    ):
        features_of(config_of(), QWEN)()
    assert not features_of(config_of(), None)().items


@pytest.mark.parametrize(
    ("vision", "options", "told"),
    [
        (QWEN, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but LlamaForCausalLM sees images, and stages"),
        (QWEN, {"prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4, .*; leave the option out, or set language"),
        (QWEN, {"disable_chunked_mm_input": True}, "all 4096 tokens of an image, but max_num_batched_tokens is 2048; .* mm_max_patches"),
        (GEMMA, {"max_num_batched_tokens": 64}, "see each other, so a step computes all 256 tokens .* is 64; raise it$"),
        (
            QWEN,
            {"nnodes": 2, "data_parallel_size": 8, "enable_expert_parallel": True, "mm_max_patches": 65536},
            "mm_max_patches is 65536: .* each of 8 data-parallel ranks a step sends 384 MiB .* may send 128; lower it to 21845",
        ),
        (
            replace(QWEN, temporal_patch_size=2),
            {"nnodes": 2, "data_parallel_size": 16, "enable_expert_parallel": True, "mm_max_patches": 5461},
            "8192 patches for each of 16 .* sends 192 MiB .*; use at most 10 ranks, with mm_max_patches up to 8192, or set language",
        ),
    ],
)  # fmt: skip
def test_options_that_exclude_images_are_refused(vision, options, told) -> None:
    with pytest.raises(ConfigError, match=told):
        made(vision, **options)
