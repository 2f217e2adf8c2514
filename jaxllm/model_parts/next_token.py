"""Layers for multi-token prediction that a checkpoint has in addition to the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.model_parts.decoder import Layer


@dataclass(frozen=True)
class NextToken:
    """A module of these, and what its tensors are called. Source: arXiv:2412.19437, section 2.2.

    It norms the embedding of a token and the hidden state of the one before it, joins both by a product, computes layers and a norm.
    In names, {} stands for the name of its first layer, {module} for the module's number. Where several modules follow one another, each
    takes the embedding of a token later than the one before it takes.
    """

    layers: tuple[Layer, ...] = ()
    """Empty: one like the last of the model's layers with attention."""
    layer: str | None = None
    """The checkpoint's name of each layer, in which {} stands for its number; None: the one behind the model's last."""
    embedding_norm: str = "{}.enorm"
    hidden_norm: str = "{}.hnorm"
    joined: str = "{}.eh_proj"
    norm: str = "{}.shared_head.norm"
    shared: tuple[str, ...] = ("{}.embed_tokens.", "{}.shared_head.")
    """How the names of tensors begin that are the model's own once more."""
    chains: bool = True
    """Whether a module behind the first takes the hidden states that the module before it leaves; else all take the model's."""

    def named(self, layer: str, module: int = 0) -> NextToken:
        """With whole names of tensors, for the module of this number, whose first layer has this name."""
        names = ("embedding_norm", "hidden_norm", "joined", "norm")
        whole = {name: getattr(self, name).format(layer, module=module) for name in names}
        return replace(self, **whole, shared=tuple(name.format(layer, module=module) for name in self.shared))

    @property
    def numbers_modules(self) -> bool:
        """Whether each of several modules has separate names."""
        names = (self.embedding_norm, self.hidden_norm, self.joined)
        return all("{" in name for name in names)


FINAL_NORM = NextToken(norm="{}.final_layernorm")
"""As DeepSeek has it, but for the name of the last norm."""
