"""Reading config.json of Qwen 2 Audio."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config

RELEASED: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layerdrop": 0.0,
        "d_model": 1280,
        "activation_function": "gelu",
        "scale_embedding": False,
        "max_source_positions": 1500,
    },
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 156032,
}
"""As the released models have it: the text model's other values are the defaults of transformers."""


def read(directory: Path, config: dict[str, Any], **options: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_model_config(directory, **options)


def test_the_released_models_are_read(tmp_path) -> None:
    config = read(tmp_path, RELEASED)
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.max_position) == (4096, 32, 156032, 8192)
    assert (config.attentions[0].num_kv_heads, config.attentions[0].head_dim, config.norm.eps) == (32, 128, 1e-5)
    audio = config.audio
    assert audio is not None and audio.tokens is not None and not config.attends_to_audio
    assert (audio.num_layers, audio.hidden_size, audio.num_bins, audio.num_samples) == (32, 1280, 128, 480_000)
    assert (audio.tokens.token_id, audio.tokens.output_size, audio.tokens.num_embeddings(1500)) == (151646, 4096, 750)


def test_the_encoder_can_be_left_out(tmp_path) -> None:
    config = read(tmp_path, RELEASED, language_model_only=True)
    assert config.audio is None and config.names.is_other("audio_tower.conv1.weight")


@pytest.mark.parametrize(
    ("part", "name", "value", "told"),
    [
        ("text_config", "model_type", "llama", "model_type is 'llama', supported: 'qwen2'"),
        ("audio_config", "model_type", "whisper", "model_type is 'whisper', supported: 'qwen2_audio_encoder'"),
        ("audio_config", "scale_embedding", True, "scale_embedding is True, supported: False"),
        ("audio_config", "encoder_attention_heads", 7, "encoder_attention_heads is 7, must divide d_model, which is 1280"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, part: str, name: str, value: Any, told: str) -> None:
    config = copy.deepcopy(RELEASED)
    config[part][name] = value
    with pytest.raises(ModelLoadError, match=told):
        read(tmp_path, config)
