"""Several workers of `mosaic_decode` in one CTA, each of two warpgroups: its index, its part of the CTA's shared memory, its registers.

CTAs of one worker each would be simpler, but ptxas gives the threads of such a CTA so many registers that two of them fill a core.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

REGISTERS = {3: (120, 40)}
"""By the number of workers of a CTA: registers of a thread of the compute warpgroups and of the producers. Others keep what ptxas gives."""
_WARPGROUPS = 2  # of a worker
_REDUCED = 256
"""Numbers in a worker's scratch space for reductions: two of each thread of a warpgroup."""


def find(workers_per_cta: int = 1) -> jax.Array:
    """The index of the worker that this is."""
    index = lax.axis_index("cta")
    return index if workers_per_cta == 1 else index * workers_per_cta + _place()


def role(workers_per_cta: int) -> jax.Array:
    """Which warpgroup of its worker this is."""
    warpgroup = lax.axis_index("warpgroup")
    return warpgroup if workers_per_cta == 1 else lax.rem(warpgroup, jnp.int32(_WARPGROUPS))


def _place() -> jax.Array:
    """Which worker of its CTA this is."""
    return lax.div(lax.axis_index("warpgroup"), jnp.int32(_WARPGROUPS))


def shared_memory(workers_per_cta: int, arrays: dict[str, Any], barriers: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """That of a CTA, from what a worker has: arrays, and the arrivals and number of barriers."""
    if workers_per_cta > 1:
        arrays = {name: plgpu.SMEM((workers_per_cta, *x.shape), x.dtype, transforms=x.transforms) for name, x in arrays.items()}
        arrays["reduced"] = plgpu.SMEM((workers_per_cta, _REDUCED), jnp.float32)
    return arrays | {
        name: plgpu.Barrier(num_arrivals=arrivals, num_barriers=workers_per_cta * number)
        for name, (arrivals, number) in barriers.items()
    }


def own_part(workers_per_cta: int, smem: dict[str, Any], barriers: dict[str, int]) -> dict[str, Any]:
    """This worker's part of a CTA's shared memory. barriers: the number of a worker's, by name."""
    if workers_per_cta == 1:
        return smem
    place = _place()
    return {name: _Barriers(ref, place * barriers[name]) if name in barriers else ref.at[place] for name, ref in smem.items()}


@dataclass(frozen=True)
class _Barriers:
    """The barriers of an array from one on: `at` as of a reference, of which a part of barriers cannot be taken."""

    ref: Any
    first: jax.Array

    @property
    def at(self) -> "_Barriers":
        return self

    def __getitem__(self, index: jax.Array) -> Any:
        return self.ref.at[self.first + index]


def reduce_rows(operation: str, x_kN: jax.Array, scratch_ref: Any) -> jax.Array:
    """The "max" or "add" over the rows of an array in the layout WGMMA, in a worker's own scratch space: Mosaic's own is one for all
    workers of a CTA, which nothing reports (results are wrong)."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x_kN.shape[1:], x_kN.dtype, layout=layout.reduce(0))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def reduce(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(operation, 0, scratch)

    return reduce(x_kN, scratch_ref)
