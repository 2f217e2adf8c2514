"""Models that hear, with the sizes of public ones or small ones, for dummy weights: their directories without weights."""

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]
"""A config.json."""

WHISPER_LARGE_V3: Config = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "torch_dtype": "bfloat16",
    "vocab_size": 51866,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "num_hidden_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "activation_function": "gelu",
    "scale_embedding": False,
    "decoder_start_token_id": 50258,
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "pad_token_id": 50256,
}
WHISPER_LARGE_V3_TURBO: Config = {**WHISPER_LARGE_V3, "decoder_layers": 4}
WHISPER_SMALL: Config = {
    **WHISPER_LARGE_V3,
    "vocab_size": 51865,
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "num_hidden_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "num_mel_bins": 80,
}


def tiny(config: Config) -> Config:
    """With toy sizes, and clips of a second."""
    sizes = {"vocab_size": 320, "d_model": 64, "max_source_positions": 50, "max_target_positions": 112}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96)
    special = {"decoder_start_token_id": 257} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
    return {**config, **sizes, **special}


def write(directory: Path, config: Config) -> Path:
    """A directory without weights and tokenizer, for `load_format="dummy"` and `skip_tokenizer_init`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return directory
