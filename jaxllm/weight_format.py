"""Interface between the engine and a weight format; the formats are in `jaxllm/quantization/formats/`."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np

from jaxllm.layers.source import AnySource, Index, Module, Read, Tensor

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig
    from jaxllm.model_parts import MoE

Array = Any
"""Of JAX, which this module does not import."""
Arrays = Mapping[str, Array]
"""Arrays of a weight, by part."""
Multiply = Callable[..., Array]
"""Products with weights in tiles: `pallas_kernels.quantized_matmul.product`."""
Init = Literal["normal", "zeros", "ones"]
"""How a parameter without a checkpoint begins; normal: as its format says."""
WHOLE = ""
"""The part of a weight that stands in the model as one array."""


class Options(NamedTuple):
    """The options of an engine and the model that concern formats."""

    quantization: str | None
    dequantize: bool | None
    on_gpu: bool
    dtype: str
    """The model's type."""
    unquantized: tuple[str, ...]
    """Modules that are not quantised while loading, of the family and of formats before: parts of dotted names, or regular expressions
    that begin with `re:`."""
    supported: str = ""
    """The end of errors about unsupported formats."""
    stored_dtype: str = "float32"
    """The type of the checkpoint's plain numbers, as its config.json says."""
    mixtures: tuple["MoE", ...] = ()
    """The model's mixtures of experts."""
    quantize_lm_head: str | None = None
    lm_head: str = ""
    """The checkpoint's module of the head."""


@dataclass(frozen=True)
class ParamSpec:
    """An array of a weight: what a model declares, and what a loader makes."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str
    source: AnySource
    init: Init = "normal"


@dataclass(frozen=True)
class WeightSpec:
    """A weight of products, as it is in no format but PLAIN."""

    plain: ParamSpec
    modules: tuple[Module, ...] = ()
    """The checkpoint's modules of a linear layer; none for experts."""
    joined: int = 0
    """The dimension of their outputs along which they are joined."""
    num_contracted: int = 1
    """Leading dimensions of a linear layer's weight that products contract."""
    splits_inputs: bool = False
    """Whether devices split the dimensions that products contract."""
    split_outputs: int | None = None
    """The dimension of the outputs that devices split; None: each has them all. Weights of experts have one."""
    has_kernels: bool = True
    """Whether there are kernels for its products. Experts without a gate or with limits have none: plain JAX takes one at a time."""


class Expected(NamedTuple):
    """A tensor that a checkpoint must have."""

    shape: tuple[int, ...]
    dtypes: Collection[str] = ()
    """Names of types; empty: those of weights."""
    otherwise: str = ""
    """The way out where a tensor has another type, for errors."""


class Entry(Protocol):
    """A tensor that a checkpoint has."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Files(Protocol):
    """A checkpoint as formats see it."""

    @property
    def linears(self) -> Collection[str]:
        """The modules of all linear layers of the model's layers."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors by name."""

    def stored(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of a tensor as the file has it."""

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor as the file has it."""

    def plain(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of a tensor as plain numbers, whatever its format."""

    def beside(self, tensor: Tensor) -> Mapping[str, Expected]:
        """The tensors that a weight is read from as plain numbers, whatever its format; none: it is stored so, under its own name."""


class Reader(Files, Protocol):
    """Reads a checkpoint onto the devices of a mesh."""

    def array(self, spec: ParamSpec, read: Read | None = None) -> Array:
        """The whole parameter: its tensors joined, transposed, cast and split over the devices. read: default: as plain numbers."""

    def tensors(self, spec: ParamSpec, read: Read | None = None) -> tuple[Array, ...]:
        """Its tensors on the devices, in the types of the file, split as the parameter is."""

    def by_device(self, spec: ParamSpec, make: Callable[[Index, Any], Array]) -> Array:
        """The parameter of what `make` makes of the index of each device's part and the device."""

    def convert(self, function: Callable[..., Any], specs: Sequence[ParamSpec], *arrays: Any, **static: Hashable) -> Any:
        """The parameters that a function of a module makes of arrays on the devices: one program for each distinct shape."""


class Draw(Protocol):
    """Makes an array of a parameter's shape without a checkpoint, on the devices."""

    def normal(self) -> Array: ...
    def bits(self, dtype: str) -> Array: ...
    def full(self, value: Any, dtype: str) -> Array: ...


@dataclass(frozen=True)
class WeightFormat:
    """A form in which some weights are stored, or computed with, or both. Subclasses are frozen dataclasses.

    Modules of formats do not import JAX: clients read config.json too. Methods that compute import it when they are called.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    """Values of quant_method in config.json."""
    supported: ClassVar[str] = ""
    """The checkpoints in this format that can be read, for docs; empty: it is not chosen by a config.json that people write."""
    may_widen: ClassVar[bool] = False
    """Whether `--dequantize` decides how it is loaded."""
    unused: ClassVar[str] = r"\b\B"
    """A pattern of tensors that a checkpoint of this format may hold and that are not read."""
    unused_zeros: ClassVar[str] = r"\b\B"
    """Likewise, if all their values are zero and the model has no such weight."""

    @property
    def of_head(self) -> bool:
        """Whether the head may be in it (`logits`, `rows`); a head is in no other format."""
        return False

    @property
    def kv_scales(self) -> "WeightFormat | None":
        """The format of the scales of keys and values, if the checkpoint says that their cache is fp8; None: it does not."""
        return None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        """Whether a quantization_config is of this format. The first of the registered formats that claims one reads it."""
        return given.get("quant_method") in cls.methods

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        """The format of a checkpoint with this quantization_config, or of the options if it is empty; None: neither asks for it.
        Whatever is not supported is added to `faults`."""
        raise NotImplementedError

    def others(self, options: Options) -> "tuple[WeightFormat, ...]":
        """The formats of weights that a quantization_config describes too, and that are not in this one."""
        return ()

    def covers(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, is in this format."""
        raise NotImplementedError

    def faults(self, config: "ModelConfig") -> list[str]:
        """Why a model in this format cannot be computed, as texts of errors; empty: it can."""
        return []

    def indivisible(self, config: "ModelConfig", size: int) -> str:
        """Why `size` devices cannot split weights in this format, and what becomes of them; empty: they can."""
        return ""

    def split(self, config: "ModelConfig", size: int) -> Self:
        """The format of the same weights split over `size` devices."""
        return self

    def in_tiles(self) -> Self:
        """The format of the same weights, in the order of the kernels of `pallas_kernels.quantized_matmul` where these take their
        numbers."""
        return self

    def in_lanes(self) -> Self:
        """The format of the same weights, in the order of `jaxllm.quantization.lanes` where a CPU takes their numbers so."""
        return self

    @property
    def stored_parts(self) -> Mapping[str, ParamSpec] | None:
        """The parts that files have of a weight in this format in place of those that stand in the model (`laid_out`); None: the same."""
        return None

    def laid_out(self, arrays: Arrays, parts: Mapping[str, ParamSpec], mesh: Any) -> Arrays:
        """The parts that stand in the model, of `stored_parts` on the devices of a mesh."""
        raise NotImplementedError

    @property
    def expert_type(self) -> str | None:
        """The type that a kernel computes products of experts from; None: the model's."""
        return None

    @property
    def widens_in_products(self) -> bool:
        """Whether products may make their whole weight in the model's type first, for which the memory of steps has room."""
        return False

    @property
    def widens_each(self) -> bool:
        """Whether products of experts widen those that tokens choose, one at a time."""
        return False

    @property
    def excluded(self) -> tuple[str, ...]:
        """Modules that a format behind this one leaves plain too, in the form of `Options.unquantized`."""
        return ()

    def without_kernels(self) -> Self:
        """The format by default on a GPU that has no kernel for its weights."""
        return self

    def told(self, dtype: str) -> str:
        """How the checkpoint's weights are converted in a model of this type, for the log; empty: not at all."""
        return ""

    def declare(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        """The parts that stand in the model for this weight: WHOLE alone, if it is an array that is read in another way than others;
        None: it is not in this format."""
        raise NotImplementedError

    def of(self, weight: WeightSpec) -> Self:
        """This format as a weight that it declares is in it, if its weights differ."""
        return self

    @property
    def quantizes_inputs(self) -> bool:
        """Whether products of linear layers quantise what they multiply, unless they are `weight_only`."""
        return False

    def product(self, arrays: Arrays, x: Array, shards: Any, multiply: Multiply, *, weight_only: bool = False) -> Array:
        """Multiply x by a linear layer's weight: [..., contracted as one] to [..., *outputs], in x's type. shards: what x and the
        contracted dimension are split over. multiply: for a weight in tiles. weight_only: leave x as it is."""
        raise NotImplementedError

    def sums(self, arrays: Arrays, x: Any) -> Any:
        """`Sums` of a linear layer with x, which is `Quantized` (`pallas_kernels.quantize`), in a format that quantises inputs."""
        raise NotImplementedError

    def logits(self, arrays: Arrays, x: Array, multiply: Multiply) -> Array:
        """Multiply x by a head's weight: [T, D] to float32 [T, V], in a format `of_head`. multiply: as `product` takes it."""
        raise NotImplementedError

    def rows(self, arrays: Arrays, index: Array) -> Array:
        """Rows of a head that is the embedding too: of these ids, or the nearest that there are, float32, in a format `of_head`."""
        raise NotImplementedError

    def operand(self, arrays: Arrays) -> Any:
        """The weight of experts as `pallas_kernels.grouped_matmul` takes it."""
        raise NotImplementedError

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        """The tensors that a weight of these parts is read from; by default those of `Files.beside`, or those of its source."""
        found: dict[str, Expected] = {}
        for tensor in (tensor for spec in parts.values() for tensor in spec.source.tensors):
            found |= files.beside(tensor) or {tensor.name: Expected(tensor.shape)}
        return found

    def load(self, reader: Reader, parts: Mapping[str, ParamSpec]) -> Iterator[tuple[str, Array]]:
        """Each part with its array, which is on its devices when it is given; by default read as plain numbers. Raises ModelLoadError."""
        yield from ((part, reader.array(spec)) for part, spec in parts.items())

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        """The tensors that a weight in this format is read from as plain numbers; none: it is stored so, under its own name."""
        return {}

    def widened(self, tensor: Tensor, index: Index, files: Files) -> np.ndarray:
        """A part of a tensor that needs others to be read (`beside`), as plain numbers."""
        raise NotImplementedError

    def dummy(self, part: str, draw: Draw, deviation: Any) -> Array:
        """A part without a checkpoint; weights have this deviation, or about the same."""
        return deviation * draw.normal()

    def unrestorable(self, names: Collection[str]) -> str:
        """Why a converted checkpoint with arrays of these names cannot be restored in this format, and the way out, as the end of a
        sentence about its directory; empty: it can be."""
        return ""


PLAIN = WeightFormat()
"""The format of all weights in no other: an array of the model's type, stored as plain numbers or in a form that a format widens."""
