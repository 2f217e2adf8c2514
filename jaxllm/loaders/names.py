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


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint: its name, its shape there, and the shape to see it with."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]


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
        views = [t.view for t in self.tensors]
        return tuple(sum(v[i] for v in views) if i == self.axis else n for i, n in enumerate(views[0]))

    def read(self, tensor: Callable[[str], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """That part of the concatenation, in memory; of the tensors only what is needed is touched."""
        across = tuple(slice(None) if i == self.axis else part for i, part in enumerate(index))
        along = tuple(part if i == self.axis else slice(None) for i, part in enumerate(index))
        return np.concatenate([tensor(t.name).reshape(t.view)[across] for t in self.tensors], axis=self.axis)[along]

    def output_major(self) -> "Source":
        """The same without permutation: the parameter as fp8 weights hold it."""
        return replace(self, permutation=tuple(range(len(self.permutation))))

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors that a parameter is written as."""
        ends = np.cumsum([t.view[self.axis] for t in self.tensors])[:-1]
        pieces = np.split(parameter.transpose(np.argsort(self.permutation)), ends, axis=self.axis)
        return {t.name: piece.reshape(t.shape) for t, piece in zip(self.tensors, pieces, strict=True)}


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
