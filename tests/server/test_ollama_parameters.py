"""Parameters that ollama's API tells of checkpoints in 4 and 8 bits: those of the model before it was quantised."""

from pathlib import Path

import pytest

from jaxllm.layers.build import weight_bytes
from jaxllm.loaders import safetensors
from jaxllm.models.load_config import load_model_config
from server.ollama.about import Checkpoint
from tests.helpers import float_formats, goldens
from tests.helpers.quantized import write
from tests.quantization import test_awq, test_bitsandbytes, test_checkpoints, test_compressed_tensors, test_gptq, test_modelopt

BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
STORED = {
    "pack-quantized, zeros": (test_compressed_tensors.described(4, 32, False), test_compressed_tensors.packed(4, 32, False)),
    "pack-quantized, 8 bits": (test_compressed_tensors.described(8, 32, True), test_compressed_tensors.packed(8, 32, True)),
    "gptq": (test_gptq.described(4, 32, False), test_gptq.packed(4, 32, False)),
    "gptq, 8 bits": (test_gptq.described(8, 32, True), test_gptq.packed(8, 32, True)),
    "awq": (test_awq.described(), test_awq.packed()),
    "nf4": (test_bitsandbytes.described(), test_bitsandbytes.packed()),
    "int8": (test_bitsandbytes.described("int8"), test_bitsandbytes.packed("int8")),
    "nvfp4": (test_modelopt.described("NVFP4"), float_formats.modelopt_nvfp4),
    "fp8 blocks": (BLOCKS, test_checkpoints.per_block),
}


@pytest.mark.parametrize("kind", STORED)
def test_parameters_are_counted_whatever_holds_them(tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path, *STORED[kind])
    assert Checkpoint.read(directory).num_parameters == Checkpoint.read(goldens.FOLDER / "llama_gqa").num_parameters


@pytest.mark.parametrize("kind", ["pack-quantized, zeros", "fp8 blocks"])
def test_bytes_of_weights_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    """But for scales of blocks, which are repeated for each output (4 bytes for 32 values here), and zeros, which take a byte."""
    directory = write(tmp_path, *STORED[kind])
    found = weight_bytes(load_model_config(directory, dtype="bfloat16"))
    stored = sum(entry.num_bytes for entry in safetensors.Checkpoint(directory).entries.values())
    assert found == pytest.approx(stored, rel=0.15 if kind == "fp8 blocks" else 0.02)
