"""The step as a model sees it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.kernel_policy import ALIKE, KernelPolicy
from jaxllm.layers.attend import Attend, AttendToLatents
from jaxllm.layers.linear import PLAINLY, Linear
from jaxllm.layers.rope import rope_angles
from jaxllm.layers.row_states import RowStates
from jaxllm.model_parts import Rope
from jaxllm.parallel.exchange import RankExchange
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from jaxllm.weight_format import Multiply
from pallas_kernels import delta_decode as decode_of_linear_attention
from pallas_kernels import expert_choice
from pallas_kernels import gated_delta as gated_delta_rule
from pallas_kernels import router_scores as scores_of_router
from pallas_kernels import state_space as state_space_recurrence
from pallas_kernels.grouped_matmul import experts
from pallas_kernels.quantize import Quantized, Sums, add_norm_quantize, quantize, scaled

if TYPE_CHECKING:
    from jaxllm.layers.norm import AnyNorm

# Traced and lowered once for all layers of a program.
choose_experts = jax.jit(expert_choice.choose_experts, static_argnames=("rule", "implementation", "interpret"))
compute_experts = jax.jit(experts, static_argnames=("activation", "implementation", "interpret"))
delta_decode = jax.jit(decode_of_linear_attention.delta_decode, static_argnames=("gate", "eps", "implementation", "interpret"))
gated_delta = jax.jit(gated_delta_rule.gated_delta, static_argnames=("implementation", "interpret"))
router_scores = jax.jit(scores_of_router.router_scores, static_argnames=("eps", "weight_offset", "implementation", "interpret"))
state_space = jax.jit(state_space_recurrence.state_space, static_argnames=("implementation", "interpret"))


def call_layer(block: Any, next_norm: Any, runs: Any, step: "Step") -> Any:
    """The runs after a block, and their norm: see `DecoderBlock`."""
    return block(runs, next_norm, step)


class Adapt(Protocol):
    """Changes what layers compute by the adapter of each token's request."""

    def __call__(self, linear: Linear, x: Array, y: Array, start: int) -> Array:
        """The product y of a layer with x, of the tokens from `start` on, with what their adapters add."""
        ...

    def scores(self, name: str, x_TD: Array, y_TN: Array, start: int = 0) -> Array:
        """As `__call__`, for float32 scores y by the module of this name: logits, or those of a mixture's router."""
        ...

    def experts(self, name: str, start: int) -> Callable[..., Array] | None:
        """A replacement of `Step.experts` for the mixture of this name; None: adapters cannot change its experts."""
        ...

    def embedded(self, token_ids_T: Array, x_TD: Array, start: int, shards: Shards) -> Array:
        """The embeddings x of the tokens from `start` on, with what their adapters add; as x, this device's part of the sum."""
        ...


@dataclass
class Step:
    """The tokens of a step, and how a layer reaches what is not in its own weights. Made anew in each trace."""

    token_ids_T: Array
    positions_T: Array
    attend: Attend
    shards: Shards = ONE_DEVICE
    is_real_T: Array | None = None
    """Bool: whether a token is not padding; None: all are real."""
    router_scores: Callable[..., Array] | None = None
    """Computes the scores of a mixture's router from what enters the norm before it: `pallas_kernels.router_scores.router_scores`; None:
    they are computed from what leaves the norm."""
    choose_experts: Callable[..., tuple[Array, Array]] = partial(choose_experts, implementation="xla")
    """Chooses the experts of each token: `pallas_kernels.expert_choice.choose_experts`."""
    experts: Callable[..., Array] = partial(compute_experts, implementation="xla")
    """Computes the chosen experts: `pallas_kernels.grouped_matmul.experts`."""
    multiply: Multiply = PLAINLY
    """Computes products with weights in tiles: `pallas_kernels.quantized_matmul.product`."""
    multiply_gated: Callable[..., Array] | None = None
    """Computes gate, up and the activation of dense layers in steps of many tokens: `pallas_kernels.gated_matmul.product`; None: a product
    does, and plain JAX the activation."""
    attend_to_latents: AttendToLatents | None = None
    """`attend` of layers of latent attention; None where there are none."""
    states: RowStates | None = None
    """States of layers that keep one by row; None where there are none."""
    gated_delta: Callable[..., tuple[Array, Array]] = partial(gated_delta, implementation="xla")
    """Outputs and states of the gated delta rule: `pallas_kernels.gated_delta.gated_delta`."""
    delta_decode: Callable[..., tuple[Array, Array, Array]] | None = None
    """Computes all between the products of linear attention, in decodes: `pallas_kernels.delta_decode.delta_decode`; None: `gated_delta`
    does, and plain JAX around it."""
    state_space: Callable[..., tuple[Array, Array]] = partial(state_space, implementation="xla")
    """Outputs and states of Mamba-2's recurrence: `pallas_kernels.state_space.state_space`."""
    adapt: Adapt | None = None
    """None: no token has an adapter."""
    entering_TD: Array | None = None
    """In a later stage of a pipeline: the sum of embedding and layers that the stage before leaves, whole on every device."""
    given_TD: Array | None = None
    """Embeddings that stand in place of those of some tokens, at their full scale and whole on every device; None: no token has one."""
    is_given_T: Array | None = None
    """Bool, with `given_TD`: whether a token has its embedding there."""
    token_types_T: Array | None = None
    """Types of an encoder's tokens: 0 in the first text of a pair, 1 in the second; None: all are 0."""
    deepstack: Sequence[Array] | None = None
    """[T, D] each, whole on every device: what is added to the tokens behind the first layer, the second and so on, zero for tokens
    without; None: nothing is."""
    rope_positions_3T: Array | None = None
    """Positions in time, row and column by which ropes with sections turn tokens; [1, T] if all three are the same. None: `positions_T`."""
    exchange: RankExchange | None = None
    """Between data-parallel ranks, which share the experts of a mixture; None: experts are distributed over `shards` alone."""
    chosen: list[tuple[str, Array]] | None = None
    """Collects the experts that tokens chose, int32 [T, k], -1 for padding, with the name of their mixture: one for each run of the step's
    tokens. None: not collected."""
    slots: Callable[[str, Array, int | Array], Array] | None = None
    """Takes the name of a mixture, the experts int32 [T, k] that tokens chose, -1 for padding, and the number of the first of these
    tokens, by which copies are chosen. Returns the slots of the mixture's weights in which these experts are. None: each is in the slot
    of its number."""
    attended_positions_T: Array | None = None
    """Positions of the tokens that attention takes, where these are more than this device computes; None: they are the same."""
    wanted_features: Collection[int] = ()
    """Layers whose input `features` is to hold; one more than the last layer has stands for what the last one leaves."""
    call_layer: Callable[..., Any] = call_layer
    """Computes a block of the model."""
    policy: KernelPolicy = ALIKE
    """Choices that depend on the number of rows."""
    quantization: Mapping[str, Any] | None = None
    """How kernels quantise what products multiply, with what is computed before: options of `pallas_kernels.quantize`, each device its
    part of a vector with a separate scale; None: each product does it alone, in plain JAX, with the scale of the whole vector."""
    features: dict[int, Array] = field(default_factory=dict)
    """[T, D] each: the sum of embedding and earlier layers that enters a layer, before any norm, whole on every device."""
    _angles: dict[tuple[Rope | None, int], tuple[Array, Array]] = field(default_factory=dict)

    @property
    def tells_layers_apart(self) -> bool:
        """Whether what layers compute depends on their names."""
        return self.adapt is not None or self.chosen is not None or self.slots is not None

    def over(self, context: Any) -> "Step":
        """This step in a separate trace, with another context: what `attend`, `attend_to_latents` and `states` are parts of."""
        parts = {"attend": context, "attend_to_latents": context.attend_to_latents, "states": context}
        return replace(self, **parts, _angles={})

    def product(self, linear: Linear, x: Array | Quantized, start: int = 0) -> Array:
        """The product of a layer with the tokens from `start` on; where devices split its inputs, this one's part of the sum."""
        return scaled(self.sums(linear, x, start))

    def sums(self, linear: Linear, x: Array | Quantized, start: int = 0) -> Array | Sums:
        """As `product`, but without its scales where a kernel may apply them with what follows."""
        shards = self.shards if linear.is_split else ONE_DEVICE
        if isinstance(x, Quantized):
            return linear.sums(x, shards)
        if linear.quantizes_inputs and self.quantizes(len(x)):
            return linear.sums(self._quantized(x), shards)
        y = linear(x, shards, self.multiply, weight_only=self.policy.is_weight_only(len(x)))
        return y if self.adapt is None else self.adapt(linear, x, y, start)

    def quantizes(self, num_rows: int) -> bool:
        """Whether kernels quantise so many rows for products that need it."""
        return self.quantization is not None and self.adapt is None and not self.policy.is_weight_only(num_rows)

    def gates_in_one(self, num_tokens: int, *, is_scaled: bool) -> bool:
        """Whether `multiply_gated` computes dense layers, of so many tokens. is_scaled: in fp8."""
        is_here = self.multiply_gated is not None and self.adapt is None
        return is_here and self.policy.gates_in_one(num_tokens, is_scaled=is_scaled)

    def add_and_norm(
        self, part_TD: Array | Sums, residual_TD: Array | None, norm: "AnyNorm"
    ) -> tuple[Array, Array | Quantized]:
        """As `Shards.add_and_norm`; the norm is quantised by a kernel if only products that need it take it."""
        is_quantized = norm.before_quantized and self.quantizes(len(part_TD))
        is_whole = self.shards.size == 1  # else parts of the sum are added up first
        if is_quantized and is_whole and norm.is_plain and isinstance(part_TD, Sums) and residual_TD is not None:
            assert self.quantization is not None
            options = {"eps": norm.eps, **self.quantization}  # type: ignore[union-attr]
            return add_norm_quantize(part_TD, residual_TD, norm.weight[...], **options)  # type: ignore[union-attr,index]
        x_TD, normed_TD = self.shards.add_and_norm(scaled(part_TD), residual_TD, norm)
        return x_TD, self._quantized(normed_TD) if is_quantized else normed_TD

    def _quantized(self, x: Array) -> Quantized:
        assert self.quantization is not None
        return quantize(x.reshape(len(x), -1), **self.quantization)

    def scores(self, name: str, x_TD: Array, y_TN: Array, start: int = 0) -> Array:
        """Float32 scores y of the tokens x from `start` on, by the module of this name, as their adapters change them."""
        return y_TN if self.adapt is None else self.adapt.scores(name, x_TD, y_TN, start)

    def with_given(self, part_TD: Array, start: int) -> Array:
        """The embeddings of the tokens from `start` on, with those given in place of theirs; both are this device's part of the sum."""
        if self.given_TD is None or self.is_given_T is None:
            return part_TD
        own = slice(start, start + len(part_TD))
        given_TD = self.given_TD[own].astype(part_TD.dtype)
        if self.shards.size > 1:
            given_TD = jnp.where(self.shards.index == 0, given_TD, 0)
        return jnp.where(self.is_given_T[own, None], given_TD, part_TD)

    def note_choice(self, name: str, expert_Tk: Array) -> None:
        """Called by the mixture of this name with the experts that some of the step's tokens chose."""
        if self.chosen is not None:
            self.chosen.append((name, expert_Tk))

    def slots_of(self, name: str, expert_Tk: Array, start: int) -> Array:
        """The slots of the experts that the tokens from `start` on chose in the mixture of this name."""
        if self.slots is None:
            return expert_Tk
        # Tokens take copies in turn. Each data-parallel rank begins with another one: in a decode it may have a single token.
        return self.slots(name, expert_Tk, start if self.exchange is None else start + self.exchange.rank)

    def experts_of(
        self, name: str, start: int, *, are_whole: bool, plain: Callable[..., Array] | None = None
    ) -> Callable[..., Array]:
        """The function that computes the chosen experts of a mixture for the tokens from `start` on, as `experts` does. are_whole:
        data-parallel ranks share experts, of which devices have whole ones; else each rank has a share of every expert on each of
        its devices. plain: what computes experts that no kernel does, which adapters cannot change."""
        changed = None if self.adapt is None or plain is not None else self.adapt.experts(name, start)
        found = (plain or self.experts) if changed is None else changed
        return partial(_exchanged, self.exchange, found) if self.exchange is not None and are_whole else found

    @property
    def expert_rank(self) -> Array | int:
        """The place of this device among those that whole experts are distributed to."""
        return self.shards.index if self.exchange is None else self.exchange.device

    def angles(self, rope: Rope | None, head_dim: int) -> tuple[Array, Array]:
        """Cosine and sine, float32 [T, H/2], of every token that attention takes; layers with equal ropes share them."""
        key = (rope, head_dim)
        if key not in self._angles:
            positions_T = self.positions_T if self.attended_positions_T is None else self.attended_positions_T
            if rope is not None and rope.sections is not None and self.rope_positions_3T is not None:
                given = self.rope_positions_3T
                positions_T = given[0] if len(given) == 1 else given
            self._angles[key] = rope_angles(rope, head_dim, positions_T)
        return self._angles[key]


def _exchanged(
    exchange: RankExchange,
    experts: Callable[..., Array],
    x_TD: Array,
    expert_Tk: Array,
    weight_Tk: Array,
    gate_up_E2FD: Any,
    down_EDF: Any,
    **options: Any,
) -> Array:
    """`experts` for the tokens of all data-parallel ranks."""

    def of_device(x_TD: Array, expert_Tk: Array, weight_Tk: Array) -> Array:
        return experts(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF, **options)

    return exchange.run(of_device, x_TD, expert_Tk, weight_Tk, len(down_EDF))
