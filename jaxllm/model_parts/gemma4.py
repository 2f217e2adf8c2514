"""The decoder layer of Gemma 4."""

from dataclasses import dataclass
from typing import Any

from jaxllm.model_parts.decoder import Layer
from jaxllm.model_parts.mlp import MLP, Activation, MoE
from jaxllm.model_parts.norm import Norm


@dataclass(frozen=True)
class PerLayerEmbedding:
    """A sum with x behind a layer's MLP: x + norm(projection(activation(gate(x)) * e)), where e is the layer's part of a second embedding
    of the token and of a product of the first."""

    width: int
    """Values of a layer's part."""
    activation: Activation
    norm: Norm
    num_layers: int
    """Layers that have a part."""
    input_norm: Norm
    """The norm of the products of the first embedding, named as tensors outside of the layers are."""
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        return {"gate": (self.gate,), "projection": (self.projection,)}

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices; the parts of all layers counted in."""
        return 3 * self.num_layers * self.width

    def indivisible(self, size: int) -> list[str]:
        """None: every device computes it whole."""
        return []


@dataclass(frozen=True)
class Gemma4Layer(Layer):
    """A layer whose result is multiplied by a number. A mixture of experts as `mlp` comes with an MLP: the sum of both, each with separate
    norms, stands in place of an MLP's output."""

    scalar: str = "layer_scalar"
    """The tensor of that number."""
    per_layer: PerLayerEmbedding | None = None
    beside: MLP | None = None
    """The MLP next to a mixture; its input is the result of `mlp_norm`."""
    beside_post_norm: Norm | None = None
    experts_norm: Norm | None = None
    """The norm that the experts take of x, and experts_post_norm that of their output."""
    experts_post_norm: Norm | None = None
    router_norm: Norm | None = None
    """The norm that the router takes of x, without a weight; then come router_scale and 1 / sqrt(hidden_size)."""
    router_scale: str = "router.scale"

    @property
    def dense(self) -> MLP | None:
        """See Layer."""
        return self.beside if isinstance(self.mlp, MoE) else self.mlp

    @property
    def parts(self) -> dict[str, Any]:
        """See Layer."""
        further = {"beside": self.beside, "per_layer": self.per_layer}
        return {**super().parts, **{name: part for name, part in further.items() if part is not None}}
