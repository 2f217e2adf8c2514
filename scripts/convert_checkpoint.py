"""Convert a Hugging Face safetensors model into an orbax one, which loads faster and straight into sharded arrays.

    python scripts/convert_checkpoint.py MODEL OUTPUT [--dtype bfloat16] [--quantization fp8|int8|int4] [--[no-]dequantize]

MODEL is a local directory, a hub id or 'demo'. OUTPUT gets the weights and copies of the config and tokenizer files.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the weights only pass through; no accelerator is needed

from jaxllm.config import ModelOptions
from jaxllm.errors import JaxLLMError
from jaxllm.hub import resolve_model
from jaxllm.layers.build import build_model
from jaxllm.loaders.encoder import audio_weights, load_encoder, vision_weights
from jaxllm.loaders.load import load_weights
from jaxllm.loaders.orbax import ENCODER
from jaxllm.model_config import DTYPES
from jaxllm.models.load_config import load_model_config, read_config_json
from jaxllm.options.quantization import ONLINE, QUANTIZATION_FILES
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import save_orbax, with_formats

COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*/config.json")


def convert(source: Path, output: Path, dtype: str, quantization: str | None = None, dequantize: bool | None = None) -> None:
    """Raises JaxLLMError if the source cannot be read or the output exists already.

    dequantize: as the engine's option of this name.
    """
    if output.exists() and any(output.iterdir()):
        raise JaxLLMError(f"{output} is not empty; give a new directory")
    if quantization is not None and dequantize is False:
        raise JaxLLMError("a config.json describes one kind of quantisation; leave --quantization or --no-dequantize out")
    # auto is the checkpoint's type, wherever this runs
    dequantize = True if quantization is not None else dequantize
    config = load_model_config(source, dtype=dtype, on_gpu=True, quantization=quantization, dequantize=dequantize)
    mesh, load_format = make_mesh(1), "safetensors"
    state = load_weights(config, build_model(config), source, load_format=load_format, mesh=mesh, progress=show)
    options = ModelOptions(model=str(source))
    encoder = vision_weights(options, config) or audio_weights(options, config)
    if encoder is not None:
        given = {"load_format": load_format, "mesh": mesh, "progress": show}
        save_orbax(config, load_encoder(config, encoder.model, encoder.part, source, **given), output, ENCODER)
    save_orbax(config, state, output)
    for file in sorted({file for pattern in COPIED for file in source.glob(pattern)}):
        # What says how weights were quantised goes into config.json, as far as it is still true.
        if not file.name.endswith(".index.json") and file.name not in QUANTIZATION_FILES:
            copy = output / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
    raw = with_formats(read_config_json(source), config)
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def show(done: int, total: int) -> None:
    """One line that is written over."""
    end = "\n" if done == total else "\r"
    print(f"read {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a safetensors model into an orbax one.")
    parser.add_argument("model", help="local directory, hub id or 'demo'")
    parser.add_argument("output", type=Path, help="directory to write, new or empty")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="type of the weights (default: the model's)")
    parser.add_argument("--quantization", choices=tuple(ONLINE), help="quantise the weights of the decoder's layers")
    parser.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="widen packed weights, or keep them so (default: what an engine does on a GPU)",
    )
    args = parser.parse_args()
    try:
        convert(resolve_model(args.model), args.output, args.dtype, args.quantization, args.dequantize)
    except JaxLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
