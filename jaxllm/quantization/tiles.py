"""Weights in the order of the kernels of `pallas_kernels.quantized_matmul`: tiles of 64 outputs x 64 inputs."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.parallel.arrays import convert
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.shards import Shards
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import Arrays, Multiply, ParamSpec, WeightSpec
from pallas_kernels.grouped_matmul.packed import PackedExperts
from pallas_kernels.quantized_matmul import DECODERS, GROUPS, Packed, decoder_of, pack
from pallas_kernels.quantized_matmul.packed import MIDDLES


def takes(scheme: Scheme, num_inputs: int, num_groups: int) -> bool:
    """Whether kernels multiply a weight of `num_groups` groups on a device."""
    number = scheme.number
    has_scheme = decoder_of(number) in DECODERS and not scheme.minimums and (not scheme.zeros or number in MIDDLES)
    return has_scheme and (num_groups == 1 or math.gcd(num_inputs // num_groups, GROUPS[-1]) in GROUPS)


@functools.lru_cache(maxsize=256)
def parts_of_device(
    scheme: Scheme, outputs: tuple[int, ...], num_inputs: int, num_groups: int
) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """(shape, type) of the parts in tiles of a weight on a device, by name. outputs: their dimensions."""
    number, num_outputs = scheme.number, math.prod(outputs)
    by_group, bits = (num_outputs, num_groups), DECODERS[decoder_of(number)].bits

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    found: Packed = jax.eval_shape(
        functools.partial(pack, number),
        array((num_outputs, num_inputs * bits // 8), "uint8"),
        array(by_group, scheme.scale_type),
        array(by_group, "uint8") if scheme.zeros else None,
        array((num_outputs,), "float32") if scheme.factor else None,
    )
    return {name: (part.shape, str(part.dtype)) for name, part in _parts(found).items()}


@dataclass(frozen=True)
class Tiled:
    """A `Layout` in tiles, as a device has it."""

    outputs: tuple[int, ...]
    num_inputs: int
    num_groups: int
    num_lead: int
    """Dimensions before the outputs: those of experts, which are weights of their own."""
    stored: Mapping[str, ParamSpec] = field(compare=False)
    """See `WeightFormat.stored_parts`. Not compared: equal layers have equal formats."""

    @classmethod
    def of(cls, weight: WeightSpec, scheme: Scheme, stored: Mapping[str, ParamSpec], size: int) -> "Tiled | None":
        """That of a weight; None: no kernel takes it."""
        if not weight.has_kernels:
            return None
        num_lead = 0 if weight.modules else len(stored["scale"].shape) - 2
        *outputs, num_groups = stored["scale"].shape[num_lead:]
        num_inputs = stored["codes"].shape[-1] * NUMBERS[scheme.number].per_value
        if weight.split_outputs is not None:
            outputs[weight.split_outputs] //= size
        if weight.splits_inputs:
            num_inputs //= size
            if num_groups == size > 1:
                return None  # a device's one group would become a factor of outputs, which all devices share
            num_groups = max(1, num_groups // size)
        is_taken = takes(scheme, num_inputs, num_groups)
        return cls(tuple(outputs), num_inputs, num_groups, num_lead, stored) if is_taken else None

    def declare(self, weight: WeightSpec, scheme: Scheme, size: int) -> dict[str, ParamSpec]:
        """The parts, each device's padded to whole tiles."""
        stored = next(iter(self.stored.values()))
        lead, lead_axes = stored.shape[: self.num_lead], stored.axes[: self.num_lead]
        # Devices that split a dimension, and the axis that says so.
        outputs = (1, "tiles") if weight.split_outputs is None else (size, "split_tiles")
        inputs = (size, "split_tiles") if weight.splits_inputs else (1, "tiles")
        dimensions = {"words": (outputs, inputs, (1, "tiles")), "factor": (outputs,)}
        found = {}
        for name, (shape, dtype) in parts_of_device(scheme, self.outputs, self.num_inputs, self.num_groups).items():
            split = dimensions.get(name, (inputs, outputs))
            whole = tuple(count * num_devices for count, (num_devices, _) in zip(shape, split, strict=True))
            found[name] = ParamSpec((*lead, *whole), (*lead_axes, *(axis for _, axis in split)), dtype, stored.source)
        return found

    def lay_out(
        self,
        arrays: Arrays,
        parts: Mapping[str, ParamSpec],
        scheme: Scheme,
        mesh: Mesh,
        as_packed: Callable[[Arrays], Arrays] | None = None,
    ) -> dict[str, Array]:
        """Lay stored parts out in tiles, on each device those that it holds. as_packed: gives the parts of a `PackedFormat`, without
        dimensions of experts, of a weight that is stored otherwise."""
        names = tuple(self.stored)
        places = tuple(sharding(mesh, spec.axes) for spec in parts.values())
        made = convert(
            _in_tiles,
            places,
            *(arrays[name] for name in names),
            number=scheme.number,
            names=names,
            wanted=tuple(parts),
            num_lead=self.num_lead,
            as_packed=as_packed,
            mesh=mesh,
            in_specs=tuple(sharding(mesh, spec.axes).spec for spec in self.stored.values()),
            out_specs=tuple(place.spec for place in places),
        )
        return dict(zip(parts, made, strict=True))

    def product(self, arrays: Arrays, scheme: Scheme, x: Array, shards: Shards, multiply: Multiply) -> Array:
        """[..., inputs] to [..., *outputs], in x's type; of inputs that devices split, a part of the sum."""
        return self._product(arrays, scheme, x, multiply, None)

    def logits(self, arrays: Arrays, scheme: Scheme, x: Array, multiply: Multiply) -> Array:
        """`product` in float32."""
        return self._product(arrays, scheme, x, multiply, "float32")

    def _product(self, arrays: Arrays, scheme: Scheme, x: Array, multiply: Multiply, dtype: str | None) -> Array:
        y = multiply(x.reshape(-1, x.shape[-1]), _packed(arrays, scheme.number), dtype=dtype)
        return y[:, : math.prod(self.outputs)].reshape(*x.shape[:-1], *self.outputs)

    def operand(self, arrays: Arrays, scheme: Scheme) -> PackedExperts:
        """Weights of experts as `pallas_kernels.grouped_matmul` takes them."""
        return PackedExperts(_packed(arrays, scheme.number))


def _in_tiles(
    *arrays: Array,
    number: str,
    names: Sequence[str],
    wanted: Sequence[str],
    num_lead: int,
    as_packed: Callable[[Arrays], Arrays] | None,
    mesh: Mesh,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: tuple[PartitionSpec, ...],
) -> tuple[Array, ...]:
    def of_device(*arrays: Array) -> tuple[Array, ...]:
        given = dict(zip(names, arrays, strict=True))
        if not num_lead:
            return of_weight(given)
        lead = arrays[0].shape[:num_lead]
        flat = {name: array.reshape(-1, *array.shape[num_lead:]) for name, array in given.items()}
        # One at a time: packing all at once takes several times as much memory in addition to the result.
        return tuple(array.reshape(*lead, *array.shape[1:]) for array in lax.map(of_weight, flat))

    def of_weight(given: Arrays) -> tuple[Array, ...]:
        given = given if as_packed is None else as_packed(given)
        num_outputs = math.prod(given["scale"].shape[:-1])
        flat = {name: array.reshape(num_outputs, -1) for name, array in given.items()}
        factor = flat["factor"][:, 0] if "factor" in flat else None
        parts = _parts(pack(number, flat["codes"], flat["scale"], flat.get("zero"), factor))
        return tuple(parts[name] for name in wanted)

    return jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arrays)


def _parts(weight: Packed) -> dict[str, Array]:
    """The arrays that there are, by name."""
    found = {"words": weight.words, "scale": weight.scale, "zero": weight.zero, "factor": weight.factor}
    return {name: array for name, array in found.items() if array is not None}


def _packed(arrays: Arrays, number: str) -> Packed:
    scale, zero, factor = map(arrays.get, ("scale", "zero", "factor"))
    return Packed(arrays["words"], scale, zero, factor, decoder_of(number))
