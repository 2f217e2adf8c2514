"""The encoder of audio: from features of a clip to what the cross attention of a decoder reads, or to embeddings in place of tokens.

Source: arXiv:2212.04356 (Whisper).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, abstract_param, precision_of
from jaxllm.layers.mlp import ACTIVATIONS, gelu
from jaxllm.layers.norm import Normalization
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.vision import attend_in_segments
from jaxllm.model_parts import Audio, Norm
from pallas_kernels.segment_attention import PLAIN

AXIS = "audio"
"""The logical axis of all weights: each device has them whole."""
TAPS = 3
"""Steps of time that a convolution sees."""


class AudioEncoder(nnx.Module):
    """Encodes one clip. Built without values: a loader gives them.

    M mel frequencies, F positions, D its width, N heads of width H.
    """

    def __init__(self, audio: Audio, dtype: str):
        self.audio, self.dtype = audio, dtype
        F, D, prefix = audio.num_positions, audio.hidden_size, audio.prefix
        self.convs = nnx.List(
            [
                Convolution(audio.num_bins, D, 1, dtype, f"{prefix}conv1"),
                Convolution(D, D, 2, dtype, f"{prefix}conv2"),
            ]
        )
        self.positions = abstract_param((F, D), (AXIS, AXIS), dtype, source=f"{prefix}embed_positions.weight")
        self.blocks: nnx.List[AudioBlock] = nnx.List(
            AudioBlock(audio, dtype, f"{prefix}layers.{i}.") for i in range(audio.num_layers)
        )
        self.norm = _norm("layer_norm", D, dtype, prefix)

    def __call__(self, features_TM: Array, **kernels: Any) -> Array:
        """[F, D] of features [2 F, M], in the model's type. kernels: see `attention_of`."""
        return self.norm(self.attended(features_TM, **kernels))

    def attended(self, features_TM: Array, num_real: Array | None = None, **kernels: Any) -> Array:
        """[F, D] before the last norm. num_real: positions that others attend to; None: all."""
        x_TD = features_TM.astype(self.dtype)
        for conv in self.convs:
            x_TD = gelu(conv(x_TD))
        x_FD = x_TD + self.positions[...][: len(x_TD)]
        attend = attention_of(len(x_FD), num_real, **kernels)
        for block in self.blocks:
            x_FD = block(x_FD, attend)
        return x_FD


class AudioEmbedder(AudioEncoder):
    """Encodes one clip to embeddings of the text model's width: see `AudioTokens`."""

    def __init__(self, audio: Audio, dtype: str):
        super().__init__(audio, dtype)
        assert audio.tokens is not None
        self.part = audio.tokens
        inputs = (audio.hidden_size, *(linear.outputs for linear in self.part.linears))
        self.linears: nnx.List[Linear] = nnx.List(
            Linear(
                "ei,io->eo",
                (width, linear.outputs),
                (AXIS, AXIS),
                dtype,
                modules=[Module(linear.name, (linear.outputs,))],
                bias=linear.bias,
            )
            for linear, width in zip(self.part.linears, inputs, strict=False)
        )

    def embeddings(self, features_TM: Array, num_real: Array, **kernels: Any) -> Array:
        """[F / num_averaged, outputs of the last linear layer] of features [2 F, M], of which 2 F may be fewer than those of the longest
        clip. num_real: positions of the clip; what is computed of those behind has no meaning. kernels: see `attention_of`."""
        x_FD = self.attended(features_TM, num_real, **kernels)
        count = self.part.num_averaged
        x_EAD = x_FD[: len(x_FD) // count * count].reshape(-1, count, x_FD.shape[1])
        x = self.norm(x_EAD.astype(jnp.float32).mean(axis=1).astype(x_FD.dtype))
        for linear, part in zip(self.linears, self.part.linears, strict=True):
            x = linear(x)
            x = x if part.activation is None else ACTIVATIONS[part.activation](x)
        return x


def encoding_bytes(audio: Audio, dtype: str) -> int:
    """Temporary bytes while the longest clip is encoded, an estimate: a layer's arrays, and scores of all heads in float32 and in the
    model's type, or on a CPU of one head; XLA computes narrower types in float32 there."""
    itemsize, scores = jnp.dtype(dtype).itemsize, audio.num_positions**2
    of_layer = audio.num_frames * (8 * audio.hidden_size + 2 * audio.mlp.width)
    return max((4 + itemsize) * audio.num_heads * scores + itemsize * of_layer, 4 * (2 * scores + of_layer))


class Convolution(nnx.Module):
    """A convolution over time with a kernel of three steps, zeros on both sides."""

    def __init__(self, inputs: int, outputs: int, stride: int, dtype: str, name: str):
        tensor = Tensor(f"{name}.weight", (outputs, inputs, TAPS), (outputs, inputs, TAPS))
        self.stride = stride
        self.weight = abstract_param((TAPS, inputs, outputs), (AXIS,) * 3, dtype, source=Source((tensor,), 0, (2, 1, 0)))
        self.bias = abstract_param((outputs,), (AXIS,), dtype, source=f"{name}.bias", init="zeros")

    def __call__(self, x_TI: Array) -> Array:
        """[T / stride, outputs]: one product, with the values that each step sees side by side."""
        num_steps = len(x_TI)
        padded = jnp.pad(x_TI, ((1, 1), (0, 0)))
        seen = jnp.concatenate([padded[tap : tap + num_steps : self.stride] for tap in range(TAPS)], axis=1)
        weight = self.weight[...].reshape(seen.shape[1], -1)
        return jnp.dot(seen, weight, precision=precision_of(x_TI.dtype)) + self.bias[...]


class AudioBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, audio: Audio, dtype: str, prefix: str):
        D, N, F = audio.hidden_size, audio.num_heads, audio.mlp.width
        H = D // N
        self.scale = H**-0.5
        self.attention_norm = _norm("self_attn_layer_norm", D, dtype, prefix)
        self.mlp_norm = _norm("final_layer_norm", D, dtype, prefix)
        modules = [Module(f"{prefix}self_attn.{letter}_proj", (1, N, H)) for letter in "qkv"]
        biased = (True, False, True)
        self.qkv = Linear("td,dcnh->tcnh", (D, 3, N, H), (AXIS,) * 4, dtype, modules=modules, bias=True, biased=biased)
        modules = [Module(f"{prefix}self_attn.out_proj", (D,))]
        self.out = Linear("tnh,nhd->td", (N, H, D), (AXIS,) * 3, dtype, modules=modules, bias=True)
        self.activation = ACTIVATIONS[audio.mlp.activation]
        self.up = Linear("td,df->tf", (D, F), (AXIS,) * 2, dtype, modules=[Module(f"{prefix}fc1", (F,))], bias=True)
        self.down = Linear("tf,fd->td", (F, D), (AXIS,) * 2, dtype, modules=[Module(f"{prefix}fc2", (D,))], bias=True)

    def __call__(self, x_FD: Array, attend: Callable[..., Array]) -> Array:
        """[F, D]. attend: see `attention_of`."""
        q_FNH, k_FNH, v_FNH = jnp.unstack(self.qkv(self.attention_norm(x_FD)), axis=1)
        x_FD = x_FD + self.out(attend(q_FNH, k_FNH, v_FNH, scale=self.scale))
        return x_FD + self.down(self.activation(self.up(self.mlp_norm(x_FD))))


def attention_of(
    num_positions: int, num_real: Array | None = None, *, attention: str = "xla", interpret: bool = False
) -> Callable[..., Array]:
    """Attention of a clip's positions to the first `num_real` of them, or to all: of queries, keys, values [F, N, H] and the scale.

    attention: the implementation of segment attention. What it gives behind num_real has no meaning.
    """
    if attention in PLAIN:
        # XLA computes products of many heads slowly on a CPU.
        return partial(attend_by_head if jax.default_backend() == "cpu" else attend_together, num_real=num_real)
    segment_F = jnp.zeros(num_positions, jnp.int32)
    if num_real is not None:
        segment_F = jnp.where(jnp.arange(num_positions) < num_real, segment_F, -1)
    return partial(attend_in_segments, segment_P=segment_F, implementation=attention, interpret=interpret)


@partial(jax.jit, static_argnames="scale")
def attend_together(q_FNH: Array, k_FNH: Array, v_FNH: Array, *, num_real: Array | None, scale: float) -> Array:
    """Plain JAX: all heads in one product."""
    options = {"precision": precision_of(q_FNH.dtype), "preferred_element_type": jnp.float32}
    scores_NQK = jnp.einsum("qnh,knh->nqk", q_FNH, k_FNH, **options) * scale  # type: ignore[arg-type]
    if num_real is not None:
        scores_NQK = jnp.where(jnp.arange(len(k_FNH)) < num_real, scores_NQK, -jnp.inf)
    weight_NQK = jax.nn.softmax(scores_NQK).astype(v_FNH.dtype)
    return jnp.einsum("nqk,knh->qnh", weight_NQK, v_FNH, **options).astype(q_FNH.dtype)  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="scale")
def attend_by_head(q_FNH: Array, k_FNH: Array, v_FNH: Array, *, num_real: Array | None, scale: float) -> Array:
    """Plain JAX: one head after the other."""
    options = {"precision": precision_of(q_FNH.dtype), "preferred_element_type": jnp.float32}

    def attend(head: tuple[Array, ...]) -> Array:
        q_FH, k_FH, v_FH = head
        scores_QK = jnp.dot(q_FH, k_FH.T, **options) * scale  # type: ignore[arg-type]
        if num_real is not None:
            scores_QK = jnp.where(jnp.arange(len(k_FH)) < num_real, scores_QK, -jnp.inf)
        weight_QK = jax.nn.softmax(scores_QK).astype(v_FH.dtype)
        return jnp.dot(weight_QK, v_FH, **options).astype(q_FH.dtype)  # type: ignore[arg-type]

    return jax.lax.map(attend, tuple(x.swapaxes(0, 1) for x in (q_FNH, k_FNH, v_FNH))).swapaxes(0, 1)


def _norm(name: str, width: int, dtype: str, prefix: str) -> Normalization:
    return Normalization(Norm(name, 1e-5, centred=True, bias=True), width, AXIS, dtype, prefix=prefix)
