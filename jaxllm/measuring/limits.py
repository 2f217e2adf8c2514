"""Upper limits on speed: a device's measured bandwidth and throughput, and the bytes and operations that the work requires."""

import collections
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.cache_spec import RowState, cache_specs, row_bytes, written_spec
from jaxllm.layers.build import bytes_per_expert_value, num_parameters
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE, StateMixer


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device."""

    copy_bytes_per_second: float
    """Read and written together."""
    gemm_flops_per_second: float
    gemm_dtype: str = "bfloat16"

    def seconds(self, work: "Work") -> float:
        """The least time for the work: the larger of the times for its bytes and its operations."""
        return max(work.bytes / self.copy_bytes_per_second, work.flops / self.gemm_flops_per_second)


@dataclass(frozen=True)
class Work:
    """Bytes to read from memory and operations to compute, per device."""

    bytes: float
    flops: float


def measure_ceilings(*, tiny: bool = False, dtype: str = "bfloat16") -> Ceilings:
    """Measure a copy of 1 GiB and a product of 8192 cubed in `dtype`, in about a second; `tiny`: 64 MiB and 512 cubed."""
    num_bytes, size, times = (1 << 26, 512, 2) if tiny else (1 << 30, 8192, 16)
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    copies = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: x + 1, x))
    copy = 2 * num_bytes * times / median_seconds(copies, x, repeats=5)
    del x
    # Values of one deviation stay so through the products: constant or vanishing operands draw less power and run faster.
    a, w = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    w = w / math.sqrt(size)
    products = jax.jit(lambda a, w: lax.fori_loop(0, times, lambda _, a: a @ w, a))
    gemm = 2 * size**3 * times / median_seconds(products, a, w, repeats=5)
    return Ceilings(copy, gemm, dtype)


def median_seconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Median time of calls, after two that do not count."""
    for _ in range(2):
        jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@dataclass(frozen=True)
class ModelCost:
    """The bytes and operations of a model's steps on each of `num_devices`."""

    config: ModelConfig
    weight_bytes: float
    """All weights that a step reads: a table that only looks embeddings up does not count."""
    num_devices: int = 1

    @classmethod
    def of_arrays(cls, config: ModelConfig, params: Iterable[jax.Array], num_devices: int) -> "ModelCost":
        """By the weights as they lie on the devices."""
        total = sum(x.nbytes for x in params)
        if not config.tie_word_embeddings:
            total -= config.padded_vocab_size * config.hidden_size * jnp.dtype(config.dtype).itemsize
        return cls(config, total, num_devices)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that a decode reads for each token of its context in all layers, over all devices, until windows are full."""
        return sum(self._layer_cache_bytes())

    def _layer_cache_bytes(self) -> list[int]:
        specs = cache_specs(self.config)
        kept = [written_spec(specs, layer) for layer in range(len(specs))]
        return [0 if isinstance(spec, RowState) else sum(array.bytes_per_token for array in spec.arrays) for spec in kept]

    def work(self, requests: Iterable[tuple[int, int]], *, num_steps: int, skip_prompts: bool = False) -> Work:
        """Work of requests of (prompt, output) tokens in at least `num_steps` steps, each of which reads the weights once: of a
        mixture of experts, those that tokens choosing at random are expected to need.

        The last output token is never computed on, and only outputs need logits. Prompts: operations of their tokens, and no
        reading of the cache (a prompt may be computed in one piece). Outputs after the first: each reads what its request has in
        the cache, in layers with a window no more than that, and reads and writes its states.
        skip_prompts: only the work after the first output token.
        """
        c = self.config
        head = c.hidden_size * c.vocab_size
        embedding = head * (1 if c.tie_word_embeddings else 2)
        mixtures = [layer.mlp for layer in c.layers if isinstance(layer.mlp, MoE)]
        idle = sum((moe.routing.num_experts - moe.routing.top_k) * moe.values_per_expert(c.hidden_size) for moe in mixtures)
        per_token = 2.0 * (num_parameters(replace(c, vision=None, audio=None)) - embedding - idle)
        attentions = collections.Counter(layer.attention for layer in c.layers if layer.attention is not None)
        per_token += sum(n * a.flops_per_token for a, n in attentions.items() if isinstance(a, StateMixer))
        cache_bytes = {layer.attention: size for layer, size in zip(c.layers, self._layer_cache_bytes(), strict=True)}
        flops, cache, num_tokens, num_later = 0.0, 0.0, 0.0, 0.0
        for prompt, output in requests:
            first, last = (prompt, prompt + output - 1) if skip_prompts else (0, prompt + output - 1)
            num_logits = output - 1 if skip_prompts else output
            num_tokens += last - first
            num_later += last - prompt
            flops += (last - first) * per_token + num_logits * 2.0 * head
            for a, n in attentions.items():
                flops += n * a.flops_per_pair * (_pairs(last, a.window) - _pairs(first, a.window))
                cache += n * cache_bytes[a] * (_pairs(last, a.window) - _pairs(prompt, a.window))
        unread, value_bytes = 0.0, bytes_per_expert_value(c) if mixtures else 0.0
        for moe in mixtures:
            chance = (1 - moe.routing.top_k / moe.routing.num_experts) ** (num_tokens / max(1, num_steps))
            unread += chance * moe.routing.num_experts * moe.values_per_expert(c.hidden_size) * value_bytes
        num_bytes = num_steps * (self.weight_bytes - unread) + cache + num_later * 2 * row_bytes(c)
        return Work(num_bytes / self.num_devices, flops / self.num_devices)


def _pairs(num_tokens: int, window: int | None) -> float:
    """(Query, key) pairs of causal attention over the first tokens of a sequence."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) / 2
    return window * (window + 1) / 2 + (num_tokens - window) * window
