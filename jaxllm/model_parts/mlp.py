"""The parts of layers that compute each token alone: an MLP, or a mixture of experts."""

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu2"]
"""Activations of experts: those of `pallas_kernels.grouped_matmul`, and of experts without a gate relu2, the square of relu."""


@dataclass(frozen=True)
class MLP:
    """down(activation(gate(x)) * up(x)); without a gate down(activation(up(x)))."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    xielu: str | None = None
    """The module with the numbers of the activation xIELU, which then stands in place of `activation`; without a gate."""
    clamp: float | None = None
    """Most of what the activation of a gate gives, and of the size of what it is multiplied by; None: any."""
    bias: bool = False
    name: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name of a gated MLP: a tensor with the rows of both, the gate's first. Without a gate the name of up."""
    down: str = "down_proj"
    transposed: bool = False
    """Whether the checkpoint holds the weights as [inputs, outputs]."""

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        prefix = f"{self.name}." if self.name else ""
        return {"gate_up": tuple(f"{prefix}{part}" for part in self.gate_up), "down": (f"{prefix}{self.down}",)}

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices."""
        return 3 * self.width

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this part from being split over `size` devices."""
        return [f"an intermediate size of {self.width}"] if self.width % size else []

    def as_stored(self) -> "MLP":
        return self


Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"]


@dataclass(frozen=True)
class Routing:
    """How each token chooses its experts from the logits of the router.

    softmax and sigmoid: the largest scores, of which the weights are those chosen; softmax_of_chosen: the largest logits, weighted by
    the softmax over these alone; sparsemixer: two experts, one after the other (arXiv:2409.12136).
    """

    num_experts: int
    top_k: int
    """Experts of a token."""
    scoring: Scoring = "softmax"
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    router: str = "gate"
    router_dtype: str | None = None
    """Type of its weight and of the products with it; None: the model's."""
    router_bias: bool = False
    correction_bias: str | None = None
    """A tensor added to the scores for the choice, not for the weights."""
    correction_bias_rank: int = 1
    """Dimensions of that tensor, of which the last is that of the experts."""
    expert_scale: str | None = None
    """A tensor with a factor of the weights of each expert."""
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of so many groups are chosen: of those with the largest score."""
    sums_two: bool = False
    """Whether the score of a group is the sum of its two largest, instead of its largest."""
    jitter: float = 0.0
    """Jitter of sparsemixer: relative distance from the largest logit within which experts share the weight, halved."""


INTO_LATENT, OUT_OF_LATENT = "fc1_latent_proj", "fc2_latent_proj"
"""The checkpoint's modules around experts in a latent space."""


@dataclass(frozen=True)
class MoE:
    """A mixture of experts, each an MLP; perhaps with experts that every token goes through."""

    routing: Routing
    width: int
    """Width of an expert."""
    activation: ExpertActivation = "silu"
    gated: bool = True
    clamp: float | None = None
    """As `MLP.clamp`, of routed experts."""
    bias: bool = False
    """Whether the experts have biases."""
    latent_dim: int | None = None
    """Width of what routed experts take and give, a product of x and of which the result is one; None: the model's."""
    shared: MLP | None = None
    shared_gate: str | None = None
    """A tensor whose product with x, after a sigmoid, is the factor of the shared experts' result."""
    name: str = "mlp"
    """Empty: the names of its tensors are those in the decoder layer."""
    gate_up: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj")
    """Names without {}: tensors of all experts, one of gate and up together or two. Without a gate the name of up."""
    down: str = "experts.{}.down_proj"
    ending: str = ".weight"
    """Ending of the names of tensors that are not transposed."""
    transposed: bool = False
    """Whether the checkpoint holds tensors of all experts [experts, inputs, outputs], named without `.weight`."""
    alternating: bool = False
    """Whether outputs of gate and up alternate in these, instead of the gate's coming first."""
    weighs_input: bool = False
    """Whether the weight of a token's only expert is a factor of what the expert takes, instead of its result."""
    by_expert: bool = False
    """Whether devices share the work by whole experts instead of by the experts' width."""
    num_redundant: int = 0
    """Second and further copies of experts that the devices have in all."""

    def module(self, layer: str) -> str:
        """The checkpoint's module of the mixture in the layer of this name."""
        return f"{layer}.{self.name}" if self.name else layer

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels for its experts; plain JAX computes others."""
        return self.gated and self.clamp is None

    @property
    def slots(self) -> tuple[int, ...]:
        """The expert in each place for one, as they are loaded: device after device has as many places, and the copies come last."""
        return slots(self.routing.num_experts, self.routing.num_experts + self.num_redundant)

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        found = {}
        if "{}" in self.down:
            for i in range(self.routing.num_experts):
                found[f"experts.{i}.gate_up"] = tuple(f"{self.name}.{part.format(i)}" for part in self.gate_up)
                found[f"experts.{i}.down"] = (f"{self.name}.{self.down.format(i)}",)
        if self.latent_dim is not None:
            found |= {"into_latent": (f"{self.name}.{INTO_LATENT}",), "out_of_latent": (f"{self.name}.{OUT_OF_LATENT}",)}
        shared = self.shared.linears if self.shared is not None else {}
        return found | {f"shared.{part}": names for part, names in shared.items()}

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices."""
        of_shared = self.shared.values_per_token if self.shared is not None else 0
        return 4 * self.routing.top_k * self.width + 2 * (self.latent_dim or 0) + of_shared

    def values_per_expert(self, hidden_size: int) -> int:
        """Values of an expert's weights in a model of this width."""
        return (3 if self.gated else 2) * self.width * (self.latent_dim or hidden_size)

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this part from being split over `size` devices."""
        faults = self.shared.indivisible(size) if self.shared is not None else []
        if self.by_expert:
            count, more = self.routing.num_experts, self.num_redundant
            named = f"{count} experts" + (f" with {more} redundant ones" if more else "")
            return faults + ([named] if (count + more) % size else [])
        return faults + ([f"an intermediate size of experts of {self.width}"] if self.width % size else [])

    def as_stored(self) -> "MoE":
        """With each expert once."""
        return replace(self, num_redundant=0)


def slots(num_experts: int, num_slots: int) -> tuple[int, ...]:
    """The expert in each of the slots: each once, then copies of the first."""
    return tuple(slot % num_experts for slot in range(num_slots))
