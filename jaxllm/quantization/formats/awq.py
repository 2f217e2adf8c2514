"""Weights in 4 bits as AWQ's programs write them for the gemm kernel.

Sources: arXiv:2306.00978; github.com/casper-hansen/AutoAWQ for the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.quantization.formats.patterns import read_names
from jaxllm.quantization.formats.qweight import SCALE_TYPE, QWeight, read_group
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Options

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where a word has each of its eight outputs, the place of the lowest four bits being 0."""
_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)


@dataclass(frozen=True, kw_only=True)
class Awq(QWeight):
    """Codes of 4 bits, whose groups have the code of zero, also where the configuration has no zero points: it is 8 there."""

    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of their names, not only whole ones between dots, as AutoAWQ reads them."""

    supported: ClassVar[str] = "4-bit weights of quant_method awq (version gemm)"

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        return given.get("quant_method") == "awq"

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        bits = given.get("bits", given.get("w_bit"))
        version = next(filter(None, map(given.get, ("version", "format", "checkpoint_format"))), "gemm")
        if bits != 4:
            faults.append(f"the AWQ weights have {bits!r} bits, must have 4")
        if not isinstance(version, str) or version.lower() != "gemm":
            faults.append(f"version of the AWQ weights is {version!r}, must be gemm; give the checkpoint in that version")
        key = "modules_to_not_convert"
        return cls(
            computes=not options.dequantize and options.quantization is None,
            default=Scheme("int4", read_group(given, faults, "group_size", "q_group_size"), zeros=True, scale_type=SCALE_TYPE),
            ignored=read_names(given.get(key), key, faults, "re:"),
        )

    def scheme(self, module: str) -> Scheme | None:
        return None if any(part in f"{module}." for part in self.ignored) else self.default

    @classmethod
    def packed_shape(cls, num_outputs: int, num_inputs: int, per_word: int) -> tuple[int, int]:
        return num_inputs, num_outputs // per_word

    @classmethod
    def codes(cls, qweight: np.ndarray, bits: int) -> np.ndarray:
        words = np.ascontiguousarray(qweight.T).view(np.uint32)
        even, odd = words[:, 0::2], words[:, 1::2]
        # Bytes of two inputs each: of the outputs in the even places of a word, and of those in the odd ones.
        halves = (even & _LOW | (odd & _LOW) << 4, (even >> 4) & _LOW | odd & _HIGH)
        pairs = np.stack([halves[place % 2].view(np.uint8)[:, place // 2 :: 4] for place in _PLACES], axis=1)
        return pairs.reshape(-1, pairs.shape[-1])

    def zeros(self, qzeros: np.ndarray, bits: int) -> np.ndarray:
        codes = (qzeros[:, :, None] >> 4 * _PLACES & 15).astype(np.uint8)
        return codes.reshape(len(qzeros), -1)
