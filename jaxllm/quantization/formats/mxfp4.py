"""Experts in MXFP4, as gpt-oss is released: computed from the 4 bits, or widened while loading."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import AnySource, Index, Source, Tensor
from jaxllm.quantization.formats.patterns import begins, read_names
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import (
    WHOLE,
    Array,
    Arrays,
    Draw,
    Expected,
    Files,
    Options,
    ParamSpec,
    Reader,
    WeightFormat,
    WeightSpec,
)

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig

BLOCK = 32
"""Values that share a scale."""
LARGEST_EXPONENT = 191
"""Largest exponent of a scale with which kernels can compute: 2^64."""
_BIAS = 127
_DUMMY_EXPONENT = 120
"""Of 2^-7: the values without a scale have a deviation of 2.9."""


def _sources(plain: AnySource) -> tuple[Source, Source]:
    """The bytes of the values and of the scales of a parameter whose plain tensor, of all experts, is [E, inputs, *outputs]: both have
    the inputs last."""
    assert isinstance(plain, Source)
    (tensor,) = plain.tensors
    experts, inputs, *outputs = tensor.view
    rows, num_blocks, last = (experts, math.prod(outputs)), inputs // BLOCK, len(tensor.view) - 1
    permutation = tuple(last if i == 1 else max(i - 1, 0) for i in plain.permutation)

    def source(kind: str, stored: tuple[int, ...], num_bytes: int) -> Source:
        view = (experts, *outputs, num_bytes)
        return Source((Tensor(f"{tensor.name}_{kind}", (*rows, *stored), view, picks=tensor.picks),), 0, permutation)

    return source("blocks", (num_blocks, BLOCK // 2), inputs // 2), source("scales", (num_blocks,), num_blocks)


@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """4-bit floats (e2m1), 32 of which share a scale that is a power of two; nothing but experts is quantised.

    Where products are computed from the 4 bits, words and exponents stand in the model, as `pallas_kernels.grouped_matmul.mxfp4` has
    them; in tiles, the arrays of `pallas_kernels.quantized_matmul.Packed`, which files never have.
    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
    """

    computes: bool
    """Whether products are computed from the 4 bits; else weights are widened while they are loaded."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: regular expressions of how their names begin, or how they end."""
    size: int = 1
    """Devices that layers are split over."""
    tiles: bool = False
    """Whether weights are in tiles."""
    layout: Any = None
    """The order of this weight's arrays, a `jaxllm.quantization.tiles.Tiled`; None: as stored."""

    weight_scheme: ClassVar[Scheme] = Scheme("e2m1", BLOCK, scale_type="uint8")
    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)
    supported: ClassVar[str] = "experts of quant_method mxfp4"
    may_widen: ClassVar[bool] = True

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        key = "modules_to_not_convert"
        widens = options.dequantize if options.dequantize is not None else not (options.on_gpu and options.dtype == "bfloat16")
        return cls(not widens, read_names(given.get(key), key, faults))

    def covers(self, module: str) -> bool:
        return not any(begins(pattern, module) or module.endswith(pattern) for pattern in self.ignored)

    def faults(self, config: "ModelConfig") -> list[str]:
        if not config.mixtures or not all(part.alternating for part in config.mixtures):
            return ["the weights are quantised with quant_method 'mxfp4', supported for experts as gpt-oss has them"]
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.mixtures[0].width}
        return [
            f"{name} is {size}, must be a multiple of 32, the block of mxfp4" for name, size in sizes.items() if size % BLOCK
        ]

    def indivisible(self, config: "ModelConfig", size: int) -> str:
        if not self.computes or all(part.by_expert or part.width // size % BLOCK == 0 for part in config.mixtures):
            return ""
        return (
            f"experts of width {max(part.width for part in config.mixtures)} in 4 bits have blocks of {BLOCK} that {size} devices cannot "
            f"share: they become {config.dtype}, which takes four times the memory; with --enable-expert-parallel they stay in 4 bits"
        )

    def split(self, config: "ModelConfig", size: int) -> Self:
        return replace(self, size=size, tiles=False, computes=self.computes and not self.indivisible(config, size))

    def in_tiles(self) -> Self:
        return replace(self, tiles=self.computes)

    @property
    def stored_parts(self) -> Mapping[str, ParamSpec] | None:
        return None if self.layout is None else self.layout.stored

    def laid_out(self, arrays: Arrays, parts: Mapping[str, ParamSpec], mesh: Any) -> Arrays:
        from jaxllm.quantization.mxfp4 import codes_and_scales

        assert self.layout is not None
        return self.layout.lay_out(arrays, parts, self.weight_scheme, mesh, codes_and_scales)

    @property
    def expert_type(self) -> str | None:
        return "float4_e2m1fn" if self.computes and not self.tiles else None

    def told(self, dtype: str) -> str:
        return "" if self.computes else f"the checkpoint's 4-bit weights of experts (MXFP4) become {dtype}"

    def declare(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        plain = weight.plain
        if weight.modules or not isinstance(plain.source, Source) or not self.covers(plain.source.tensors[0].name):
            return None
        if not self.computes:
            return {WHOLE: plain}
        if not self.tiles:
            return self._declare_stored(plain)
        return self._tiled(weight).declare(weight, self.weight_scheme, self.size)

    def of(self, weight: WeightSpec) -> Self:
        return replace(self, layout=self._tiled(weight)) if self.tiles else self

    def _tiled(self, weight: WeightSpec) -> Any:
        from jaxllm.quantization.tiles import Tiled

        *lead, outputs, inputs = weight.plain.shape
        if weight.split_outputs is not None:
            outputs //= self.size
        if weight.splits_inputs:
            inputs //= self.size
        num_groups = max(2, inputs // BLOCK)  # see mxfp4.codes_and_scales
        return Tiled((outputs,), inputs, num_groups, len(lead), self._declare_stored(weight.plain))

    def _declare_stored(self, plain: ParamSpec) -> dict[str, ParamSpec]:
        values, scales = _sources(plain.source)
        *lead, outputs, inputs = plain.shape
        *lead_axes, outputs_axis, inputs_axis = plain.axes
        *others, last, blocks = scales.permutation
        scales = replace(scales, permutation=(*others, blocks, last))
        axes = (*lead_axes, inputs_axis, outputs_axis)
        return {
            "words": ParamSpec((*lead, outputs, inputs // 4), plain.axes, "uint16", values),
            "exponents": ParamSpec((*lead, inputs // BLOCK, outputs), axes, "uint8", scales),
        }

    def operand(self, arrays: Arrays) -> Any:
        if self.layout is not None:
            return self.layout.operand(arrays, self.weight_scheme)
        from pallas_kernels.grouped_matmul import mxfp4

        return mxfp4.Mxfp4(arrays["words"], arrays["exponents"])

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        whole = parts.get(WHOLE)
        sources = _sources(whole.source) if whole is not None else [spec.source for spec in parts.values()]
        return {tensor.name: Expected(tensor.shape, ("U8",)) for source in sources for tensor in source.tensors}

    def load(self, reader: Reader, parts: Mapping[str, ParamSpec]) -> Iterator[tuple[str, Array]]:
        from jaxllm.quantization import mxfp4

        if WHOLE in parts:
            spec = parts[WHOLE]
            values, scales = _sources(spec.source)

            def widen(index: Index, device: Any) -> Array:
                """Widen the blocks that contain a device's part of the parameter."""
                start, stop, _ = index[-1].indices(spec.shape[-1])
                first, end = start // BLOCK, -(-stop // BLOCK)
                stored = []
                for source, size in ((values, BLOCK // 2), (scales, 1)):
                    covering = source.index_of((*index[:-1], slice(first * size, end * size)))
                    stored.append(reader.stored(source.tensors[0], covering))
                return mxfp4.widen_part(stored, device, values.permutation, start % BLOCK, stop - start, spec.dtype)

            yield WHOLE, reader.by_device(spec, widen)
            return
        words, source = parts["words"], parts["words"].source
        assert isinstance(source, Source)
        yield "words", *reader.convert(mxfp4.pack_tensor, (words,), *reader.tensors(words), permutation=source.permutation)
        exponents = reader.array(parts["exponents"])
        yield "exponents", exponents
        if (largest := int(exponents.max())) > LARGEST_EXPONENT:
            raise ModelLoadError(
                f"{parts['exponents'].source.tensors[0].name} has a scale of 2^{largest - _BIAS}, experts are computed from 4 bits with "
                f"scales up to 2^{LARGEST_EXPONENT - _BIAS}; use --dequantize"
            )

    def dummy(self, part: str, draw: Draw, deviation: Any) -> Array:
        """Weights have a deviation of 0.023."""
        if part == WHOLE:
            return super().dummy(part, draw, deviation)
        return draw.bits("uint16") if part == "words" else draw.full(_DUMMY_EXPONENT, "uint8")

    def unrestorable(self, names: Collection[str]) -> str:
        is_packed = any(name.endswith(".words") for name in names)
        if is_packed and not self.computes:
            return (
                "holds experts in 4 bits; use --no-dequantize with devices that share no block of 32 values, or convert the original "
                "again with scripts/convert_checkpoint.py --dequantize"
            )
        return "holds no experts in 4 bits; use --dequantize" if self.computes and not is_packed else ""
