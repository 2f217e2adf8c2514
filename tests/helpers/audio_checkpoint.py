"""A tiny random checkpoint of Qwen 2 Audio, written without torch: config, tokenizer, feature extractor, chat template, weights.

Its encoder is as large as that of `whisper_checkpoint`, so the longest clip is a second long; the text model is that of
`vision_checkpoint`. Every parameter is random, those of norms and biases too.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from scripts.saving import write_safetensors
from tests.helpers import vision_checkpoint, whisper_checkpoint

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
ENDOFTEXT, IM_START, IM_END, BOS, AUDIO, EOS = range(256, 262)
CHAT_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""That of the released models, but for the system message."""
TEXT: dict[str, Any] = {key: value for key, value in vision_checkpoint.TEXT.items() if key != "head_dim"}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "dtype": "float32",
    "audio_token_index": AUDIO,
    "text_config": {**TEXT, "model_type": "qwen2", "rope_theta": 10000.0, "eos_token_id": IM_END},
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": whisper_checkpoint.WIDTH,
        "encoder_layers": whisper_checkpoint.LAYERS,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": whisper_checkpoint.FFN,
        "num_mel_bins": whisper_checkpoint.BINS,
        "max_source_positions": whisper_checkpoint.POSITIONS,
    },
}


def write(directory: Path, *, seed: int = 0, gain: float = 2.0, weights: bool = True) -> Path:
    """The checkpoint. gain: of the text model's products, the larger the wilder its text."""
    directory.mkdir(parents=True, exist_ok=True)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": whisper_checkpoint.BINS}
    extractor |= {"sampling_rate": 16000, "chunk_length": whisper_checkpoint.POSITIONS // 50, "hop_length": 160, "n_fft": 400}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {"config": CONFIG, "preprocessor_config": extractor, "generation_config": {"eos_token_id": [IM_END, ENDOFTEXT]}}
    files["tokenizer_config"] = {**settings, "chat_template": CHAT_TEMPLATE}
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(_tokenizer().to_str(), encoding="utf-8")
    if weights:
        generator = np.random.RandomState(seed)  # of which NumPy never changes what it draws
        tensors = {name: _values(name, shape, generator, gain) for name, shape in sorted(_shapes().items())}
        write_safetensors(directory / "model.safetensors", tensors)
    return directory


def _tokenizer() -> Tokenizer:
    tokenizer = vision_checkpoint.byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def _shapes() -> dict[str, tuple[int, ...]]:
    width, text = whisper_checkpoint.WIDTH, CONFIG["text_config"]
    shapes = whisper_checkpoint.encoder_shapes("audio_tower")
    shapes |= {"multi_modal_projector.linear.weight": (text["hidden_size"], width)}
    shapes |= {"multi_modal_projector.linear.bias": (text["hidden_size"],)}
    whole = {**text, "head_dim": text["hidden_size"] // text["num_attention_heads"]}
    return shapes | vision_checkpoint.decoder(whole, "language_model.model", "language_model.lm_head", bias=True)


def _values(name: str, shape: tuple[int, ...], generator: np.random.RandomState, gain: float) -> np.ndarray:
    if name.endswith(".bias"):
        values = generator.normal(0, 0.2, shape)
    elif len(shape) == 1:
        values = generator.uniform(0.5, 1.5, shape)
    elif "embed_positions" in name:
        values = generator.normal(0, 0.5, shape)
    elif "embed_tokens" in name:
        values = generator.normal(0, gain * 0.15, shape)
    else:
        values = generator.normal(0, (gain if "language_model" in name else 1.0) / math.sqrt(math.prod(shape[1:])), shape)
    return values.astype(np.float32)
