"""Weights in 4 and 8 bits as bitsandbytes writes them.

Sources: arXiv:2305.14314 (nf4), arXiv:2208.07339 (int8); github.com/bitsandbytes-foundation/bitsandbytes for the tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.quantization.formats.packed import PackedFormat
from jaxllm.quantization.formats.patterns import is_skipped, read_names
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import Expected, Files, Options

BLOCK = 64
"""Neighbouring values, of one output here, that share a scale of 4-bit weights."""
_NESTED_BLOCK = 256
"""Scales that share a scale of their own."""
_MAX_STATE = 4096
"""Bytes of JSON."""
_INT8_STEP = np.float32(1 / 127)


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes(PackedFormat):
    """4-bit codes of a table with a scale per block of 64 values, which may be in 8 bits itself; or int8 with a scale per output."""

    number: str
    """nf4, fp4 or int8."""
    nested: bool = False
    """Whether the scales of blocks are in 8 bits."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised, as transformers reads them."""

    methods: ClassVar[tuple[str, ...]] = ("bitsandbytes",)
    supported: ClassVar[str] = "nf4, fp4 and int8 weights of quant_method bitsandbytes"
    unused: ClassVar[str] = r"\.(weight\.quant_state\.bitsandbytes__\w+|weight_format)$"

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        in_4_bits, in_8_bits = (bool(given.get(f"load_in_{bits}bit") or given.get(f"_load_in_{bits}bit")) for bits in (4, 8))
        kind, storage = given.get("bnb_4bit_quant_type") or "fp4", given.get("bnb_4bit_quant_storage") or "uint8"
        if in_4_bits == in_8_bits:
            which = "both" if in_4_bits else "neither"
            faults.append(
                f"the quantization_config of bitsandbytes has {which} of load_in_4bit and load_in_8bit, must have one of them"
            )
        if in_4_bits and kind not in ("nf4", "fp4"):
            faults.append(f"bnb_4bit_quant_type is {kind!r}, must be nf4 or fp4")
        if in_4_bits and storage != "uint8":
            faults.append(f"bnb_4bit_quant_storage is {storage!r}, must be uint8; save the checkpoint with that")
        key = "llm_int8_skip_modules"
        return cls(
            computes=not options.dequantize and options.quantization is None,
            number="int8" if in_8_bits else "nf4" if kind == "nf4" else "fp4",
            nested=in_4_bits and bool(given.get("bnb_4bit_use_double_quant")),
            ignored=read_names(given.get(key), key, faults),
        )

    def scheme(self, module: str) -> Scheme | None:
        if any(is_skipped(pattern, module) for pattern in self.ignored):
            return None
        return Scheme(self.number, None if self.number == "int8" else BLOCK)

    def told(self, dtype: str) -> str:
        return self.told_of(f"bitsandbytes {self.number}", dtype)

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        weight, num_values = f"{module}.weight", num_outputs * num_inputs
        if self.number == "int8":
            return {weight: Expected((num_outputs, num_inputs), ("I8",)), f"{module}.SCB": Expected((num_outputs,), ("F32",))}
        num_blocks = num_values // BLOCK
        found = {
            weight: Expected((num_values // 2, 1), ("U8",)),
            f"{weight}.absmax": Expected((num_blocks,), ("U8" if self.nested else "F32",)),
            f"{weight}.quant_map": Expected((16,), ("F32",)),
        }
        if self.nested:
            found[f"{weight}.nested_absmax"] = Expected((-(-num_blocks // _NESTED_BLOCK),), ("F32",))
            found[f"{weight}.nested_quant_map"] = Expected((256,), ("F32",))
        return found

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        weight = f"{module}.weight"
        if self.number == "int8":
            form = f"{module}.weight_format"
            if form in files.entries and files.tensor(form).any():
                raise ModelLoadError(f"{form} is not 0, the number of rows as they are; save the checkpoint again in that form")
            return files.tensor(weight) if name == "codes" else files.tensor(f"{module}.SCB")[:, None] * _INT8_STEP
        state = self._state(weight, num_outputs, num_inputs, files)
        if name == "codes":
            # The first of two is in the upper half of a byte.
            codes = files.tensor(weight).reshape(num_outputs, -1)
            return codes >> 4 | codes << 4
        absmax = files.tensor(f"{weight}.absmax")
        if self.nested:
            scale = np.repeat(files.tensor(f"{weight}.nested_absmax"), _NESTED_BLOCK)[: len(absmax)]
            absmax = files.tensor(f"{weight}.nested_quant_map")[absmax] * scale + np.float32(state["nested_offset"])
        return absmax.reshape(num_outputs, -1)

    def _state(self, weight: str, num_outputs: int, num_inputs: int, files: Files) -> Mapping[str, Any]:
        """The quant_state of a 4-bit weight. Raises ModelLoadError if it is not as this class reads it."""
        if num_inputs % BLOCK:
            raise ModelLoadError(
                f"{weight} has {num_inputs} inputs, which must be a multiple of {BLOCK}: a block of {self.number} would have values of "
                "several outputs; give the checkpoint it was made of"
            )
        table = files.tensor(f"{weight}.quant_map")
        if not np.array_equal(table, np.array(NUMBERS[self.number].table, np.float32)):
            raise ModelLoadError(f"{weight}.quant_map is not the table of {self.number}; give the checkpoint it was made of")
        name = f"{weight}.quant_state.bitsandbytes__{self.number}"
        if name not in files.entries:
            raise ModelLoadError(
                f"{name} is missing, which says how the weight is stored; download or save the checkpoint again"
            )
        wanted = {"quant_type": self.number, "blocksize": BLOCK, "shape": [num_outputs, num_inputs]}
        wanted |= {"nested_blocksize": _NESTED_BLOCK} if self.nested else {}
        try:
            state = json.loads(files.tensor(name)[:_MAX_STATE].tobytes())
            float(state["nested_offset"] if self.nested else 0)
            given = {key: state[key] for key in wanted}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelLoadError(
                f"{name} cannot be read ({shortened(repr(error))}); download or save the checkpoint again"
            ) from None
        if given != wanted:
            raise ModelLoadError(f"{name} says {shortened(str(given))}, must say {wanted}; give the checkpoint it was made of")
        return state
