"""The implementation of each op in an engine's programs."""

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from jaxllm.layers.linear import multiply_tiles
from jaxllm.weight_format import Multiply
from pallas_kernels import paged_attention, wide_attention

OPS = (
    "paged_attention",
    "wide_attention",
    "rope_cache_write",
    "mla_attention",
    "sampling",
    "collectives",
    "router_scores",
    "expert_choice",
    "grouped_matmul",
    "gated_matmul",
    "gated_delta",
    "delta_decode",
    "state_space",
    "lora",
    "quantize",
    "segment_attention",
    "quantized_matmul",
)


@dataclass(frozen=True)
class Kernels:
    """An implementation by name for each op of `pallas_kernels` that a step runs; empty: it does not run it."""

    paged_attention: str = ""
    wide_attention: str = ""
    """In layers with heads that `pallas_kernels.wide_attention` is for, in place of `paged_attention`."""
    rope_cache_write: str = ""
    mla_attention: str = ""
    sampling: str = "xla"
    """"xla" is plain JAX (`jaxllm.sampling`)."""
    collectives: str = "xla"
    """How several devices exchange sums and logits: "peer" reads and writes the peers' memory."""
    router_scores: str = "xla"
    """Scores of a mixture's router from what enters the norm before it, in decodes of few rows; "xla": from what leaves the norm, in plain
    JAX."""
    expert_choice: str = "xla"
    """Which experts of a mixture compute each token."""
    grouped_matmul: str = "xla"
    """Experts of a mixture."""
    gated_matmul: str = "xla"
    """Gate, up and the activation of dense feed-forward layers in one kernel, in steps of many tokens; "xla": a product, and the activation
    of its result."""
    gated_delta: str = "xla"
    """States of linear attention."""
    delta_decode: str = "xla"
    """All between the products of linear attention, in decodes; "xla": the ops above, and plain JAX around them."""
    state_space: str = "xla"
    """States of Mamba-2."""
    lora: str = "xla"
    """The terms that adapters add to products."""
    quantize: str = ""
    """Quantisation of vectors for products with fp8 weights, fused with what is computed before; empty: plain JAX."""
    segment_attention: str = ""
    """Between the patches of images, the positions of audio, or the tokens of an encoder's prompts."""
    quantized_matmul: str = "xla"
    """Products with weights of linear layers and of the head in tiles."""
    interpret: bool = False
    """Run Pallas kernels as plain JAX: on a CPU."""

    @property
    def attention(self) -> str:
        """The implementation of attention: over keys and values, or where there are none, over latents, or in an encoder within prompts."""
        return self.paged_attention or self.wide_attention or self.mla_attention or self.segment_attention

    def attention_of(self, head_dim: int) -> tuple[ModuleType, str]:
        """The op of `pallas_kernels` over the keys and values of a layer with heads of this width, and its implementation."""
        if wide_attention.is_wide(head_dim):
            return wide_attention, self.wide_attention
        return paged_attention, self.paged_attention

    @property
    def of_encoder(self) -> dict[str, Any]:
        """The arguments of an encoder's attention."""
        return {"attention": self.segment_attention or "xla", "interpret": self.interpret}

    @property
    def multiply(self) -> Multiply:
        """Products with weights in tiles."""
        return partial(multiply_tiles, implementation=self.quantized_matmul, interpret=self.interpret)

    def by_op(self) -> dict[str, str]:
        """The names alone, of the ops that it runs."""
        return {op: name for op in OPS if (name := getattr(self, op))}
