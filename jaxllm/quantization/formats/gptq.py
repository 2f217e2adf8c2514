"""Weights in 4 and 8 bits as GPTQ's programs write them.

Sources: arXiv:2210.17323; github.com/AutoGPTQ/AutoGPTQ and github.com/ModelCloud/GPTQModel for the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.quantization.formats.patterns import begins, matches_any, read_names
from jaxllm.quantization.formats.qweight import NUMBER_BY_BITS, SCALE_TYPE, QWeight, read_group
from jaxllm.quantization.numbers import Scheme, nibbles
from jaxllm.weight_format import Files, Options

_VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""By checkpoint_format. Version 1 stores the codes of zero less one."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones, by the bits of a code."""


@dataclass(frozen=True)
class Rule:
    """An element of `dynamic`: how modules are stored whose names begin as a regular expression says; the first that fits counts."""

    pattern: str
    scheme: Scheme | None
    """None: they are not quantised."""


@dataclass(frozen=True, kw_only=True)
class Gptq(QWeight):
    """Codes of 4 or 8 bits."""

    rules: tuple[Rule, ...] = ()
    only: tuple[str, ...] = ()
    """Parts of the names of the modules that are quantised; none: all are."""
    version: int = 1

    methods: ClassVar[tuple[str, ...]] = ("gptq",)
    supported: ClassVar[str] = "4- and 8-bit weights of quant_method gptq (without activation order)"
    unused: ClassVar[str] = r"\.g_idx$"  # checked when codes are read
    unused_zeros: ClassVar[str] = r"_proj\.bias$"  # which AutoGPTQ writes for layers that have none

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        form = "marlin" if given.get("is_marlin_format") else given.get("checkpoint_format") or given.get("format") or "gptq"
        version = _VERSIONS.get(form) if isinstance(form, str) else None
        if version is None:
            faults.append(
                f"checkpoint_format of the GPTQ weights is {form!r}, must be {' or '.join(_VERSIONS)}; give the checkpoint it was made of"
            )
        return cls(
            computes=not options.dequantize and options.quantization is None,
            default=_read_scheme(given, faults),
            rules=_read_rules(given, faults),
            only=_read_only(given.get("modules_in_block_to_quantize"), faults),
            version=version or 1,
        )

    def scheme(self, module: str) -> Scheme | None:
        for rule in self.rules:
            if begins(rule.pattern, module):
                return rule.scheme
        return self.default if not self.only or matches_any(self.only, module) else None

    @classmethod
    def packed_shape(cls, num_outputs: int, num_inputs: int, per_word: int) -> tuple[int, int]:
        return num_inputs // per_word, num_outputs

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        if name == "codes":
            scheme, bits = self._of_module(module)
            _check_order(f"{module}.g_idx", num_inputs, scheme, files)
            if not scheme.zeros:
                zeros, middle = self.zeros(files.tensor(f"{module}.qzeros"), bits), 2 ** (bits - 1)
                if (zeros != middle).any():
                    raise ModelLoadError(
                        f'{module}.qzeros has {zeros[zeros != middle][0]}, symmetric weights have {middle} throughout; say "sym": false, '
                        "or the right checkpoint_format, in the quantization_config of config.json"
                    )
        return super().part(name, module, num_outputs, num_inputs, files)

    @classmethod
    def codes(cls, qweight: np.ndarray, bits: int) -> np.ndarray:
        # Words hold neighbouring inputs, the first in the lowest bits: so do their bytes.
        return np.ascontiguousarray(qweight.T).view(np.uint8)

    def zeros(self, qzeros: np.ndarray, bits: int) -> np.ndarray:
        words = qzeros.view(np.uint32)
        if self.version == 1:
            words = words + np.uint32(_ONES[bits])  # as it was subtracted: from the word, with borrows
        codes = np.ascontiguousarray(words).view(np.uint8)
        return np.stack(nibbles(codes), axis=-1).reshape(len(codes), -1) if bits == 4 else codes


def _check_order(name: str, num_inputs: int, scheme: Scheme, files: Files) -> None:
    """Raise ModelLoadError if the inputs of a group are not neighbours."""
    if name not in files.entries:
        return
    groups = np.arange(num_inputs) // (scheme.group or num_inputs)
    if not np.array_equal(files.tensor(name), groups):
        raise ModelLoadError(
            f"{name} says that the inputs of a group are not neighbours (desc_act, activation order), which is not supported; give a "
            "checkpoint that was made with desc_act false or with static groups"
        )


def _read_scheme(given: Mapping[str, Any], faults: list[str]) -> Scheme:
    bits, group = given.get("bits"), read_group(given, faults, "group_size")
    number = NUMBER_BY_BITS.get(bits) if isinstance(bits, int) else None
    if number is None:
        faults.append(f"the GPTQ weights have {bits!r} bits, must have {' or '.join(map(str, NUMBER_BY_BITS))}")
    return Scheme(number or NUMBER_BY_BITS[4], group, zeros=given.get("sym") is False, scale_type=SCALE_TYPE)


def _read_rules(given: Mapping[str, Any], faults: list[str]) -> tuple[Rule, ...]:
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(each, Mapping) for each in dynamic.values()):
        faults.append(f"dynamic of the GPTQ weights is {shortened(repr(dynamic))}, must be an object of objects by pattern")
        return ()
    patterns = [pattern.removeprefix("+:").removeprefix("-:") for pattern in dynamic]
    if read_names(patterns, "dynamic", faults) != tuple(patterns):
        return ()
    schemes = [None if key.startswith("-:") else _read_scheme({**given, **each}, faults) for key, each in dynamic.items()]
    return tuple(map(Rule, patterns, schemes))


def _read_only(given: Any, faults: list[str]) -> tuple[str, ...]:
    """The names of a list, or of a list of lists."""
    nested = isinstance(given, list) and all(isinstance(each, list) for each in given)
    names = [name for each in given for name in each] if nested else given
    return read_names(names, "modules_in_block_to_quantize", faults, "re:")
