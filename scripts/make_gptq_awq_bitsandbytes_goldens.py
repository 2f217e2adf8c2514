"""Write tests/goldens/quantization/{gptq,awq,bitsandbytes}.npz: tensors as the formats' own programs write them, and their values.

Needs torch, transformers, gptqmodel and bitsandbytes; made with torch 2.13.0 (CPU), gptqmodel 7.7.0, bitsandbytes 0.50.2.
GPTQMODEL_DISABLE_PACK_EXT=1 keeps gptqmodel from compiling.

The names of a case's arrays are `case/tensor`; `case/values` are float32 weights [8, inputs] of the first four and the last four outputs,
which the program itself makes of the other tensors, with the scales in float32 so that nothing is rounded.
"""

# ruff: noqa: E402

import argparse
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # --help needs none of the packages below
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import bitsandbytes
import numpy as np
import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

Tensors = dict[str, torch.Tensor]
FOLDER = Path(__file__).parent.parent / "tests" / "goldens" / "quantization"
SUBNORMAL = 3e-7
"""A scale that float16 holds with few bits."""


def weights(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    """Weights with a group of zeros and one of tiny numbers in the first two outputs."""
    w = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[0, :32] = 0
    w[1, :32] *= 1e-5
    return w


def scales_and_zeros(w: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, groups] each; asymmetric zeros have 0 and the largest code among them."""
    grouped, largest = w.reshape(len(w), -1, group), 2**bits - 1
    if symmetric:
        scale, zero = grouped.abs().amax(-1) * 2 / largest, torch.full(grouped.shape[:2], (largest + 1) / 2)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / largest
        zero = torch.round(-low / scale.clamp(min=SUBNORMAL)).clamp(0, largest)
        zero[2, 0], zero[3, -1] = 0, largest
    return scale.clamp(min=SUBNORMAL).half().float(), zero


def gptq(bits: int, group: int, symmetric: bool, version: int) -> Tensors:
    """A module as gptqmodel packs it."""
    outputs, inputs = 32, 64
    w = weights(outputs, inputs, bits + version)
    size = inputs if group == -1 else group
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = w
    module = TorchLinear(
        bits=bits,
        group_size=group,
        sym=symmetric,
        desc_act=False,
        in_features=inputs,
        out_features=outputs,
        register_buffers=False,
    )
    module.pack(linear, *scales_and_zeros(w, size, bits, symmetric), torch.arange(inputs, dtype=torch.int32) // size)
    module.eval()
    tensors = {name: getattr(module, name).clone() for name in ("qweight", "scales", "g_idx")}
    module.post_init()
    module.scales = module.scales.float()
    tensors["values"] = module.dequantize_weight().T
    if version == 1:
        convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    return {**tensors, "qzeros": module.qzeros}


def awq(group: int) -> Tensors:
    """A module as AutoAWQ's gemm kernel takes it."""
    outputs, inputs = 32, 64
    w = weights(outputs, inputs, 4)
    size = inputs if group == -1 else group
    scale, zero = scales_and_zeros(w, size, 4, symmetric=False)
    codes = torch.round(w / scale.repeat_interleave(size, 1) + zero.repeat_interleave(size, 1)).clamp(0, 15)
    qweight, qzeros = pack_awq(codes.T.int(), zero.T.int(), 4)
    values = dequantize_gemm(qweight, qzeros, scale.T.contiguous(), 4, size).T
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale.T.half(), "values": values}


def four_bits(kind: str, nested: bool) -> Tensors:
    """A weight of bitsandbytes; nested scales are in two blocks of 256."""
    w = weights(*((36, 512) if nested else (8, 128)), 9)
    codes, state = bitsandbytes.functional.quantize_4bit(w, compress_statistics=nested, quant_type=kind)
    values = bitsandbytes.functional.dequantize_4bit(codes, state)
    beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": codes, **beside, "values": values}


def eight_bits() -> Tensors:
    """A weight of LLM.int8."""
    codes, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(weights(16, 64, 8).half())
    return {"weight": codes, "SCB": scale, "values": bitsandbytes.functional.int8_vectorwise_dequant(codes, scale)}


def write(name: str, cases: dict[str, Tensors]) -> None:
    """Write the cases of a format into its file."""
    for tensors in cases.values():
        tensors["values"] = torch.cat([tensors["values"][:4], tensors["values"][-4:]])
    arrays = {
        f"{case}/{key}": tensor.contiguous().numpy() for case, tensors in cases.items() for key, tensor in tensors.items()
    }
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    named = {
        f"{'sym' if symmetric else 'asym'}{bits}_g{group}_v{version}": gptq(bits, group, symmetric, version)
        for bits, symmetric, group, version in (
            *((4, True, 32, 1), (4, False, 32, 1), (4, True, -1, 2), (4, False, -1, 2)),
            *((8, True, 32, 1), (8, False, 32, 1)),
        )
    }
    write("gptq", named)
    write("awq", {f"g{group}": awq(group) for group in (32, -1)})
    named = {kind: four_bits(kind, nested=False) for kind in ("nf4", "fp4")}
    write("bitsandbytes", {**named, "nf4_nested": four_bits("nf4", nested=True), "int8": eight_bits()})


if __name__ == "__main__":
    main()
