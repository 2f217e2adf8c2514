"""The vision encoder, which computes embeddings of patches of pixels. One class for all families: see `VisionEncoder`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, abstract_param, precision_of
from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import NoNorm, Normalization
from jaxllm.layers.patch_indices import PatchIndices, patch_indices
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.model_parts import Merger, Norm, Vision, VisionLayer
from pallas_kernels import segment_attention
from pallas_kernels.rope_cache_write.xla import apply_rope

__all__ = ["PatchIndices", "VisionTower", "patch_indices"]

# Traced and lowered once for all layers of a program.
attend_in_segments = jax.jit(segment_attention.segment_attention, static_argnames=("scale", "implementation", "interpret"))

AXIS = "vision"
"""The logical axis of all weights: each device has them whole."""


class VisionTower(nnx.Module):
    """Encodes the patches of some images at once; patches attend to those of their own segment. Sources: arXiv:2511.21631 (Qwen3-VL),
    arXiv:2502.13923 (Qwen2.5-VL), arXiv:2303.15343 (SigLIP).

    Built without values: a loader gives them. P patches of C values, D its width, L the width of the text model. A patch has the pixels of
    one frame, in a still image, or of `Vision.temporal_patch_size` frames, in a video.
    """

    def __init__(self, vision: Vision, dtype: str):
        encoder = vision.encoder
        assert encoder is not None
        self.vision, self.dtype = vision, dtype
        D, size, t = vision.hidden_size, vision.patch_size, vision.temporal_patch_size
        stored = (D, 3, t, size, size) if t > 1 else (D, 3, size, size)
        tensor = Tensor(f"{encoder.patch}.weight", stored, (D, 3, t, size**2))
        # In float32, as pixels are.
        self.patch = abstract_param(
            (t, 3, size**2, D), (AXIS,) * 4, "float32", source=Source((tensor,), axis=0, permutation=(2, 1, 3, 0))
        )
        bias = f"{encoder.patch}.bias"
        self.patch_bias = abstract_param((D,), (AXIS,), "float32", source=bias, init="zeros") if encoder.patch_bias else None
        N = vision.position_grid**2
        positions, token = encoder.positions, encoder.class_token
        table = (N, D) if token is None else (1, N + 1, D)
        self.positions = None if positions is None else abstract_param(table, (AXIS,) * len(table), dtype, source=positions)
        self.class_token = None if token is None else abstract_param((1, 1, D), (AXIS,) * 3, dtype, source=token)
        norm = partial(_norm, width=D, dtype=dtype)
        self.first_norm, self.last_norm = norm(encoder.first_norm), norm(encoder.last_norm)
        layers = (
            VisionBlock(vision, encoder.layer, dtype, f"{encoder.layer_name.format(i)}.") for i in range(vision.num_layers)
        )
        self.blocks: nnx.List[VisionBlock] = nnx.List(layers)
        self.merger = PatchMerger(vision, encoder.merger, dtype)
        self.deepstack: nnx.List[PatchMerger] = nnx.List(PatchMerger(vision, merger, dtype) for merger in encoder.deepstack)

    def __call__(self, patches_PC: Array, indices: PatchIndices, *, attention: str, interpret: bool = False) -> Array:
        """[P / merge_size², `Vision.result_width`], in the model's type: the embedding of each cell of patches, and behind it what is
        added after each of the first layers of the text model. Rows of padding are without meaning, but finite.

        patches_PC: uint8 values, of each frame those of red, then of green, then of blue pixels. attention: the implementation of
        segment attention.
        """
        x_PD, layers = self.embed(patches_PC, indices), range(self.vision.num_layers)
        _, results = self.run_layers(x_PD, indices, layers, attention=attention, interpret=interpret)
        return jnp.concatenate([results[place] for place in sorted(results)], axis=-1)

    def embed(self, patches_PC: Array, indices: PatchIndices) -> Array:
        """[`Vision.hidden_rows`, D]: the input of the first layer."""
        if indices.order_P is not None:
            patches_PC = patches_PC[indices.order_P]
        x_PD = self._products(patches_PC, indices)
        return self.first_norm(x_PD if self.class_token is None else self._with_class_tokens(x_PD))

    def run_layers(
        self, x_PD: Array, indices: PatchIndices, layers: range, *, attention: str, interpret: bool = False
    ) -> tuple[Array, dict[int, Array]]:
        """The output of consecutive layers for the input of the first of them, and the results that they complete, by place in a row of
        results: 0: the embedding, behind the last layer; 1 …: what is added behind a layer of the text model."""
        vision, encoder = self.vision, self.vision.encoder
        assert encoder is not None
        angles, segment_P = self._angles(indices), indices.segment_P
        if self.class_token is not None:
            N = vision.position_grid**2
            segment_P = jnp.repeat(segment_P[::N], N + 1)
        attend = partial(attend_in_segments, implementation=attention, interpret=interpret)
        results: dict[int, Array] = {}
        for layer in layers:
            in_windows = indices.window_P is not None and layer not in encoder.full_layers
            x_PD = self.blocks[layer](x_PD, angles, partial(attend, segment_P=indices.window_P if in_windows else segment_P))
            if layer in vision.deepstack_layers:
                number = vision.deepstack_layers.index(layer)
                results[1 + number] = self.deepstack[number](x_PD)
        if layers.stop == vision.num_layers:
            last_PD = x_PD
            if self.class_token is not None:
                last_PD = x_PD.reshape(-1, vision.position_grid**2 + 1, vision.hidden_size)[:, 1:].reshape(
                    len(indices.segment_P), -1
                )
            results[0] = self.merger(self.last_norm(last_PD))
        return x_PD, {place: self._in_order(result, indices) for place, result in results.items()}

    def _in_order(self, result: Array, indices: PatchIndices) -> Array:
        """The results of cells in the order of the patches as they came."""
        if indices.order_P is None:
            return result
        cell = indices.order_P[:: self.vision.merge_size**2] // self.vision.merge_size**2
        return jnp.zeros_like(result).at[cell].set(result, unique_indices=True)

    def _products(self, patches_PC: Array, indices: PatchIndices) -> Array:
        """[P, D]: the products of pixels, and learned positions, both computed in float32."""
        vision = self.vision
        values = 3 * vision.patch_size**2
        num_frames = patches_PC.shape[1] // values
        by_color = (np.array(values, np.float32) for values in (vision.image_mean, vision.image_std))
        mean_C, std_C = (np.tile(values.repeat(vision.patch_size**2), num_frames) for values in by_color)
        pixels_PC = (patches_PC.astype(jnp.float32) / 255 - mean_C) / std_C
        weight_FCD = self.patch[...].reshape(vision.temporal_patch_size, values, -1)
        # A still image fills all frames of a patch.
        weight_CD = weight_FCD.sum(axis=0) if num_frames == 1 else weight_FCD.reshape(num_frames * values, -1)
        x_PD = jnp.dot(pixels_PC, weight_CD, precision=precision_of(pixels_PC.dtype))
        if self.patch_bias is not None:
            x_PD = x_PD + self.patch_bias[...]
        if self.positions is not None:
            table = self.positions[...] if self.class_token is None else self.positions[0, 1:]
            for tap in range(4):
                row_PD = table.at[indices.taps_P4[:, tap]].get(mode="clip").astype(jnp.float32)
                x_PD = x_PD + row_PD * indices.weights_P4[:, tap, None]
        return x_PD.astype(self.dtype)

    def _with_class_tokens(self, x_PD: Array) -> Array:
        """The patches with the class token before those of each tile, which P is a multiple of."""
        assert self.class_token is not None and self.positions is not None and self.vision.has_tiles
        N, D = self.vision.position_grid**2, self.vision.hidden_size
        x_TND = x_PD.reshape(-1, N, D)
        first_D = (self.class_token[...] + self.positions[:, :1]).astype(x_PD.dtype)
        x_TND = jnp.concatenate([jnp.broadcast_to(first_D, (len(x_TND), 1, D)), x_TND], axis=1)
        return x_TND.reshape(-1, D)

    def _angles(self, indices: PatchIndices) -> tuple[Array, Array] | None:
        """Cosine and sine, float32 [P, H/2], of rows for the first half of the frequencies and of columns for the second."""
        encoder, half = self.vision.encoder, self.vision.head_dim // 2
        assert encoder is not None
        if encoder.rope_theta is None:
            return None
        even = np.arange(0, half, 2, dtype=np.float32)
        angles = []
        for axis, numbers in enumerate((even, even + np.float32(encoder.columns_turn_between))):
            frequencies = np.float32(1) / np.power(np.float32(encoder.rope_theta), numbers / np.float32(half), dtype=np.float32)
            angles.append(indices.place_P2[:, axis, None].astype(jnp.float32) * frequencies)
        angles_PF = jnp.concatenate(angles, axis=1)
        return jnp.cos(angles_PF), jnp.sin(angles_PF)


class VisionBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, vision: Vision, part: VisionLayer, dtype: str, prefix: str):
        D, N, H, mlp = vision.hidden_size, vision.num_heads, vision.head_dim, part.mlp
        C, F = 2 if mlp.gated else 1, mlp.width
        self.scale = H**-0.5
        self.attention_norm = _norm(part.attention_norm, D, dtype, prefix)
        self.mlp_norm = _norm(part.mlp_norm, D, dtype, prefix)
        self.qkv = Linear(
            "pd,dcnh->pcnh",
            (D, 3, N, H),
            (AXIS,) * 4,
            dtype,
            modules=[Module(f"{prefix}{name}", (3 // len(part.qkv), N, H)) for name in part.qkv],
            bias=part.qkv_bias,
        )
        self.out = Linear(
            "pnh,nhd->pd", (N, H, D), (AXIS,) * 3, dtype, modules=[Module(f"{prefix}{part.out}", (D,))], bias=part.out_bias
        )
        self.qk_norms: nnx.List[Normalization] = nnx.List(
            Normalization(norm, D, AXIS, dtype, prefix=prefix) for norm in part.qk_norms or ()
        )
        self.scales: nnx.List[nnx.Param] = nnx.List(
            abstract_param((D,), (AXIS,), dtype, source=f"{prefix}{name}", init="ones") for name in part.scales or ()
        )
        self.activation, self.gated = ACTIVATIONS[mlp.activation], mlp.gated
        gate_up, (down,) = mlp.linears["gate_up"], mlp.linears["down"]
        self.gate_up = Linear(
            "pd,dcf->pcf",
            (D, C, F),
            (AXIS,) * 3,
            dtype,
            modules=[Module(f"{prefix}{name}", (C // len(gate_up), F)) for name in gate_up],
            bias=mlp.bias,
        )
        self.down = Linear("pf,fd->pd", (F, D), (AXIS,) * 2, dtype, modules=[Module(f"{prefix}{down}", (D,))], bias=mlp.bias)

    def __call__(self, x_PD: Array, angles: tuple[Array, Array] | None, attend: "partial[Array]") -> Array:
        q_PNH, k_PNH, v_PNH = jnp.unstack(self.qkv(self.attention_norm(x_PD)), axis=1)
        if self.qk_norms:
            q_PNH, k_PNH = (_over_heads(norm, x) for norm, x in zip(self.qk_norms, (q_PNH, k_PNH), strict=True))
        if angles is not None:
            q_PNH, k_PNH = apply_rope(q_PNH, angles), apply_rope(k_PNH, angles)
        x_PD = x_PD + self._scaled(0, self.out(attend(q_PNH, k_PNH, v_PNH, scale=self.scale)))
        gate_up_PCF = self.gate_up(self.mlp_norm(x_PD))
        fed_PF = self.activation(gate_up_PCF[:, 0])
        return x_PD + self._scaled(1, self.down(fed_PF * gate_up_PCF[:, 1] if self.gated else fed_PF))

    def _scaled(self, number: int, x_PD: Array) -> Array:
        """Scale the output of attention (0) or of the MLP (1), in layers that have scales."""
        return x_PD * self.scales[number][...] if self.scales else x_PD


class PatchMerger(nnx.Module):
    """Makes an embedding of the patches of each cell: see `Merger`."""

    def __init__(self, vision: Vision, part: Merger, dtype: str):
        self.part, self.cell = part, vision.merge_size**2
        joined = vision.hidden_size * (1 if part.averages else self.cell)
        self.norm, self.joined_norm = _norm(part.norm, vision.hidden_size, dtype), _norm(part.joined_norm, joined, dtype)
        inputs = (joined, *(linear.outputs for linear in part.linears))
        self.linears: nnx.List[Linear] = nnx.List(
            Linear(
                "pi,io->po",
                (width, linear.outputs),
                (AXIS, AXIS),
                dtype,
                modules=[Module(linear.name, (linear.outputs,))],
                bias=linear.bias,
                transposed=linear.transposed,
                weight=linear.weight,
            )
            for linear, width in zip(part.linears, inputs, strict=False)
        )

    def __call__(self, x_PD: Array) -> Array:
        """[P / merge_size², outputs of the last linear layer]."""
        x_MCD = self.norm(x_PD).reshape(len(x_PD) // self.cell, self.cell, -1)
        if self.part.averages:
            x_MCD = jnp.mean(x_MCD.astype(jnp.float32), axis=1, keepdims=True).astype(x_MCD.dtype)
        if self.part.channel_major:
            x_MCD = x_MCD.swapaxes(1, 2)
        x = self.joined_norm(x_MCD.reshape(len(x_MCD), -1))
        for linear, part in zip(self.linears, self.part.linears, strict=True):
            x = linear(x)
            x = x if part.activation is None else ACTIVATIONS[part.activation](x)
        return x


def _over_heads(norm: Normalization, x_PNH: Array) -> Array:
    """The norm of all heads together."""
    return norm(x_PNH.reshape(len(x_PNH), -1)).reshape(x_PNH.shape)


def _norm(norm: Norm | None, width: int, dtype: str, prefix: str = "") -> Normalization | NoNorm:
    return NoNorm() if norm is None else Normalization(norm, width, AXIS, dtype, prefix=prefix)
