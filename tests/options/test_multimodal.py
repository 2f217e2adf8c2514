import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.vllm_compat.flags import as_options


@pytest.mark.parametrize(
    ("limits", "most"),
    [(None, 999), ({"video": 0}, 999), ({"image": 4}, 4), ({"image": {"count": 2}, "audio": 0}, 2)],
)
def test_the_limit_of_images_is_a_number_or_an_object_with_a_count(limits: dict[str, object] | None, most: int) -> None:
    assert EngineConfig.from_options(limit_mm_per_prompt=limits).multimodal.max_count() == most


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit_mm_per_prompt": {"picture": 1}}, "limit_mm_per_prompt has 'picture', must have image"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt says -1 for image"),
        ({"limit_mm_per_prompt": {"image": True}}, "limit_mm_per_prompt says True for image"),
        (
            {"limit_mm_per_prompt": {"image": {"count": 1, "width": 64}}},
            "must be a count or have count alone: memory is planned for",
        ),
        ({"limit_mm_per_prompt": {"image": {}}}, "must be a count or have count alone"),
        ({"media_io_kwargs": {"image": 3}}, "media_io_kwargs.image is 3, must be a JSON object"),
        ({"mm_processor_cache_gb": -1}, "mm_processor_cache_gb is -1, must be at least 0"),
        ({"mm_max_patches": 1}, "mm_max_patches is 1, must be at least 256"),
        ({"mm_max_decode_step_patches": -1}, "mm_max_decode_step_patches is -1, must be at least 0"),
    ],
)
def test_wrong_options_of_images_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_options(**options)


def test_vllms_words_for_images_are_taken_or_refused() -> None:
    assert as_options({"disable_mm_preprocessor_cache": True}) == {"mm_processor_cache_gb": 0.0}
    assert as_options({"mm_hasher_algorithm": "blake3"}) == {"mm_hasher_algorithm": "sha256"}
    assert as_options({"mm_encoder_tp_mode": "data"}) == {}
    for refused in ({"mm_encoder_tp_mode": "weights"}, {"enable_mm_embeds": True}, {"mm_processor_device": "cuda"}):
        with pytest.raises(ConfigError, match="is refused"):
            as_options(refused)
