"""Qwen 2 Audio: Qwen 2 with the encoder of Whisper, whose positions are averaged in pairs. Source: arXiv:2407.10759."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import AudioTokens, MergerLinear
from jaxllm.models import qwen2, whisper
from jaxllm.models.config_reader import ConfigReader

TOWER, PROJECTOR = "audio_tower.", "multi_modal_projector."
TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
AUDIO_DEFAULTS = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
}


def read(c: ConfigReader) -> ModelConfig:
    text, names, norm = c.text_part()
    text.refuse_unless("model_type", "qwen2")
    text = text.with_defaults(**TEXT_DEFAULTS)
    config = qwen2.read(text, names=names, norm=text.rms_norm(norm))
    tokens = AudioTokens(
        token_id=c.count("audio_token_id", c.count("audio_token_index", 151646)),
        placeholder="<|audio_bos|><|AUDIO|><|audio_eos|>",
        prefix=PROJECTOR,
        linears=(MergerLinear(f"{PROJECTOR}linear", config.hidden_size),),
        num_averaged=2,
    )
    a = c.within("audio_config").with_defaults(**AUDIO_DEFAULTS)
    a.refuse_unless("model_type", "qwen2_audio_encoder")
    return replace(config, audio=whisper.encoder(a, prefix=TOWER, tokens=tokens))
