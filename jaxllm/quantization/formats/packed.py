"""The base of formats that keep weights in 4 or 8 bits as a checkpoint holds them: groups of numbers that share a scale."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import AnySource, Index, Source, Stacked, Tensor
from jaxllm.quantization import numbers
from jaxllm.quantization.formats.patterns import partly_covered
from jaxllm.quantization.numbers import EXPONENT_BIAS, NO_EXPONENT, NUMBERS, Number, Scheme
from jaxllm.weight_format import (
    Array,
    Arrays,
    Draw,
    Expected,
    Files,
    Multiply,
    ParamSpec,
    Reader,
    WeightFormat,
    WeightSpec,
)

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig

PART = ":"
"""Stands before the name of a part, behind that of a tensor."""
ReadPart = Callable[[str, Tensor], np.ndarray]
_ROWS = 2048
"""Outputs that are widened at a time on the host."""


class Layout(Protocol):
    """The order in which a device has the arrays of a weight: `AsStored`, `Tiled` or `Laned` of `jaxllm/quantization/`, which import JAX.
    Each has the methods of the products that weights in it are in."""

    @property
    def stored(self) -> Mapping[str, ParamSpec] | None:
        """See `WeightFormat.stored_parts`."""


@dataclass(frozen=True, kw_only=True)
class PackedFormat(WeightFormat):
    """Weights of linear layers and experts as codes of few bits, widened inside of products; all others are widened while they are
    read. Subclasses say what the tensors of a checkpoint are called, and give the parts of a module: `scheme`, `stored`, `part`.

    Parts of a weight of N outputs and K inputs, contracted dimensions counted as one and G = K / group (1 without groups):
    codes [*outputs, K] in the number's type, or of 4 bits uint8 [*outputs, K / 2], the lower half of a byte first;
    scale [*outputs, G]; zero uint8 [*outputs, G]; minimum [*outputs, G]; factor float32 [*outputs].

    In tiles, a weight has the arrays of `pallas_kernels.quantized_matmul.Packed` instead, each device's part padded to whole tiles;
    those of experts have their dimensions first. Files never have it so.
    """

    computes: bool = True
    """Whether weights stay as stored; else they are widened while they are loaded."""
    size: int = 1
    """Devices that some layers are split over."""
    tiles: bool = False
    """Whether weights that kernels take are in tiles."""
    weight_scheme: Scheme | None = None
    """That of the weight that this is the format of (`of`); None: of all."""
    transposed: bool = False
    """A checkpoint in no format has the inputs of this weight first."""
    lanes: bool = False
    """Whether weights of products are in the order of a CPU (`jaxllm.quantization.lanes`) where it takes them."""
    layout: Layout | None = None
    """The order of this weight's arrays; None: of the format of all."""
    has_kernels: bool = True
    """See `WeightSpec.has_kernels`, of this weight."""

    may_widen: ClassVar[bool] = True

    def scheme(self, module: str) -> Scheme | None:
        """How the weights of a module of the checkpoint are stored; None: as plain numbers. Of modules that are no linear layers the
        checkpoint's tensors decide, if it has none of `stored`."""
        raise NotImplementedError

    def joint_scheme(self, modules: Sequence[str], num_inputs: int) -> Scheme | None:
        """That of modules that are one weight."""
        schemes = {self.scheme_of(module, num_inputs): module for module in modules}
        if len(schemes) > 1:
            told = ", ".join(f"{module} is {scheme or 'plain'}" for scheme, module in schemes.items())
            raise ModelLoadError(f"these modules are one weight, so all of them must be quantised in the same way: {told}")
        return next(iter(schemes))

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        """The tensors of a module, with their shapes and types."""
        raise NotImplementedError

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        """A part of a module's weight, [N, ...]: of all stored outputs, in their order. A view of the file where that can be."""
        raise NotImplementedError

    def scheme_of(self, module: str, num_inputs: int) -> Scheme | None:
        """`scheme`, where it depends on the inputs."""
        return self.scheme(module)

    def told_of(self, kind: str, dtype: str) -> str:
        """`told` of weights of this kind."""
        stored = f"weights as the checkpoint has them ({kind})"
        return stored if self.computes else f"the checkpoint's weights ({kind}) become {dtype}"

    def covers(self, module: str) -> bool:
        return self.scheme(module) is not None

    def faults(self, config: "ModelConfig") -> list[str]:
        return partly_covered(self.scheme, config.linears())

    def split(self, config: "ModelConfig", size: int) -> Self:
        return replace(self, size=size, tiles=False, lanes=False)

    def in_tiles(self) -> Self:
        return replace(self, tiles=self.computes)

    def in_lanes(self) -> Self:
        return replace(self, lanes=self.computes)

    @property
    def stored_parts(self) -> Mapping[str, ParamSpec] | None:
        return None if self.layout is None else self.layout.stored

    def laid_out(self, arrays: Arrays, parts: Mapping[str, ParamSpec], mesh: Any) -> Arrays:
        return self._layout.lay_out(arrays, parts, self._scheme, mesh)

    def declare(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        stored = self._declare_stored(weight)
        layout: Any = self._layout_of(weight, stored)
        return stored if layout.stored is None else layout.declare(weight, self._scheme_of(weight), self.size)

    def _layout_of(self, weight: WeightSpec, stored: dict[str, ParamSpec] | None) -> Layout:
        """The order of a weight's arrays. stored: see `_declare_stored`."""
        from jaxllm.quantization.packed import AS_STORED

        found: Layout | None = None
        if stored is not None:
            scheme = self._scheme_of(weight)
            assert scheme is not None
            if self.lanes:
                from jaxllm.quantization.lanes import Laned

                found = Laned.of(weight, scheme, stored, self.size)
            elif self.tiles:
                from jaxllm.quantization.tiles import Tiled

                found = Tiled.of(weight, scheme, stored, self.size)
        return found or AS_STORED

    def _declare_stored(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        plain, n = weight.plain, weight.num_contracted
        if not self.computes or not (weight.modules or self.takes_experts(plain.source)):
            return None
        if weight.modules:
            (shape, axes), inputs, inputs_axis = (plain.shape[n:], plain.axes[n:]), plain.shape[:n], plain.axes[0]
        else:
            (shape, axes), inputs, inputs_axis = (plain.shape[:-1], plain.axes[:-1]), plain.shape[-1:], plain.axes[-1]
        num_inputs, is_split = math.prod(inputs), weight.splits_inputs
        if (scheme := self._scheme_of(weight)) is None:
            return None
        module = module_of(plain.source.tensors[0])
        number, num_groups = NUMBERS[scheme.number], self._num_groups(scheme, module, num_inputs, is_split)
        num_outputs = len(weight.modules[0].outputs) if weight.modules else len(plain.source.tensors[0].view) - 1

        def spec(part: str, dtype: str, width: int, axis: str) -> ParamSpec:
            return ParamSpec((*shape, width), (*axes, axis), dtype, _source(plain.source, part, num_outputs, width))

        groups_axis = "split_groups" if is_split and num_groups > 1 else "groups"
        parts = {"codes": spec("codes", number.code_type, num_inputs // number.per_value, inputs_axis)}
        parts["scale"] = spec("scale", scheme.scale_type, num_groups, groups_axis)
        if scheme.zeros:
            parts["zero"] = spec("zero", "uint8", num_groups, groups_axis)
        if scheme.minimums:
            parts["minimum"] = spec("minimum", scheme.minimum_type, num_groups, groups_axis)
        if scheme.factor:
            parts["factor"] = ParamSpec(shape, axes, "float32", _source(plain.source, "factor", num_outputs, None))
        return parts

    def takes_experts(self, source: AnySource) -> bool:
        """Whether weights of experts from this source may be in this format: those of a tensor each."""
        return isinstance(source, Stacked)

    def _num_groups(self, scheme: Scheme, module: str, num_inputs: int, is_split: bool) -> int:
        """Groups of each output, so fine that no device has a part of one."""
        size = self.size if is_split else 1
        if num_inputs % (size * NUMBERS[scheme.number].per_value):
            of = f"{size} devices" if size > 1 else "bytes"
            raise ModelLoadError(
                f"{module} has {num_inputs} inputs in {scheme.number}, which {of} cannot share; use --dequantize"
            )
        _check_groups(scheme, module, num_inputs)
        return 1 if scheme.group is None else num_inputs // math.gcd(scheme.group, num_inputs // size)

    def _scheme_of(self, weight: WeightSpec) -> Scheme | None:
        num_inputs = math.prod(weight.plain.shape[: weight.num_contracted] if weight.modules else weight.plain.shape[-1:])
        return self.joint_scheme([module_of(tensor) for tensor in weight.plain.source.tensors], num_inputs)

    def of(self, weight: WeightSpec) -> Self:
        tensor = weight.plain.source.tensors[0]
        stored = self._declare_stored(weight) if self.tiles or self.lanes else None
        found = replace(
            self, weight_scheme=self._scheme_of(weight), transposed=tensor.transposed, has_kernels=weight.has_kernels
        )
        return replace(found, layout=self._layout_of(weight, stored))

    @property
    def _scheme(self) -> Scheme:
        assert self.weight_scheme is not None, "the format of one weight"
        return self.weight_scheme

    @property
    def _layout(self) -> Any:
        assert self.layout is not None, "the format of one weight"
        return self.layout

    @property
    def _number(self) -> Number:
        return NUMBERS[self._scheme.number]

    @property
    def widens_in_products(self) -> bool:
        return self.computes and self.has_kernels and self.stored_parts is None

    @property
    def widens_each(self) -> bool:
        return self.computes and not self.has_kernels

    def product(self, arrays: Arrays, x: Array, shards: Any, multiply: Multiply, *, weight_only: bool = False) -> Array:
        return self._layout.product(arrays, self._scheme, x, shards, multiply)

    def logits(self, arrays: Arrays, x: Array, multiply: Multiply) -> Array:
        return self._layout.logits(arrays, self._scheme, x, multiply)

    def rows(self, arrays: Arrays, index: Array) -> Array:
        return self._layout.rows(arrays, self._scheme, index)

    def operand(self, arrays: Arrays) -> Any:
        """Without kernels `StoredExperts`, whatever the order."""
        if self.has_kernels:
            return self._layout.operand(arrays, self._scheme)
        from jaxllm.quantization.packed import StoredExperts

        return StoredExperts(arrays, self._scheme)

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        found: dict[str, Expected] = {}
        for tensor in parts["codes"].source.tensors:
            found |= self.stored(module_of(tensor), tensor.shape[0], self._num_inputs(parts))
        return found

    def load(self, reader: Reader, parts: Mapping[str, ParamSpec]) -> Iterator[tuple[str, Array]]:
        read = self.reading(self._num_inputs(parts), reader)
        for part, spec in parts.items():
            # Of one tensor, or of those of one product: devices read it one after the other.
            whole = functools.lru_cache(maxsize=4)(functools.partial(_whole, read, part))
            yield part, reader.array(spec, lambda tensor, index, whole=whole: tensor.read(whole(tensor), index))  # type: ignore[misc]

    def reading(self, num_inputs: int, reader: Reader) -> ReadPart:
        """Returns a function that reads a part [N, ...] of the module of a tensor of the sources that `declare` gave."""
        return lambda part, tensor: self.part(part, module_of(tensor), tensor.shape[0], num_inputs, reader)

    def _num_inputs(self, parts: Mapping[str, ParamSpec]) -> int:
        return parts["codes"].shape[-1] * self._number.per_value

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        if not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            return {}
        module = module_of(tensor)
        if self.scheme(module) is None:
            return {}
        stored, entry = self.stored(module, *_output_major_shape(tensor)), files.entries.get(tensor.name)
        # Codes may have the name of plain numbers: their type tells which they are.
        has_codes = entry is not None and tensor.name in stored and entry.dtype in stored[tensor.name].dtypes
        is_plain = not has_codes and (entry is not None or module not in files.linears)
        return stored if stored.keys() <= files.entries.keys() or not is_plain else {}

    def widened(self, tensor: Tensor, index: Index, files: Files) -> np.ndarray:
        """Float32."""
        module, (num_outputs, num_inputs) = module_of(tensor), _output_major_shape(tensor)
        scheme = self.scheme(module)
        assert scheme is not None
        has = {"codes": True, "scale": True, "zero": scheme.zeros, "minimum": scheme.minimums, "factor": scheme.factor}
        arrays = {name: self.part(name, module, num_outputs, num_inputs, files) for name in has if has[name]}
        _check_groups(scheme, module, num_inputs)
        # The view's last dimensions are the inputs.
        split = next(i for i in range(len(tensor.view)) if math.prod(tensor.view[i:]) == num_inputs)
        # From 1 on: what pads a vocabulary has no row.
        rows = replace(tensor, view=tensor.view[:split]).read(np.arange(1, num_outputs + 1), index[:split])
        columns = np.arange(num_inputs).reshape(tensor.view[split:])[index[split:]]
        wide = np.zeros((rows.size, columns.size), np.float32)
        for start in range(0, rows.size, _ROWS):
            row = rows.ravel()[start : start + _ROWS]
            part = numbers.widen({name: array[row - 1] for name, array in arrays.items()}, scheme, np)
            wide[start : start + _ROWS] = np.where(row[:, None] > 0, part[:, columns.ravel()], 0)
        return wide.reshape(*rows.shape, *columns.shape)

    def dummy(self, part: str, draw: Draw, deviation: Any) -> Array:
        """Codes are random, scales equal."""
        scheme, scale = self._scheme, deviation / self._number.deviation
        if part == "codes":
            return self._dummy_codes(draw)
        if part == "factor" or (part == "scale" and scheme.factor):
            return draw.full(scale if part == "factor" else 1, "float32")
        middle = 2 ** (self._number.bits - 1)
        if part == "zero":
            return draw.full(middle, "uint8")
        if part == "minimum":
            return draw.full(middle * scale, "float32")
        return draw.full(round(math.log2(scale)) + EXPONENT_BIAS if scheme.scale_type == "uint8" else scale, "float32")

    def unrestorable(self, names: Collection[str]) -> str:
        is_packed = any(name.endswith(".codes") for name in names)
        if is_packed == self.computes:
            return ""
        if is_packed:
            return (
                "holds packed weights, which stay so; use --no-dequantize, or convert the original again with "
                "scripts/convert_checkpoint.py --dequantize"
            )
        return "holds an orbax checkpoint without packed weights; convert the original again with scripts/convert_checkpoint.py"

    def _dummy_codes(self, draw: Draw) -> Array:
        if self._number.code_type == "float8_e4m3fn":
            from jaxllm.quantization.fp8 import narrow

            return narrow(self._number.deviation * draw.normal())
        return draw.bits("uint8").view(self._number.code_type)


def float_scale(files: Files, name: str) -> np.ndarray:
    """Scales that a checkpoint holds as floats, or as exponents (uint8). Raises ModelLoadError if one is no number."""
    scale = files.tensor(name)
    is_number = scale != NO_EXPONENT if scale.dtype == np.uint8 else np.isfinite(scale.astype(np.float32))
    if not is_number.all():
        raise ModelLoadError(
            f"{name} has {np.sum(~is_number)} scales that are no numbers; the file is damaged, or of another format"
        )
    return scale


def float_factor(files: Files, name: str) -> np.float32:
    """The scale of a whole tensor. Raises ModelLoadError unless it is a positive number."""
    factor = np.float32(files.tensor(name).item())
    if not 0 < factor < np.inf:
        raise ModelLoadError(f"{name} is {factor}, must be a positive number; the file is damaged, or of another format")
    return factor


def _output_major_shape(tensor: Tensor) -> tuple[int, int]:
    """(outputs, inputs) of a weight: packed, it has the outputs first whatever the checkpoint's plain weights have."""
    rows, columns = tensor.shape
    return (columns, rows) if tensor.transposed else (rows, columns)


def _check_groups(scheme: Scheme, module: str, num_inputs: int) -> None:
    """Raises ModelLoadError if the last group has fewer inputs than the others."""
    if scheme.group is not None and num_inputs % scheme.group:
        raise ModelLoadError(f"{module} has {num_inputs} inputs, which must be a multiple of the group size {scheme.group}")


def _whole(read: ReadPart, part: str, tensor: Tensor) -> np.ndarray:
    """A part of a module's weight as the tensor is: with a scale for each piece of a group that devices share."""
    array = read(part, tensor)
    if part not in ("codes", "factor"):
        finer = tensor.shape[-1] // array.shape[-1]
        return array if finer == 1 else np.repeat(array, finer, axis=-1)
    return array


def module_of(tensor: Tensor) -> str:
    """The checkpoint's module of a tensor of weights, or of a part of one."""
    return tensor.name.partition(PART)[0].removesuffix(".weight")


def _source(plain: AnySource, part: str, num_outputs: int, width: int | None) -> AnySource:
    """The source of a part that has `width` values for each output, or one (None): that of the weight, but for its inputs. num_outputs:
    dimensions of the outputs of a tensor."""
    last = () if width is None else (width,)

    def part_of(tensor: Tensor) -> Tensor:
        name, outputs = f"{tensor.name}{PART}{part}", tensor.shape[-1:] if tensor.transposed else tensor.shape[:-1]
        view = (*tensor.view[:num_outputs], *last)
        return replace(tensor, name=name, shape=(*outputs, *last), view=view, transposed=False)

    tensors = tuple(map(part_of, plain.tensors))
    if isinstance(plain, Stacked):
        return replace(plain, tensors=tensors)
    assert isinstance(plain, Source)
    return Source(tensors, plain.axis, tuple(range(num_outputs + len(last))))
