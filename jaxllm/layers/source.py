"""Where the values of a parameter come from: tensors of a Hugging Face checkpoint, and how they are laid out.

A checkpoint stores each projection output-major ([out, in]), often several of one product apart. Seen with the right dimensions, the
tensors of a parameter lie one after the other along one axis; that concatenation, with its dimensions permuted, is the parameter.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]
"""A part of an array: a slice without step for each dimension."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint: its name, its stored shape, the shape of its view, and the mesh's copies and padding."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    copies: int = 1
    """Each index of the view's first dimension comes so often, one after the other: KV heads of several devices."""
    padding: int = 0
    """Zeros behind the view's first dimension: tokens that fill up a vocabulary."""
    rows: tuple[int, int] | None = None
    """The view is of this range of the stored outputs; None: of all."""
    runs: int = 1
    """The stored outputs are so many equal runs, and `rows` is the range of each."""
    columns: tuple[int, int, int] | None = None
    """(start, stop, size): a dimension of the view is this range of one of `size`; None: all are whole."""
    columns_axis: int = 1
    """The dimension that `columns` selects from."""
    transposed: bool = False
    """The outputs are the last stored dimension instead of the first."""
    order: tuple[int, ...] | None = None
    """Order of the values along the last dimension of the outputs, by their stored places; None: as stored."""
    order_axis: int = 0
    """The dimension of the view that `order` applies to."""
    distributed: bool = False
    """Copies of a head have a part each of its values, the view's second dimension, instead of all."""
    picks: tuple[int, ...] | None = None
    """Indices of the view's first dimension that are read, perhaps several times; None: all of it."""

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """Shape of the view with copies and padding."""
        if self.picks is not None:
            return (len(self.picks), *self.view[1:])
        return (self.view[0] * self.copies + self.padding, *self.view[1:])

    def read(self, array: np.ndarray, index: Index) -> np.ndarray:
        """A part of the view with copies and padding. Of the array only what is needed is touched; a view of it if that can be."""
        part = self._read(self.seen(array), index)
        return part if self.order is None else part.take(self.order, self.order_axis)

    def seen(self, array: np.ndarray) -> np.ndarray:
        """The view of the stored tensor, without copies and padding."""
        stored = self.rows_of(array.T if self.transposed else array)
        if self.columns is None:
            return stored.reshape(self.view)
        (start, stop, size), axis = self.columns, self.columns_axis
        whole = stored.reshape(*self.view[:axis], size, *self.view[axis + 1 :])
        return whole[(slice(None),) * axis + (slice(start, stop),)]

    def rows_of(self, stored: np.ndarray) -> np.ndarray:
        """The outputs that the view is of: a view of the stored ones, [runs, outputs, ...] of several runs."""
        if self.rows is None:
            return stored
        start, stop = self.rows
        return stored[start:stop] if self.runs == 1 else stored.reshape(self.runs, -1, *stored.shape[1:])[:, start:stop]

    def _read(self, seen: np.ndarray, index: Index) -> np.ndarray:
        if self.picks is not None:
            rows = np.array(self.picks[index[0]])
            is_run = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            return seen[(slice(rows[0], rows[0] + len(rows)) if is_run else rows, *index[1:])]
        if self.copies == 1 and not self.padding:
            return seen[index]
        start, stop, _ = index[0].indices(self.placed_shape[0])
        if self.copies > 1:
            rows = np.arange(start, stop) // self.copies
            return seen[(slice(rows[0], rows[-1] + 1), *index[1:])][rows - rows[0]]
        part = seen[(slice(start, min(stop, self.view[0])), *index[1:])]
        missing = stop - start - len(part)
        return np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)]) if missing else part


Read = Callable[[Tensor, Index], np.ndarray]
"""Reads a part of a tensor."""


@dataclass(frozen=True)
class Source:
    """The tensors of a parameter of the stored shape (`ModelConfig.as_stored`)."""

    tensors: tuple[Tensor, ...]
    axis: int
    """The views are concatenated along it."""
    permutation: tuple[int, ...]
    """Dimension i of the parameter is dimension permutation[i] of the concatenation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation."""
        views = [t.placed_shape for t in self.tensors]
        return tuple(sum(v[i] for v in views) if i == self.axis else n for i, n in enumerate(views[0]))

    def index_of(self, index: Index) -> Index:
        """The part of the concatenation that a part of the parameter is."""
        return tuple(index[i] for i in np.argsort(self.permutation))

    def read(self, tensor: Read, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of the parameter, never a view of a file: arrays on a CPU may be this very memory."""
        parts = [tensor(t, self.index_of(index)) for t in self.tensors]
        part = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)
        return part.transpose(self.permutation).astype(dtype, order="C", copy=not part.flags.writeable)

    def placed(self, axes: Sequence[str], shape: Sequence[int]) -> "Source":
        """The source of a parameter of `shape`, which differs from the stored one as `layout.expand` says: tensors are read so
        that each device gets its own part without the rest."""
        stored = tuple(self.shape[i] for i in self.permutation)
        if stored == tuple(shape):
            return self
        if "vocab" in axes:
            axis = axes.index("vocab")
            assert self.permutation[axis] == 0, "the vocabulary comes first in a checkpoint"
            (tensor,) = self.tensors
            return replace(self, tensors=(replace(tensor, padding=shape[axis] - stored[axis]),))
        if "heads" not in axes:  # the bytes of packed values, which are neither copied nor padded
            return self
        axis = axes.index("heads")
        copies, where = shape[axis] // stored[axis], self.permutation[axis]
        has_groups = axes[axis + 1] in ("group", "qkv")
        return replace(self, tensors=tuple(_with_copies(tensor, copies, where, has_groups) for tensor in self.tensors))

    def picked(self, picks: tuple[int, ...]) -> "Source":
        """The source of a parameter with these indices of the view's first dimension, in this order."""
        return replace(self, tensors=tuple(replace(tensor, picks=picks) for tensor in self.tensors))

    def output_major(self) -> "Source":
        """The source without permutation: of the parameter with the outputs before the inputs."""
        return replace(self, permutation=tuple(range(len(self.permutation))))


@dataclass(frozen=True)
class Stacked:
    """A parameter [*lead, ...] of tensors of equal shapes, one for each index of the leading dimensions: the weights of experts."""

    tensors: tuple[Tensor, ...]
    lead: tuple[int, ...]

    def picked(self, picks: tuple[int, ...]) -> "Stacked":
        """The source of a parameter with these indices of the first dimension, in this order."""
        each = len(self.tensors) // self.lead[0]
        tensors = tuple(self.tensors[first * each + i] for first in picks for i in range(each))
        return Stacked(tensors, (len(picks), *self.lead[1:]))

    def placed(self, axes: Sequence[str], shape: Sequence[int]) -> "Stacked":
        """The source itself: its copies of experts are picked."""
        return self

    def read(self, tensor: Read, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of the parameter. Only the tensors in it are read, and each is copied once, into its place."""
        n = len(self.lead)
        chosen = np.arange(len(self.tensors)).reshape(self.lead)[index[:n]]
        part: np.ndarray | None = None
        for place, i in np.ndenumerate(chosen):
            piece = tensor(self.tensors[i], index[n:])
            if part is None:
                part = np.empty((*chosen.shape, *piece.shape), dtype)
            part[place] = piece
        assert part is not None, "no device holds no experts"
        return part


@dataclass(frozen=True)
class PartlyZero:
    """A source of which the checkpoint lacks some tensors: these are zeros."""

    whole: Source
    is_there: tuple[bool, ...]
    """For each of its tensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(itertools.compress(self.whole.tensors, self.is_there))

    def placed(self, axes: Sequence[str], shape: Sequence[int]) -> "PartlyZero":
        """See AnySource."""
        return replace(self, whole=self.whole.placed(axes, shape))

    def read(self, tensor: Read, index: Index, dtype: np.dtype) -> np.ndarray:
        """See AnySource."""
        there = self.tensors

        def of_all(wanted: Tensor, index: Index) -> np.ndarray:
            return tensor(wanted, index) if wanted in there else np.zeros(wanted.placed_shape, dtype)[index]

        return self.whole.read(of_all, index, dtype)


class AnySource(Protocol):
    """Where a parameter comes from."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are read from the checkpoint."""

    def placed(self, axes: Sequence[str], shape: Sequence[int]) -> "AnySource":
        """The source of a parameter of `shape`, which has copies and padding of the mesh in addition."""

    def read(self, tensor: Read, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of the parameter in a type, of parts of its tensors."""


def _with_copies(tensor: Tensor, copies: int, where: int, has_groups: bool) -> Tensor:
    """A tensor whose KV heads, dimension `where` of its view, are `copies` times as many: keys and values come as often, queries are
    distributed. has_groups: whether the next dimension has the query heads of each KV head."""
    if tensor.distributed:
        assert where == 0, "only outputs are"
        return replace(tensor, view=(tensor.view[0] * copies, tensor.view[1] // copies, *tensor.view[2:]))
    if not has_groups or tensor.view[where + 1] == 1:
        assert where == 0, "only keys and values are copied"
        return replace(tensor, copies=copies)
    before, heads, group, after = tensor.view[:where], tensor.view[where], tensor.view[where + 1], tensor.view[where + 2 :]
    return replace(tensor, view=(*before, heads * copies, group // copies, *after))


def plain(name: str, shape: Sequence[int]) -> Source:
    """A tensor that is the parameter."""
    return Source((Tensor(name, tuple(shape), tuple(shape)),), axis=0, permutation=tuple(range(len(shape))))


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint, or some rows of it, that a linear layer is made of."""

    name: str
    outputs: tuple[int, ...]
    """Dimensions of its outputs."""
    order: tuple[int, ...] | None = None
    """Order of the values along the last of these, by their stored places."""
    columns: tuple[int, int, int] | None = None
    """(start, stop, size): the last of these is this range of one of `size`; None: it is whole."""
    distributed: bool = False
    """See `Tensor.distributed`."""
    within: tuple[int, int, int] | None = None
    """(first, size, count): the tensor has `count` runs of `size` outputs, and this module's are an equal part of each from the first on;
    None: the tensor has those of the modules of this name, in order."""

    @property
    def num_rows(self) -> int:
        """Outputs in the checkpoint."""
        return math.prod(self.outputs if self.columns is None else (*self.outputs[:-1], self.columns[2]))


def output_major(
    modules: Sequence[Module],
    kind: str,
    joined: int,
    inputs: Sequence[int] = (),
    trailing: Sequence[int] = (),
    *,
    transposed: bool = False,
) -> Source:
    """The tensors `kind` of modules, [outputs, inputs] unless transposed, joined along a dimension of the outputs; the parameter has
    the inputs first. A name that comes several times is one tensor with the rows of all of them, in order.

    trailing: dimensions of size 1 that the stored tensors have in place of inputs.
    """
    inputs = tuple(inputs)
    num_rows = {m.name: sum(n.num_rows for n in modules if n.name == m.name) for m in modules}
    used = dict.fromkeys(num_rows, 0)
    tensors = []
    for m in modules:
        start = used[m.name]
        used[m.name] = end = start + m.num_rows
        stored, runs = num_rows[m.name], 1
        rows = None if end - start == stored else (start, end)
        if m.within is not None:
            first, size, runs = m.within
            stored, rows = size * runs, (first, first + m.num_rows // runs)
        shape = (stored, *((math.prod(inputs),) if inputs else ()), *trailing)
        is_transposed = transposed and bool(inputs)
        name, view = f"{m.name}.{kind}", (*m.outputs, *inputs)
        shape = shape[::-1] if is_transposed else shape
        last = len(m.outputs) - 1
        places: dict[str, Any] = {"order": m.order, "order_axis": last, "columns": m.columns, "columns_axis": last}
        places["distributed"] = m.distributed
        tensors.append(Tensor(name, shape, view, rows=rows, runs=runs, transposed=is_transposed, **places))
    num_outputs = len(modules[0].outputs)
    permutation = (*range(num_outputs, num_outputs + len(inputs)), *range(num_outputs))
    return Source(tuple(tensors), joined, permutation)
