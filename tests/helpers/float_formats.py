"""Weights in floats of 4 and 8 bits, as checkpoints of compressed-tensors and ModelOpt hold them, and the same numbers as plain weights."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Quantize = Callable[[str, np.ndarray], dict[str, np.ndarray]]
"""Tensors of the weight of a name."""


def fp4(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers."""
    return (np.abs(np.abs(values)[..., None] - MAGNITUDES).argmin(-1) + 8 * (values < 0)).astype(np.uint8)


def fp4_values(codes: np.ndarray) -> np.ndarray:
    return MAGNITUDES[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in bytes, the even inputs in the lower halves."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _grouped(weight: np.ndarray, group: int) -> np.ndarray:
    return weight.reshape(len(weight), -1, group)


def nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales (e4m3), the factor of the tensor, and the weights that they stand for."""
    factor = np.float32(np.abs(weight).max() / (448 * 6))
    groups = _grouped(weight, 16)
    scale = (np.abs(groups).max(-1) / 6 / factor).astype(E4M3)
    step = scale.astype(np.float32)[..., None] * factor
    codes = fp4(groups / np.where(step == 0, 1, step))
    values = fp4_values(codes) * scale.astype(np.float32)[..., None] * factor
    return pairs(codes.reshape(weight.shape)), scale, factor, values.reshape(weight.shape)


def mx(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (bytes of 4 bits, or e4m3), exponents, and the weights that they stand for."""
    groups, largest = _grouped(weight, 32), {4: 6, 8: 448}[bits]
    exponents = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 1e-30) / largest)).astype(np.int32)
    scaled = np.ldexp(groups, -exponents[..., None])
    codes = fp4(scaled) if bits == 4 else scaled.astype(E4M3)
    values = fp4_values(codes) if bits == 4 else codes.astype(np.float32)
    stored = codes.reshape(weight.shape)
    wide = np.ldexp(values, exponents[..., None]).reshape(weight.shape)
    return pairs(stored) if bits == 4 else stored, (exponents + 127).astype(np.uint8), wide


def fp8(weight: np.ndarray, rows: int | None, columns: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (e4m3), scales of blocks (None: the whole dimension), and the weights that they stand for."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    starts = np.arange(0, weight.shape[0], rows), np.arange(0, weight.shape[1], columns)
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), starts[0], 0), starts[1], 1)
    scale = (largest / 448).astype(np.float32)
    spread = scale.repeat(rows, 0)[: weight.shape[0]].repeat(columns, 1)[:, : weight.shape[1]]
    values = (weight / spread).astype(E4M3)
    return values, scale, values.astype(np.float32) * spread


def compressed_nvfp4(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    codes, scale, factor, _ = nvfp4(weight)
    divisor = np.float32(1) / np.array([factor], np.float32)
    inputs = {name.replace("weight", "input_global_scale"): np.ones(1, np.float32)}
    return {f"{name}_packed": codes, f"{name}_scale": scale, f"{name}_global_scale": divisor, **inputs}


def compressed_mxfp4(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    codes, exponents, _ = mx(weight, 4)
    return {f"{name}_packed": codes, f"{name}_scale": exponents}


def mxfp8(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """As compressed-tensors and ModelOpt store it."""
    codes, exponents, _ = mx(weight, 8)
    return {name: codes, f"{name}_scale": exponents}


def modelopt_nvfp4(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    codes, scale, factor, _ = nvfp4(weight)
    inputs = {name.replace("weight", "input_scale"): np.float32(1)}
    return {name: codes, f"{name}_scale": scale, f"{name}_scale_2": np.array(factor, np.float32), **inputs}


def fp8_per(rows: int | None, columns: int | None, shape: Callable[[np.ndarray], Any] = lambda scale: scale) -> Quantize:
    """shape: brings the scales into the stored shape."""

    def quantize(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        values, scale, _ = fp8(weight, rows, columns)
        return {name: values, f"{name}_scale": shape(scale)}

    return quantize


def widened(make: Callable[[np.ndarray], tuple[np.ndarray, ...]]) -> Quantize:
    """The plain weights: the last that `make` gives."""
    return lambda name, weight: {name: make(weight)[-1].astype(np.float32)}
