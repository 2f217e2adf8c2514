"""The feed-forward layer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, PackedWeight, abstract_param
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Activation
from pallas_kernels import gated_matmul
from pallas_kernels.quantize import Quantized, Sums, quantize, scaled, silu_up_quantize


@partial(jax.jit, static_argnames=("activation", "implementation", "interpret"))  # traced and lowered once for all layers
def multiply_gated(x_TD: Array | Quantized, *weight: Array, **options: Any) -> Array:
    """`pallas_kernels.gated_matmul.product`, or of quantised vectors `scaled_product` with values and scales."""
    if isinstance(x_TD, Quantized):
        return gated_matmul.scaled_product(x_TD, *weight, dtype=jnp.bfloat16, **options)
    return gated_matmul.product(x_TD, *weight, **options)


def gelu(x: Array) -> Array:
    """x times the probability that a normal number is below it, in float32 and returned in the type of x, as PyTorch has it. Source:
    arXiv:1606.08415.

    By erf: `jax.nn.gelu` takes erfc, whose arithmetic takes a GPU twice as long.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class XIELU(nnx.Module):
    """An activation with learned numbers: α⁺ x² + β x where x is positive, α⁻ (exp(min(x, ε)) - 1 - x) + β x elsewhere. Source:
    arXiv:2411.13010."""

    def __init__(self, name: str):
        stored = [("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())]
        source = Source(tuple(Tensor(f"{name}.{each}", shape, (1,)) for each, shape in stored), 0, (0,))
        self.numbers = abstract_param((4,), ("activation",), "float32", source=source)

    def __call__(self, x: Array) -> Array:
        positive, negative, beta, eps = self.numbers[...]
        wide = x.astype(jnp.float32)
        above = jax.nn.softplus(positive) * jnp.square(wide)
        below = (beta + jax.nn.softplus(negative)) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up as one product, or without a gate. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, part: MLP, prefix: str):
        D, F, C = config.hidden_size, part.width, 2 if part.gated else 1
        names = [f"{prefix}{name}" for name in part.linears["gate_up"]]
        (down,) = (f"{prefix}{name}" for name in part.linears["down"])
        self.activation = ACTIVATIONS[part.activation]
        self.gated = part.gated
        self.clamp = part.clamp
        is_product = part.gated and part.clamp is None
        self.is_swiglu = is_product and part.activation == "silu"
        has_kernel = is_product and not part.bias and part.activation in gated_matmul.ACTIVATIONS
        self.kernel_activation = part.activation if has_kernel else None
        """That of `pallas_kernels.gated_matmul`; None: it does not compute this layer."""
        self.gate_up = Linear(
            "td,dcf->tcf",
            (D, C, F),
            ("embed", "gate_up", "mlp"),
            config.dtype,
            modules=[Module(name, (C // len(names), F)) for name in names],
            bias=part.bias,
            transposed=part.transposed,
        )
        self.down = Linear(
            "tf,fd->td",
            (F, D),
            ("mlp", "embed"),
            config.dtype,
            modules=[Module(down, (D,))],
            bias=part.bias,
            transposed=part.transposed,
        )
        self.xielu = None if part.xielu is None else XIELU(f"{prefix}{part.name}.{part.xielu}")

    @property
    def quantizes_inputs(self) -> bool:
        """Whether all products with what it takes do."""
        return self.gate_up.quantizes_inputs

    def __call__(self, x_TD: Array | Quantized, step: Step, start: int = 0) -> Array | Sums:
        """The output as `Step.sums`; of several devices, this one's part of the sum. x are the tokens of the step from `start` on."""
        return step.sums(self.down, self._hidden(x_TD, step, start), start)

    @property
    def shapes_of_kernel(self) -> gated_matmul.Layer | None:
        """Sizes of the whole layer for `pallas_kernels.gated_matmul`; None: that op does not take it."""
        weight, (width, _, hidden) = self.gate_up.weight, self.gate_up.shape
        if self.kernel_activation is None or (isinstance(weight, PackedWeight) and not self._is_scaled):
            return None
        return gated_matmul.Layer(width, hidden, self.kernel_activation, self._is_scaled)

    @property
    def _is_scaled(self) -> bool:
        """Whether both products quantise what they multiply."""
        return self.gate_up.quantizes_inputs and self.down.quantizes_inputs

    def _by_kernel(self, x_TD: Array | Quantized, step: Step) -> Array | Quantized | None:
        """Hidden values [T, F], quantised if x is, from one kernel; None: it does not compute this step."""
        is_scaled = isinstance(x_TD, Quantized)
        if (
            self.shapes_of_kernel is None
            or step.multiply_gated is None
            or not step.gates_in_one(len(x_TD), is_scaled=is_scaled)
        ):
            return None
        weight, multiply = self.gate_up.weight, partial(step.multiply_gated, activation=self.kernel_activation)
        if isinstance(x_TD, Quantized):
            assert isinstance(weight, PackedWeight) and weight.names == ("values", "scale") and step.quantization is not None
            return quantize(multiply(x_TD, *weight.operands), **step.quantization)
        if isinstance(weight, PackedWeight) or x_TD.dtype != weight.dtype:
            return None
        return multiply(x_TD, weight[...])

    def _hidden(self, x_TD: Array | Quantized, step: Step, start: int) -> Array | Quantized:
        """[T, F]: what down takes."""
        if (found := self._by_kernel(x_TD, step)) is not None:
            return found
        gate_up_TCF = step.sums(self.gate_up, x_TD, start)
        if isinstance(gate_up_TCF, Sums) and self.is_swiglu and self.down.quantizes_inputs:
            assert step.quantization is not None
            return silu_up_quantize(gate_up_TCF, **step.quantization)
        gate_up_TCF = scaled(gate_up_TCF)
        x_TF = (self.activation if self.xielu is None else self.xielu)(gate_up_TCF[:, 0])
        if self.gated:
            x_TF = multiplied(x_TF, gate_up_TCF[:, 1], self.clamp)
        return x_TF


def multiplied(gate: Array, up: Array, clamp: float | None) -> Array:
    """The product of what the activation of a gate gives and of up, within their limits (`MLP.clamp`)."""
    return gate * up if clamp is None else jnp.minimum(gate, clamp) * jnp.clip(up, -clamp, clamp)
