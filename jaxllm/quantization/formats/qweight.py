"""What GPTQ and AWQ have in common: modules of `qweight`, `qzeros` and `scales` with the inputs first, packed in words of 32 bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.quantization.formats.packed import PackedFormat
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import Expected, Files

NUMBER_BY_BITS = {4: "int4", 8: "uint8b128"}
SCALE_TYPE = "float16"
_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class QWeight(PackedFormat):
    """Codes of 4 or 8 bits with a scale, and perhaps the code of zero, per group of inputs that are neighbours, or per output."""

    default: Scheme
    """The scheme of modules for which the checkpoint's configuration has no rule."""

    @classmethod
    def packed_shape(cls, num_outputs: int, num_inputs: int, per_word: int) -> tuple[int, int]:
        """The shape of `qweight`."""
        raise NotImplementedError

    @classmethod
    def codes(cls, qweight: np.ndarray, bits: int) -> np.ndarray:
        """The codes [outputs, inputs]; of 4 bits the bytes [outputs, inputs / 2] of two."""
        raise NotImplementedError

    def zeros(self, qzeros: np.ndarray, bits: int) -> np.ndarray:
        """The codes of zero [groups, outputs]."""
        raise NotImplementedError

    def told(self, dtype: str) -> str:
        return self.told_of(f"{type(self).__name__.upper()}, {self.default}", dtype)

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        scheme, bits = self._of_module(module)
        per_word, num_groups = _WORD_BITS // bits, num_inputs // (scheme.group or num_inputs)
        return {
            f"{module}.qweight": Expected(self.packed_shape(num_outputs, num_inputs, per_word), ("I32",)),
            f"{module}.qzeros": Expected((num_groups, num_outputs // per_word), ("I32",)),
            f"{module}.scales": Expected((num_groups, num_outputs), ("F16", "BF16")),
        }

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        bits = self._of_module(module)[1]
        if name == "codes":
            return self.codes(files.tensor(f"{module}.qweight"), bits)
        if name == "zero":
            return self.zeros(files.tensor(f"{module}.qzeros"), bits).T
        # Those in bfloat16 fit too: below 2^-17 they lose bits, by less than 2^-24.
        return files.tensor(f"{module}.scales").T

    def _of_module(self, module: str) -> tuple[Scheme, int]:
        """How the weights of a module are stored, and the bits of a code."""
        scheme = self.scheme(module)
        assert scheme is not None
        return scheme, NUMBERS[scheme.number].bits


def read_group(given: Mapping[str, Any], faults: list[str], *names: str) -> int | None:
    """The group size, by the first of these names that is there; None: outputs have a scale each."""
    name = next((name for name in names if name in given), names[0])
    size = given.get(name)
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 2 or size % 2:
        faults.append(f"{name} of the quantised weights is {size!r}, must be an even number, or -1 for a scale per output")
        return None
    return size
