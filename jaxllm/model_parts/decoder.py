"""A decoder layer, and what stands around the layers."""

import re
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.model_parts.attention import Attention, LatentAttention
from jaxllm.model_parts.mlp import MLP, MoE
from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.state_mixer import StateMixer

TokenMixer = Attention | LatentAttention | StateMixer
"""Parts by which tokens take from those before them."""

_PLACE = re.compile(
    r"(?P<mark>(?:re:|[-+]:)?\^?)(?:model\\?\.(?:language|text)_model\\?\.|(?:language|text)_model\\?\.(?:model\\?\.)?|model\\?\.)"
    r"(?=(?:embed_tokens|layers|norm|embed_tokens_per_layer|per_layer_\w+)(?:\\?\.|$))"
)
"""Where checkpoints of several models have the text model, in a name or in a regular expression behind `re:`, `+:` or `-:`."""
_HEAD = re.compile(r"(?P<mark>(?:re:|[-+]:)?\^?)(?:(?:language_)?model\\?\.)?lm_head(?=\\?\.|$)")


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + attention(attention_norm(x)), then x + mlp(mlp_norm(x)), or one of these alone."""

    attention: TokenMixer | None
    mlp: MLP | MoE | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_post_norm: Norm | None = None
    """Norm of attention's output before it is added to x."""
    mlp_post_norm: Norm | None = None
    parallel: bool = False
    """Whether it is x + attention(attention_norm(x)) + mlp(attention_norm(x))."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to x, behind their norms."""

    @property
    def dense(self) -> MLP | None:
        """The MLP that all tokens go through, in a mixture of experts the shared ones."""
        return self.mlp.shared if isinstance(self.mlp, MoE) else self.mlp

    @property
    def parts(self) -> dict[str, Any]:
        """Attention and MLP by name."""
        parts = {"attention": self.attention, "mlp": self.mlp}
        return {name: part for name, part in parts.items() if part is not None}

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this layer from being split over `size` devices."""
        return [fault for part in self.parts.values() for fault in part.indivisible(size)]

    def split(self, size: int) -> "Layer":
        """The shapes when the layer is split over `size` devices."""
        return self if self.attention is None else replace(self, attention=self.attention.split(size))

    def as_stored(self) -> "Layer":
        """The shapes of the checkpoint."""
        return self.split(1) if self.mlp is None else replace(self.split(1), mlp=self.mlp.as_stored())


@dataclass(frozen=True)
class Names:
    """A checkpoint's names of the tensors outside of the layers."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    head: str = "lm_head"
    ignored: tuple[str, ...] = ()
    """How the names of tensors begin that are not loaded."""
    unquantized: tuple[str, ...] = ()
    """How the names of linear layers end that stay plain where weights are quantised while they load."""
    is_part: bool = False
    """Whether the checkpoint may hold other models too, whose tensors are not loaded with the text model."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Regular expressions of what names have in checkpoints of another form, each with what stands there in its place (`re.sub`)."""

    def named(self, name: str) -> str:
        """The name here of a tensor or module of the text model, or a pattern of such, that a checkpoint calls otherwise (`aliases`) or
        has elsewhere: behind `model.language_model.`, `language_model.model.` or the like. Other names are returned as they are."""
        for pattern, ours in self.aliases:
            name = re.sub(pattern, ours, name, count=1)
        if not self.is_part:
            return name
        stem, head = self._stem, self.head
        name = _PLACE.sub(lambda found: found["mark"] + stem, name, count=1) if _PLACE.match(name) else name
        return _HEAD.sub(lambda found: found["mark"] + head, name, count=1) if _HEAD.match(name) else name

    def is_other(self, name: str) -> bool:
        """Whether a tensor is of another model than the text model; name: as `named` returns it."""
        stem = self._stem
        outside = (f"{stem}{name}" for name in ("embed_tokens.", "embed_tokens_per_layer.", "per_layer_", "norm."))
        own = (*outside, f"{stem}layers.", f"{self.head}.")
        return self.is_part and not name.startswith(own)

    @property
    def _stem(self) -> str:
        return self.embedding.removesuffix("embed_tokens")


@dataclass(frozen=True)
class Positions:
    """Learned embeddings of positions, added to those of the tokens."""

    name: str
    count: int
    """Rows of the table."""
    offset: int = 0
    """Row of the first position."""


@dataclass(frozen=True)
class Head:
    """How logits are made of the products of hidden states and head."""

    scale: float = 1.0
    soft_cap: float | None = None
    """Logits l become soft_cap * tanh(l / soft_cap)."""
    bias: bool = False
