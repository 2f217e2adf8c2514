"""The encoder of audio: from features of a clip to what the cross attention of a decoder reads. Source: arXiv:2212.04356 (Whisper)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, abstract_param, precision_of
from jaxllm.layers.mlp import ACTIVATIONS
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

    def __call__(self, features_TM: Array, *, attention: str = "xla", interpret: bool = False) -> Array:
        """[F, D] of features [2 F, M], in the model's type. attention: the implementation of segment attention, of one segment."""
        x_TD = features_TM.astype(self.dtype)
        for conv in self.convs:
            x_TD = jax.nn.gelu(conv(x_TD), approximate=False)
        x_FD = x_TD + self.positions[...]
        attend: Callable[..., Array] = attend_by_head
        if attention not in PLAIN:
            segment_F = np.zeros(len(x_FD), np.int32)
            attend = partial(attend_in_segments, segment_P=segment_F, implementation=attention, interpret=interpret)
        for block in self.blocks:
            x_FD = block(x_FD, attend)
        return self.norm(x_FD)


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
        q_FNH, k_FNH, v_FNH = jnp.unstack(self.qkv(self.attention_norm(x_FD)), axis=1)
        x_FD = x_FD + self.out(attend(q_FNH, k_FNH, v_FNH, scale=self.scale))
        return x_FD + self.down(self.activation(self.up(self.mlp_norm(x_FD))))


@partial(jax.jit, static_argnames="scale")
def attend_by_head(q_FNH: Array, k_FNH: Array, v_FNH: Array, *, scale: float) -> Array:
    """Attention of all positions to all, in plain JAX, one head after the other: XLA computes products of many heads slowly on a CPU."""
    options = {"precision": precision_of(q_FNH.dtype), "preferred_element_type": jnp.float32}

    def attend(head: tuple[Array, ...]) -> Array:
        q_FH, k_FH, v_FH = head
        scores_QK = jnp.dot(q_FH, k_FH.T, **options) * scale  # type: ignore[arg-type]
        weight_QK = jax.nn.softmax(scores_QK).astype(v_FH.dtype)
        return jnp.dot(weight_QK, v_FH, **options).astype(q_FH.dtype)  # type: ignore[arg-type]

    return jax.lax.map(attend, tuple(x.swapaxes(0, 1) for x in (q_FNH, k_FNH, v_FNH))).swapaxes(0, 1)


def _norm(name: str, width: int, dtype: str, prefix: str) -> Normalization:
    return Normalization(Norm(name, 1e-5, centred=True, bias=True), width, AXIS, dtype, prefix=prefix)
