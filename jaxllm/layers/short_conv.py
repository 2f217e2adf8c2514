"""Gated short convolutions. Source: arXiv:2511.23404."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.causal_conv import causal_conv
from jaxllm.layers.latest_inputs import mix_in_layer
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import ShortConv
from pallas_kernels.quantize import Sums


class GatedShortConv(nnx.Module):
    """A token mixer that keeps the last inputs of its convolution by row. Devices split its channels: K parts of width C."""

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: ShortConv, layer: int, prefix: str):
        D, K, C, J, dtype = config.hidden_size, part.num_heads, part.head_dim, part.kernel_size, config.dtype
        self.part, self.layer = part, layer
        names = {key: f"{prefix}{name}" for key, (name,) in part.linears.items()}
        self.inputs = Linear(
            "td,djkc->tjkc",
            (D, 3, K, C),
            ("embed", "gate_up", "heads", "head"),
            dtype,
            modules=[Module(names["in"], (3, K, C))],
            bias=part.bias,
        )
        name = f"{prefix}{part.name}.conv"
        weight = Source((Tensor(f"{name}.weight", (K * C, 1, J), (K, C, J)),), 0, (0, 1, 2))
        self.conv = abstract_param((K, C, J), ("heads", "head", "kernel"), dtype, source=weight)
        bias = Source((Tensor(f"{name}.bias", (K * C,), (K, C)),), 0, (0, 1))
        self.conv_bias = abstract_param((K, C), ("heads", "head"), dtype, source=bias, init="zeros") if part.bias else None
        self.out = Linear(
            "tkc,kcd->td", (K, C, D), ("heads", "head", "embed"), dtype, modules=[Module(names["out"], (D,))], bias=part.bias
        )

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        b_TKC, c_TKC, x_TKC = (part_T1KC[:, 0] for part_T1KC in jnp.split(products(self.inputs, runs, step), 3, axis=1))
        convolved_TKC = mix_in_layer(self.layer, self.part, self._mix, (b_TKC * x_TKC,), step)
        if self.conv_bias is not None:
            convolved_TKC += self.conv_bias[...].astype(jnp.float32)
        return products_by_run(self.out, c_TKC * convolved_TKC.astype(c_TKC.dtype), runs, step)

    def _mix(
        self, inputs: Sequence[Array], arrays: tuple[Array, ...], rows: StateRows, is_there_T11: Array | None = None
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `latest_inputs.Mix`."""
        convolved_TKC, state_NKjC = causal_conv(inputs[0], self.conv[...], arrays[0], rows)
        return convolved_TKC, (state_NKjC,)
