"""Writes parameters into the tensors that they are read from."""

import functools

import numpy as np

from jaxllm.layers.source import AnySource, PartlyZero, Source, Stacked, Tensor


@functools.singledispatch
def write(source: AnySource, parameter: np.ndarray, written: dict[str, np.ndarray]) -> None:
    """Write a parameter into its tensors, by name; those that are not there yet are added."""
    raise TypeError(f"parameters of {type(source).__name__} are not written")


@write.register
def _(source: Source, parameter: np.ndarray, written: dict[str, np.ndarray]) -> None:
    ends = np.cumsum([t.view[source.axis] for t in source.tensors])[:-1]
    pieces = np.split(parameter.transpose(np.argsort(source.permutation)), ends, axis=source.axis)
    for t, piece in zip(source.tensors, pieces, strict=True):
        if t.name not in written:
            written[t.name] = np.empty(t.shape, parameter.dtype)
        write_view(t, written[t.name], piece)


@write.register
def _(source: Stacked, parameter: np.ndarray, written: dict[str, np.ndarray]) -> None:
    pieces = parameter.reshape(len(source.tensors), *parameter.shape[len(source.lead) :])
    for t, piece in zip(source.tensors, pieces, strict=True):
        written[t.name] = np.empty(t.shape, parameter.dtype)
        write_view(t, written[t.name], piece)


@write.register
def _(source: PartlyZero, parameter: np.ndarray, written: dict[str, np.ndarray]) -> None:
    of_all: dict[str, np.ndarray] = {}
    write(source.whole, parameter, of_all)
    written.update((each.name, of_all[each.name]) for each in source.tensors)


def write_view(tensor: Tensor, array: np.ndarray, part: np.ndarray) -> None:
    """Write the whole view of a tensor into its array, which has the stored shape."""
    assert tensor.picks is None, "only a parameter of the stored shape is written"
    part = part if tensor.order is None else part.take(np.argsort(tensor.order), tensor.order_axis)
    if tensor.columns is not None:
        tensor.seen(array)[...] = part
        return
    rows = tensor.rows_of(array.T if tensor.transposed else array)
    rows[...] = part.reshape(rows.shape)
