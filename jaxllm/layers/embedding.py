"""Token ids to vectors and vectors to logits."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import PLAINLY, PackedWeight, abstract_param, declare, precision_of
from jaxllm.layers.source import Module, output_major, plain
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Head, Positions
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from jaxllm.weight_format import Multiply, ParamSpec, WeightFormat, WeightSpec

PLAIN_HEAD = Head()


class Embedding(nnx.Module):
    """A row per token. The output head, tied or not, is one too: its rows are then what hidden states are compared with."""

    def __init__(self, config: ModelConfig, name: str, *, bias: bool = False):
        self.name, self.axes = name, ("vocab", "embed")
        self.shape = shape = (config.padded_vocab_size, config.hidden_size)
        stored = config.vocab_size, config.hidden_size
        self.weight: nnx.Param | PackedWeight = abstract_param(
            shape, self.axes, config.dtype, source=plain(f"{name}.weight", stored)
        )
        stored_bias = plain(f"{name}.bias", (config.vocab_size,))
        self.bias = abstract_param(shape[:1], ("vocab",), config.dtype, source=stored_bias, init="zeros") if bias else None
        self.vocab_size = config.vocab_size
        self.dtype = config.dtype
        self.multiply: Multiply = PLAINLY
        """Computes products with a head in tiles: as `Step.multiply`."""

    def take_formats(self, formats: Sequence[WeightFormat]) -> None:
        """Put the weight of an abstract head, or of the embedding that it is tied to, into a format of heads, if one has it."""
        if of_heads := [format for format in formats if format.of_head]:
            modules = [Module(self.name, (self.vocab_size,))]
            source = output_major(modules, "weight", 0, self.shape[1:])
            inputs_first = ParamSpec(self.shape[::-1], self.axes[::-1], self.dtype, source)
            weight = declare(of_heads, WeightSpec(inputs_first, tuple(modules), split_outputs=0))
            self.weight = weight if isinstance(weight, PackedWeight) else self.weight

    def __call__(self, token_ids_T: Array, shards: Shards = ONE_DEVICE) -> Array:
        """The rows of these ids, in the type of the activations; ids must lie in the vocabulary.

        Of several devices, this one's part of the sum: zeros for ids whose rows are elsewhere.
        """
        if shards.size == 1:
            return self._rows(token_ids_T)
        num_rows = self.shape[0] // shards.size
        ids_T = token_ids_T - shards.index * num_rows
        is_here_T = (ids_T >= 0) & (ids_T < num_rows)
        return jnp.where(is_here_T[:, None], self._rows(ids_T), 0)

    def _rows(self, index_T: Array) -> Array:
        """This device's rows at these places, or the nearest that it has."""
        if isinstance(self.weight, PackedWeight):
            return self.weight.rows(index_T).astype(self.dtype)
        return self.weight[...].at[index_T].get(mode="clip").astype(self.dtype)

    def logits(
        self,
        hidden_TD: Array,
        shards: Shards = ONE_DEVICE,
        head: Head = PLAIN_HEAD,
        change: Callable[[Array, Array], Array] | None = None,
    ) -> Array:
        """Float32 scores of this device's part of the vocabulary; -inf in the columns that pad it.

        change: makes others of the hidden states and their products with the rows.
        """
        logits_TV = self._products(hidden_TD)
        if self.bias is not None:
            logits_TV = logits_TV + self.bias[...].astype(jnp.float32)
        if change is not None:
            logits_TV = change(hidden_TD, logits_TV)
        if head.scale != 1.0:
            logits_TV = logits_TV * head.scale
        if head.soft_cap is not None:
            logits_TV = head.soft_cap * jnp.tanh(logits_TV / head.soft_cap)
        num_columns = logits_TV.shape[1]
        if num_columns * shards.size == self.vocab_size:
            return logits_TV
        id_V = shards.index * num_columns + jnp.arange(num_columns)
        return jnp.where(id_V < self.vocab_size, logits_TV, -jnp.inf)

    def _products(self, hidden_TD: Array) -> Array:
        """Multiply hidden states by this device's rows: float32 [T, V]."""
        if isinstance(self.weight, PackedWeight):
            return self.weight.logits(hidden_TD, self.multiply)
        weight_VD = self.weight[...].astype(hidden_TD.dtype)
        precision = precision_of(hidden_TD.dtype)
        return jnp.einsum("td,vd->tv", hidden_TD, weight_VD, precision=precision, preferred_element_type=jnp.float32)


class PositionEmbedding(nnx.Module):
    """A learned row per position."""

    def __init__(self, config: ModelConfig, part: Positions):
        shape = (part.count, config.hidden_size)
        self.weight = abstract_param(shape, ("position", "embed"), config.dtype, source=f"{part.name}.weight")
        self.offset = part.offset

    def __call__(self, positions_T: Array) -> Array:
        """The rows of these positions."""
        return self.weight[...].at[positions_T + self.offset].get(mode="clip")
