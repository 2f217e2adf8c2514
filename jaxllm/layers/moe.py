"""A mixture of experts."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, PackedWeight, abstract_param, declare, precision_of
from jaxllm.layers.mlp import FeedForward
from jaxllm.layers.norm import AnyNorm, Normalization
from jaxllm.layers.plain_experts import plain_experts
from jaxllm.layers.routing import rule_of
from jaxllm.layers.source import Module, Source, Stacked, Tensor, plain
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.model_parts.mlp import INTO_LATENT, OUT_OF_LATENT
from jaxllm.parallel.axes import MESH_AXES
from jaxllm.parallel.shards import Shards
from jaxllm.weight_format import ParamSpec, WeightSpec
from pallas_kernels.quantize import scaled


class Unnormed(NamedTuple):
    """The sum whose norm a mixture takes, and that norm."""

    x_TD: Array
    norm: AnyNorm


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a few experts' results for each token, and those of shared experts. Source: arXiv:1701.06538.

    Weights of experts are output-major, as checkpoints hold them: gate_up [P, 2, F, D], without a gate [P, 1, F, D], and down
    [P, D, F], arrays or in 4 or 8 bits, in as many slots P as there are experts and redundant copies of some.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: MoE, prefix: str):
        E, D, F, C = part.routing.num_experts, config.hidden_size, part.width, 2 if part.gated else 1
        L = part.latent_dim or D
        self.part = part
        self.prefix = prefix
        self.name = name = part.module(prefix.removesuffix("."))
        router, dtype = f"{name}.{part.routing.router}.weight", part.routing.router_dtype or config.dtype
        self.router = abstract_param((E, D), ("experts", "embed"), dtype, source=router)
        self.router_bias = (  # wide: XLA leaves it to the product, and else widens it by a kernel in each step
            abstract_param((E,), ("experts",), "float32", source=f"{name}.{part.routing.router}.bias", init="zeros")
            if part.routing.router_bias
            else None
        )
        bias, rank = part.routing.correction_bias, part.routing.correction_bias_rank
        stored = Tensor(f"{name}.{bias}", (*(1,) * (rank - 1), E), (E,))
        self.correction_bias = (
            None
            if bias is None
            else abstract_param((E,), ("experts",), "float32", source=Source((stored,), 0, (0,)), init="zeros")
        )
        scale = part.routing.expert_scale
        self.expert_scale = (
            None if scale is None else abstract_param((E,), ("experts",), config.dtype, source=f"{name}.{scale}", init="ones")
        )
        by_expert, by_width = ("split_experts", "expert_mlp"), ("experts", "mlp")
        self.axes = experts, width = by_expert if part.by_expert else by_width
        """Axes of the experts, and of their width."""
        gates, down = [f"{name}.{part}" for part in part.gate_up], f"{name}.{part.down}"
        axes = (experts, "gate_up", width, "embed")
        P = len(part.slots)
        gate_up_source, down_source = (_in_slots(source, part) for source in _sources(config, part, gates, down))
        self.gate_up = _weight(config, part, (P, C, F, L), axes, gate_up_source)
        self.down = _weight(config, part, (P, L, F), (experts, "embed", width), down_source)
        self.gate_up_bias = self.down_bias = nnx.data(None)
        if part.bias:
            assert part.alternating, "no family stores other experts' biases"
            biases = _in_slots(_alternating(f"{gates[0]}_bias", (E, F, 2)), part)
            self.gate_up_bias = abstract_param((P, 2, F), axes[:-1], config.dtype, source=biases, init="zeros")
            biases = _in_slots(plain(f"{down}_bias", (E, D)), part)
            self.down_bias = abstract_param((P, D), (experts, "embed"), config.dtype, source=biases, init="zeros")
        self.into_latent = self.out_of_latent = nnx.data(None)
        if part.latent_dim is not None:

            def product(subscripts: str, shape: tuple[int, int], axes: tuple[str, str], module: str) -> Linear:
                modules = [Module(f"{name}.{module}", shape[1:])]
                return Linear(subscripts, shape, axes, config.dtype, modules=modules)

            self.into_latent = product("td,dl->tl", (D, L), ("embed", "latent"), INTO_LATENT)
            self.out_of_latent = product("tl,ld->td", (L, D), ("latent", "embed"), OUT_OF_LATENT)
        self.shared = None if part.shared is None else FeedForward(config, part.shared, prefix)
        self.shared_gate = (
            None
            if part.shared_gate is None
            else abstract_param((1, D), ("gate_up", "embed"), config.dtype, source=f"{name}.{part.shared_gate}.weight")
        )

    def __call__(
        self,
        x_TD: Array,
        step: Step,
        start: int = 0,
        of_router_TD: Array | None = None,
        unnormed: Unnormed | None = None,
    ) -> Array:
        """The output; of several devices, this one's part of the sum. x are the tokens of the step from `start` on; of_router: the
        router's input, if it is not x. unnormed: what x is the norm of, if that is known."""
        shards = step.shards
        routed_TD, wide = x_TD if of_router_TD is None else of_router_TD, self.part.routing.router_dtype
        if unnormed is not None and of_router_TD is None and self._takes_unnormed(unnormed, step):
            logits_TE = self._scores_of_unnormed(unnormed, step, start)
        else:
            logits_TE = _scores(routed_TD if wide is None else routed_TD.astype(wide), self.router[...])
            if self.router_bias is not None:
                logits_TE = logits_TE + self.router_bias[...]
        logits_TE = step.scores(self.router_name, routed_TD, logits_TE, start)
        bias = None if self.correction_bias is None else self.correction_bias[...]
        is_real_T = None if step.is_real_T is None else step.is_real_T[start : start + len(x_TD)]
        expert_Tk, weight_Tk = step.choose_experts(logits_TE, bias, is_real_T, rule=rule_of(self.part.routing))
        if self.expert_scale is not None:  # of padding, whose expert is -1, any
            weight_Tk = weight_Tk * self.expert_scale[...].astype(weight_Tk.dtype)[expert_Tk]
        step.note_choice(self.name, expert_Tk)
        taken_TD = x_TD if self.into_latent is None else step.product(self.into_latent, x_TD, start)
        gate_up_E2FD, down_EDF = self.gate_up[...], self.down[...]
        if self.part.has_kernels and (isinstance(gate_up_E2FD, Array) or isinstance(down_EDF, Array)):
            gate_up_E2FD, down_EDF = _arrays(gate_up_E2FD, down_EDF, x_TD.dtype)
        if self.part.weighs_input:
            taken_TD, weight_Tk = (x_TD * weight_Tk).astype(x_TD.dtype), jnp.ones_like(weight_Tk)
        biases: dict[str, Any] = {}
        if self.part.has_kernels:
            gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[...]
            biases = {"gate_up_bias_E2F": gate_up_bias, "down_bias_ED": self._down_bias(shards)}
        plain = None if self.part.has_kernels else partial(plain_experts, clamp=self.part.clamp)
        out_TD = step.experts_of(self.name, start, are_whole=self.part.by_expert, plain=plain)(
            taken_TD,
            step.slots_of(self.name, expert_Tk, start),
            weight_Tk,
            gate_up_E2FD,
            down_EDF,
            **biases,
            activation=self.part.activation,
            first_expert=step.expert_rank * len(down_EDF) if self.part.by_expert else 0,
        )
        if self.out_of_latent is not None:  # of this device's part of the sum
            out_TD = step.product(self.out_of_latent, out_TD, start)
        if self.shared is None:
            return out_TD
        shared_TD = scaled(self.shared(x_TD, step, start))
        if self.shared_gate is not None:
            gate_T1 = step.scores(self.shared_gate_name, x_TD, _scores(x_TD, self.shared_gate[...]), start)
            # XLA would compute it in each kernel that takes the sum.
            gate_T1 = jax.lax.optimization_barrier(jax.nn.sigmoid(gate_T1).astype(x_TD.dtype))
            shared_TD = shared_TD * gate_T1
        return out_TD + shared_TD

    def _takes_unnormed(self, unnormed: Unnormed, step: Step) -> bool:
        """Whether a kernel computes the router from what enters the norm, while another computes the norm for the experts."""
        x_TD, norm = unnormed
        if step.router_scores is None or not step.policy.has_concurrent_branches(len(x_TD)):
            return False
        return isinstance(norm, Normalization) and norm.is_of_squares and self.router[...].dtype == x_TD.dtype

    def _scores_of_unnormed(self, unnormed: Unnormed, step: Step, start: int) -> Array:
        x_TD, norm = unnormed
        assert isinstance(norm, Normalization) and norm.weight is not None and step.router_scores is not None
        is_real_T = None if step.is_real_T is None else step.is_real_T[start : start + len(x_TD)]
        options = {"eps": norm.eps, "weight_offset": norm.norm.weight_offset}
        bias = None if self.router_bias is None else self.router_bias[...]
        return step.router_scores(x_TD, norm.weight[...], self.router[...], is_real_T, bias, **options)

    @property
    def router_name(self) -> str:
        """The checkpoint's module."""
        return f"{self.name}.{self.part.routing.router}"

    @property
    def shared_gate_name(self) -> str:
        """The checkpoint's module, in a mixture that has a shared gate."""
        return f"{self.name}.{self.part.shared_gate}"

    def _down_bias(self, shards: Shards) -> Array | None:
        """Where the devices split the experts' width, their results are summed: only the first adds the bias."""
        if self.down_bias is None or shards.size == 1 or self.part.by_expert:
            return None if self.down_bias is None else self.down_bias[...]
        return jnp.where(shards.index == 0, self.down_bias[...], 0)


def _arrays(gate_up_E2FD: Any, down_EDF: Any, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Both weights as arrays, of which one may be packed: without what pads it."""
    D, F = min(gate_up_E2FD.shape[3], down_EDF.shape[1]), min(gate_up_E2FD.shape[2], down_EDF.shape[2])
    gate_up_E2FD, down_EDF = gate_up_E2FD.astype(dtype), down_EDF.astype(dtype)
    if gate_up_E2FD.shape[2:] != (F, D):
        gate_up_E2FD = gate_up_E2FD[:, :, :F, :D]
    if down_EDF.shape[1:] != (D, F):
        down_EDF = down_EDF[:, :D, :F]
    return gate_up_E2FD, down_EDF


def _scores(x_TD: Array, weight_ED: Array) -> Array:
    """Float32 products [T, E]."""
    weight_ED = weight_ED.astype(x_TD.dtype)
    precision = precision_of(x_TD.dtype)
    return jnp.einsum("td,ed->te", x_TD, weight_ED, precision=precision, preferred_element_type=jnp.float32)


def _weight(
    config: ModelConfig, part: MoE, shape: tuple[int, ...], axes: tuple[str, ...], source: Source | Stacked
) -> nnx.Param | PackedWeight:
    *_, splits_outputs, splits_inputs = (MESH_AXES[axis] is not None for axis in axes)
    split_outputs = 0 if splits_outputs else None
    spec = ParamSpec(shape, axes, config.dtype, source)
    weight = WeightSpec(spec, splits_inputs=splits_inputs, split_outputs=split_outputs, has_kernels=part.has_kernels)
    return declare(config.formats, weight)


def _sources(config: ModelConfig, part: MoE, gates: list[str], down: str) -> tuple[Source | Stacked, Source | Stacked]:
    """Sources of gate and up, and of down."""
    E, D, F = part.routing.num_experts, part.latent_dim or config.hidden_size, part.width
    if not part.transposed:
        shape = (F, D) if part.gated and "{}" in gates[0] else (3 - len(gates) if part.gated else 1, F, D)
        return _experts([f"{name}{part.ending}" for name in gates], E, shape), _experts([f"{down}{part.ending}"], E, (D, F))
    halves = Source((Tensor(gates[0], (E, D, 2 * F), (E, D, 2, F)),), 0, (0, 2, 3, 1))
    gate_up_source = _alternating(gates[0], (E, D, F, 2)) if part.alternating else halves
    return gate_up_source, _alternating(down, (E, F, D))


def _in_slots(source: Source | Stacked, part: MoE) -> Source | Stacked:
    """The source of all experts as that of all slots."""
    return source.picked(part.slots) if part.num_redundant else source


def _experts(names: list[str], num_experts: int, shape: tuple[int, ...]) -> Source | Stacked:
    """The weights of all experts, of a tensor per expert and name, or of all experts per name."""
    if "{}" in names[0]:
        per_expert = [Tensor(name.format(i), shape[-2:], shape) for i in range(num_experts) for name in names]
        return Stacked(tuple(per_expert), (num_experts, len(names)) if len(names) > 1 else (num_experts,))
    whole = (num_experts, *shape)
    stored = (num_experts, math.prod(shape[:-1]), shape[-1])
    return Source(tuple(Tensor(name, stored, whole) for name in names), min(1, len(names) - 1), tuple(range(len(whole))))


def _alternating(name: str, view: tuple[int, ...]) -> Source:
    """A tensor of all experts whose parameter has the dimensions after that of the experts in reverse order. The view of gate and up
    ends in the two."""
    stored = (*view[:-2], view[-2] * 2) if view[-1] == 2 else view
    return Source((Tensor(name, stored, view),), 0, (0, *range(len(view) - 1, 0, -1)))
