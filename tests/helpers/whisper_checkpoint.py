"""A tiny random checkpoint of Whisper, written without torch: config, tokenizer, feature extractor, weights; and audio for it.

Clips are a second long. Every parameter is random, those of norms and biases too: values with which models begin a training hide errors.
"""

import io
import json
import math
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scripts.saving import write_safetensors

POSITIONS = 50
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
TIMESTAMPS = tuple(f"<|{i / 50:.2f}|>" for i in range(POSITIONS + 1))
EOS, START, ENGLISH, TRANSCRIBE, NO_SPEECH, NO_TIMESTAMPS = 256, 257, 258, 261, 264, 265
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
WIDTH, LAYERS, HEADS, FFN, BINS = 64, 2, 4, 96, 80
CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 320,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_hidden_layers": LAYERS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": FFN,
    "num_mel_bins": BINS,
    "max_source_positions": POSITIONS,
    "max_target_positions": 112,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dtype": "float32",
    "decoder_start_token_id": START,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}


def write(directory: Path, *, seed: int = 0, gain: float = 2.0) -> Path:
    """The checkpoint. gain: of the decoder's products, the larger the wilder its text."""
    directory.mkdir(parents=True, exist_ok=True)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS, "sampling_rate": 16000}
    extractor |= {"chunk_length": POSITIONS // 50, "hop_length": 160, "n_fft": 400, "padding_value": 0.0}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    files = {"config": CONFIG, "preprocessor_config": extractor, "tokenizer_config": settings}
    files["generation_config"] = {"eos_token_id": EOS, "is_multilingual": True}
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(_tokenizer().to_str(), encoding="utf-8")
    generator = np.random.RandomState(seed)  # of which NumPy never changes what it draws
    tensors = {name: _values(name, shape, generator, gain) for name, shape in sorted(_shapes().items())}
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def clip(seed: int, seconds: float = 1.0) -> np.ndarray:
    """Float32 samples: a few tones and noise."""
    generator = np.random.RandomState(seed)
    time = np.arange(int(16000 * seconds)) / 16000
    tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in generator.uniform(100, 4000, 3))
    return (0.1 * tones + 0.02 * generator.normal(size=len(time))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """A WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, len(samples), "NONE", ""))
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TIMESTAMPS])
    return tokenizer


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        **encoder_shapes("model.encoder"),
        "model.decoder.embed_positions.weight": (CONFIG["max_target_positions"], WIDTH),
        "model.decoder.embed_tokens.weight": (CONFIG["vocab_size"], WIDTH),
    }
    return shapes | _layers("model.decoder", ("self_attn", "encoder_attn"))


def encoder_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of the encoder, whose names begin so."""
    convolutions = {**_biased(f"{prefix}.conv1", (WIDTH, BINS, 3)), **_biased(f"{prefix}.conv2", (WIDTH, WIDTH, 3))}
    return {**convolutions, f"{prefix}.embed_positions.weight": (POSITIONS, WIDTH), **_layers(prefix, ("self_attn",))}


def _layers(prefix: str, attentions: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = _biased(f"{prefix}.layer_norm", (WIDTH,))
    for number in range(LAYERS):
        layer = f"{prefix}.layers.{number}"
        for name in attentions:
            shapes |= _biased(f"{layer}.{name}_layer_norm", (WIDTH,))
            for linear in ("q_proj", "v_proj", "out_proj"):
                shapes |= _biased(f"{layer}.{name}.{linear}", (WIDTH, WIDTH))
            shapes[f"{layer}.{name}.k_proj.weight"] = (WIDTH, WIDTH)
        shapes |= _biased(f"{layer}.final_layer_norm", (WIDTH,))
        shapes |= {**_biased(f"{layer}.fc1", (FFN, WIDTH)), **_biased(f"{layer}.fc2", (WIDTH, FFN))}
    return shapes


def _biased(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _values(name: str, shape: tuple[int, ...], generator: np.random.RandomState, gain: float) -> np.ndarray:
    if name.endswith(".bias"):
        values = generator.normal(0, 0.2, shape)
    elif len(shape) == 1:
        values = generator.uniform(0.5, 1.5, shape)
    elif "embed_positions" in name:
        values = generator.normal(0, 0.5, shape)
    elif "embed_tokens" in name:  # a tied head makes the last token the likeliest next one where its embedding is large
        values = generator.normal(0, gain * 0.03, shape)
    else:
        values = generator.normal(0, (gain if "decoder" in name else 1.0) / math.sqrt(math.prod(shape[1:])), shape)
    return values.astype(np.float32)
