"""Write tests/goldens/quantization/{modelopt,compressed_tensors_float}.npz: weights in 4 and 8 bits of floats as their own writers store
them, and what these make of them in float32.

    python scripts/make_float_weight_goldens.py [--output DIR]

Needs torch, transformers, nvidia-modelopt (0.47.0 wrote the committed files) and compressed-tensors (0.20.0).

A file holds, by scheme, `SCHEME/config` (JSON: the quantization_config of config.json, and what hf_quant_config.json says), and for two
modules `SCHEME/MODULE/NAME` for each tensor, and `SCHEME/MODULE/expected`. Floats of 8 bits are there as bytes, under NAME.e4m3.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "quantization"
MODELOPT = {
    "FP8": "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_PB_WO": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "MXFP8": "MXFP8_DEFAULT_CFG",
}
"""Names of ModelOpt's recipes by quant_algo."""
MODULES = ("gate_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    modelopt = {name: value for scheme in MODELOPT for name, value in by_modelopt(scheme).items()}
    np.savez_compressed(output / "modelopt.npz", **modelopt)
    schemes = ("NVFP4", "MXFP4", "MXFP8A16", "FP8A16")
    stored = {name: value for scheme in schemes for name, value in by_compressed_tensors(scheme).items()}
    np.savez_compressed(output / "compressed_tensors_float.npz", **stored)


def weight(outputs: int, inputs: int, seed: int) -> "torch.Tensor":
    """Random, with a group of zeros."""
    import torch

    drawn = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05 * (1 + seed)
    drawn[0, :32] = 0
    return drawn.bfloat16()


def by_modelopt(scheme: str) -> dict[str, Any]:
    """A tiny Llama, quantised and exported as a checkpoint."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    is_block = scheme == "FP8_PB_WO"
    hidden, width = (136, 16) if is_block else (32, 32)
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=width,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **heads,
    )
    model = LlamaForCausalLM(config).bfloat16()
    mlp = model.model.layers[0].mlp
    shapes = {name: getattr(mlp, name).weight.shape for name in MODULES}
    for i, (name, shape) in enumerate(shapes.items()):
        getattr(mlp, name).weight.data = weight(shape[0], shape[1], seed=i)
    recipe = getattr(mtq, MODELOPT[scheme])
    if scheme in ("FP8", "NVFP4"):
        recipe = mtq.update_quant_cfg_with_kv_cache_quant(recipe, mtq.FP8_KV_CFG["quant_cfg"])
    model = mtq.quantize(model, recipe, lambda model: model(torch.arange(16)[None]))
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        tensors = load_file(f"{folder}/model.safetensors")
        in_config = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
        beside = json.loads(Path(folder, "hf_quant_config.json").read_text())
    found: dict[str, Any] = {f"{scheme}/config": json.dumps({"quantization_config": in_config, "hf_quant_config": beside})}
    for name, shape in shapes.items():
        prefix = f"model.layers.0.mlp.{name}."
        stored = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        codes, scale = stored["weight"], stored["weight_scale"]
        if "NVFP4" in scheme:
            arguments = {"scale": scale, "double_scale": stored["weight_scale_2"], "block_sizes": {-1: 16}}
            expected = NVFP4QTensor(shape, torch.bfloat16, codes).dequantize(torch.float32, **arguments)
        elif scheme == "MXFP8":
            expected = MXFP8QTensor(shape, torch.bfloat16, codes).dequantize(torch.float32, scale=scale)
        else:
            scale = scale[:, 0, :, 0] if is_block else scale[:, None] if scale.ndim else scale
            blocks = {"block_sizes": {-1: 128, -2: 128}} if is_block else {}
            expected = FP8QTensor(shape, torch.bfloat16, codes).dequantize(torch.float32, scale=scale, **blocks)
        found |= as_numpy(f"{scheme}/{name}", {**stored, "expected": expected})
    return found


def by_compressed_tensors(scheme: str) -> dict[str, Any]:
    """Two weights, compressed each with its own scales."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    formats = {
        "NV": "nvfp4-pack-quantized",
        "MXFP4": "mxfp4-pack-quantized",
        "MXFP8": "mxfp8-quantized",
        "FP8": "float-quantized",
    }
    form = next(form for prefix, form in formats.items() if scheme.startswith(prefix))
    if scheme == "FP8A16":
        numbers = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False)
        described = QuantizationScheme(targets=["Linear"], weights=numbers)
    else:
        described = preset_name_to_scheme(scheme, ["Linear"])
    described.format = form
    config = QuantizationConfig(config_groups={"group_0": described}, format=form, ignore=["lm_head"])
    dumped = config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    found: dict[str, Any] = {f"{scheme}/config": json.dumps({"quantization_config": dumped})}
    args, compressor = described.weights, BaseCompressor.get_value_from_registry(form)
    for i, name in enumerate(MODULES):
        plain = weight(16, 64, i)
        groups = plain.float().reshape(len(plain), -1, args.group_size or plain.shape[1])
        limits = groups.amin(-1), groups.amax(-1)
        whole = generate_gparam(plain.float().min(), plain.float().max()) if form.startswith("nv") else None
        scale, _ = calculate_qparams(*limits, args, global_scale=whole)
        tensors = {"weight": plain, "weight_scale": scale, "weight_zero_point": torch.zeros_like(scale, dtype=torch.int8)}
        tensors |= {} if whole is None else {"weight_global_scale": whole}
        stored = compressor.compress(tensors, described)
        if "weight_packed" in stored:
            values = unpack_fp4_from_uint8(stored["weight_packed"], *plain.shape, dtype=torch.float32)
        else:
            values = stored["weight"].float()
        kept = stored["weight_scale"]
        exact = torch.exp2(kept.float() - 127) if kept.dtype == torch.uint8 else kept.float()
        expected = dequantize(values, exact, args=args, dtype=torch.float32, global_scale=whole)
        found |= as_numpy(f"{scheme}/{name}", {**stored, "expected": expected})
    return found


def as_numpy(prefix: str, tensors: "dict[str, torch.Tensor]") -> dict[str, np.ndarray]:
    import torch

    found = {}
    for name, tensor in tensors.items():
        is_float8 = tensor.dtype == torch.float8_e4m3fn
        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        array = tensor.detach().view(torch.uint8).numpy() if is_float8 else wide.detach().numpy()
        found[f"{prefix}/{name}{'.e4m3' * is_float8}"] = array
    return found


if __name__ == "__main__":
    main()
