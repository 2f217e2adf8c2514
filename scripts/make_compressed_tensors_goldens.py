"""Writes tests/goldens/quantization/compressed_tensors.npz with the package compressed-tensors (0.20.0), which needs torch.

    pip install compressed-tensors torch && python scripts/make_compressed_tensors_goldens.py

For each case, under `name/`: the tensors of a weight as the package stores them, and `expected`, what it makes of them in float32.
Scales are float32 with values of bfloat16.
"""

import argparse
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "quantization" / "compressed_tensors.npz"
CASES = {
    "int4_group": (4, 32, True, "pack-quantized"),
    "int4_group_zeros": (4, 16, False, "pack-quantized"),
    "int4_channel": (4, None, True, "pack-quantized"),
    "int4_channel_zeros": (4, None, False, "pack-quantized"),
    "int8_group": (8, 32, True, "pack-quantized"),
    "int8_group_zeros": (8, 32, False, "pack-quantized"),
    "int8_channel": (8, None, True, "pack-quantized"),
    "int8_plain": (8, None, True, "int-quantized"),
}
"""(bits, group, symmetric, format)."""


def made(bits: int, group: int | None, symmetric: bool, form: str, seed: int) -> dict[str, np.ndarray]:
    """The tensors of a random weight [12, 64], or [12, 36] without groups, with a row of zeros and a row of tiny numbers."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(12, 64 if group else 36, generator=torch.Generator().manual_seed(seed))
    weight[3], weight[5] = 0, weight[5] * 1e-6
    groups = weight.reshape(12, -1, group or weight.shape[1])
    strategy = "group" if group else "channel"
    args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scale = scale.bfloat16().float()
    compressor = BaseCompressor.get_value_from_registry(form)
    given = {"weight": weight, "weight_scale": scale} | ({} if symmetric else {"weight_zero_point": zero})
    stored = {name: tensor for name, tensor in compressor.compress(dict(given), scheme).items() if tensor is not None}
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    return {**{name: tensor.numpy() for name, tensor in stored.items()}, "expected": expected.float().numpy()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cases = {name: made(*case, seed) for seed, (name, case) in enumerate(CASES.items())}
    arrays = {f"{name}/{part}": array for name, tensors in cases.items() for part, array in tensors.items()}
    np.savez_compressed(FILE, **arrays)
    print(f"wrote {FILE}: {FILE.stat().st_size} bytes")
