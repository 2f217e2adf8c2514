"""How parameters are called and laid out in Hugging Face checkpoints of the Llama lineage.

A checkpoint stores each projection apart and output-major ([out, in]). Seen with the right dimensions, the tensors of a
parameter lie one after the other along one axis; that concatenation, with its dimensions permuted, is the parameter.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.loaders.layout import ParamPath
from jaxllm.model_config import ModelConfig
from jaxllm.quantization_config import LINEAR_MODULES

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias)$")
"""Buffers that old versions of transformers saved beside the weights."""

_TOP_LEVEL = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_PER_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "mlp_norm": ("post_attention_layernorm",),
    **LINEAR_MODULES,
}


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

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """Of the view with copies and padding."""
        return (self.view[0] * self.copies + self.padding, *self.view[1:])

    def read(self, array: np.ndarray, index: Index) -> np.ndarray:
        """A part of the view with copies and padding. Of the array only what is needed is touched; a view of it if that can be."""
        seen = array.reshape(self.view)
        if self.copies == 1 and not self.padding:
            return seen[index]
        start, stop, _ = index[0].indices(self.placed_shape[0])
        if self.copies > 1:
            rows = np.arange(start, stop) // self.copies
            return seen[(slice(rows[0], rows[-1] + 1), *index[1:])][rows - rows[0]]
        part = seen[(slice(start, min(stop, self.view[0])), *index[1:])]
        missing = stop - start - len(part)
        return np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)]) if missing else part


@dataclass(frozen=True)
class Source:
    """Where a parameter of the stored shape (`ModelConfig.as_stored`) comes from."""

    tensors: tuple[Tensor, ...]
    axis: int
    """The views are concatenated along it."""
    permutation: tuple[int, ...]
    """Dimension i of the parameter is dimension permutation[i] of the concatenation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the concatenation."""
        views = [t.placed_shape for t in self.tensors]
        return tuple(sum(v[i] for v in views) if i == self.axis else n for i, n in enumerate(views[0]))

    def read(self, tensor: Callable[[Tensor, Index], np.ndarray]) -> np.ndarray:
        """The whole concatenation, in memory. `tensor` reads a part of a tensor."""
        whole = (slice(None),) * len(self.permutation)
        return np.concatenate([tensor(t, whole) for t in self.tensors], axis=self.axis)

    def placed(self, axes: Sequence[str], shape: Sequence[int]) -> "Source":
        """The same for a parameter of `shape`, which differs from the stored one as `layout.expand` says: the tensors are read so
        that each device gets its own part without the rest."""
        stored = tuple(self.shape[i] for i in self.permutation)
        if stored == tuple(shape):
            return self
        if "vocab" in axes:
            axis = axes.index("vocab")
            assert self.permutation[axis] == 0, "the vocabulary comes first in a checkpoint"
            (tensor,) = self.tensors
            return replace(self, tensors=(replace(tensor, padding=shape[axis] - stored[axis]),))
        axis = axes.index("heads")
        copies, where = shape[axis] // stored[axis], self.permutation[axis]
        return replace(self, tensors=tuple(_with_copies(tensor, copies, where) for tensor in self.tensors))

    def output_major(self) -> "Source":
        """The same without permutation: the parameter as fp8 weights hold it."""
        return replace(self, permutation=tuple(range(len(self.permutation))))

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors that a parameter is written as."""
        ends = np.cumsum([t.view[self.axis] for t in self.tensors])[:-1]
        pieces = np.split(parameter.transpose(np.argsort(self.permutation)), ends, axis=self.axis)
        return {t.name: piece.reshape(t.shape) for t, piece in zip(self.tensors, pieces, strict=True)}


def _with_copies(tensor: Tensor, copies: int, where: int) -> Tensor:
    """A tensor whose KV heads, dimension `where` of its view, are `copies` times as many: keys and values come as often, queries are
    distributed."""
    before, heads, group, after = tensor.view[:where], tensor.view[where], tensor.view[where + 1], tensor.view[where + 2 :]
    if group == 1:
        assert where == 0, "only projections to keys and values are copied"
        return replace(tensor, copies=copies)
    return replace(tensor, view=(*before, heads * copies, group // copies, *after))


def source_of(path: ParamPath, config: ModelConfig) -> Source:
    """Where the parameter at this path of the model comes from."""
    c = config.as_stored()
    *module, kind = map(str, path)
    if kind == "kv_scale":
        names = [f"model.layers.{module[1]}.self_attn.{name}_scale" for name in "kv"]
        return Source(tuple(Tensor(name, (1,), (1,)) for name in names), axis=0, permutation=(0,))
    if kind == "values":
        return source_of(path[:-1], config).output_major()
    is_scale = kind == "scale"
    if is_scale:
        module, kind = module[:-1], "weight_scale"
    if len(module) == 1:
        name = f"{_TOP_LEVEL[module[0]]}.{kind}"
        shape = (c.hidden_size,) if module[0] == "norm" else (c.vocab_size, c.hidden_size)
        return _plain(name, shape)
    _, layer, *inner = module
    part = ".".join(inner)
    names = [f"model.layers.{layer}.{name}.{kind}" for name in _PER_LAYER[part]]
    D, K, G, H, F = c.hidden_size, c.num_kv_heads, c.group_size, c.head_dim, c.intermediate_size
    # The input dimension comes last in the checkpoint and first in the parameter; a bias has none.
    into = (D,) if kind == "weight" else ()
    ones = (1,) if is_scale else ()
    match part:
        case "attention.qkv":
            tensors = tuple(
                Tensor(name, (K * n * H, *into, *ones), (K, n, H, *into)) for name, n in zip(names, (G, 1, 1), strict=True)
            )
            return Source(tensors, axis=1, permutation=(3, 0, 1, 2) if into else (0, 1, 2))
        case "mlp.gate_up":
            tensors = tuple(Tensor(name, (F, *into, *ones), (1, F, *into)) for name in names)
            return Source(tensors, axis=0, permutation=(2, 0, 1) if into else (0, 1))
        case "attention.out" if into:
            return Source((Tensor(names[0], (D, K * G * H), (D, K, G, H)),), axis=0, permutation=(1, 2, 3, 0))
        case "mlp.down" if into:
            return Source((Tensor(names[0], (D, F), (D, F)),), axis=0, permutation=(1, 0))
        case "attention.out" | "mlp.down" if is_scale:
            return Source((Tensor(names[0], (D, 1), (D,)),), axis=0, permutation=(0,))
    return _plain(names[0], (H,) if part in ("attention.q_norm", "attention.k_norm") else (D,))


def _plain(name: str, shape: Sequence[int]) -> Source:
    return Source((Tensor(name, tuple(shape), tuple(shape)),), axis=0, permutation=tuple(range(len(shape))))
