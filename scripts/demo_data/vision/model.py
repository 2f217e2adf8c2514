"""Qwen3-VL with dense attention in plain JAX, for training: functions of a dictionary of weights.

Weights have the names of a Hugging Face checkpoint, `*` in place of the layer's number, and those of all layers stacked. What it
computes is written down in transformers' `modeling_qwen3_vl.py`; a test compares.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from jaxllm.loaders import safetensors
from scripts.saving import write_safetensors

from .model_files import Sizes
from .rows import MERGED

Weights = dict[str, Array]

_TOWER, _TEXT = "model.visual.", "model.language_model."
PATCHES = _TOWER + "patch_embed.proj.weight"
"""Of the two time slices of the checkpoint the sum: a still picture is the same at both times."""
EMBEDDINGS = _TEXT + "embed_tokens.weight"
POSITIONS = _TOWER + "pos_embed.weight"
_EPSILON = 1e-6


def _linear(name: str, layers: int | None, out: int, in_: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    stack = () if layers is None else (layers,)
    return {f"{name}.weight": (*stack, out, in_)} | ({f"{name}.bias": (*stack, out)} if bias else {})


def _norm(name: str, layers: int | None, width: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    stack = () if layers is None else (layers,)
    return {f"{name}.weight": (*stack, width)} | ({f"{name}.bias": (*stack, width)} if bias else {})


def weight_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """All weights, stacked."""
    tower, width, merged = sizes.tower_width, sizes.width, sizes.tower_width * MERGED
    block, layer = _TOWER + "blocks.*.", _TEXT + "layers.*."
    heads, kv = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    deep, depth = len(sizes.deepstack), sizes.tower_layers
    return {
        PATCHES: (tower, 3 * sizes.patch**2),
        _TOWER + "patch_embed.proj.bias": (tower,),
        POSITIONS: (sizes.grid**2, tower),
        **_norm(block + "norm1", depth, tower),
        **_norm(block + "norm2", depth, tower),
        **_linear(block + "attn.qkv", depth, 3 * tower, tower),
        **_linear(block + "attn.proj", depth, tower, tower),
        **_linear(block + "mlp.linear_fc1", depth, sizes.tower_mlp_width, tower),
        **_linear(block + "mlp.linear_fc2", depth, tower, sizes.tower_mlp_width),
        **_norm(_TOWER + "merger.norm", None, tower),
        **_linear(_TOWER + "merger.linear_fc1", None, merged, merged),
        **_linear(_TOWER + "merger.linear_fc2", None, width, merged),
        **_norm(_TOWER + "deepstack_merger_list.*.norm", deep, merged),
        **_linear(_TOWER + "deepstack_merger_list.*.linear_fc1", deep, merged, merged),
        **_linear(_TOWER + "deepstack_merger_list.*.linear_fc2", deep, width, merged),
        EMBEDDINGS: (sizes.vocab_size, width),
        **_norm(layer + "input_layernorm", sizes.layers, width, bias=False),
        **_norm(layer + "post_attention_layernorm", sizes.layers, width, bias=False),
        **_norm(layer + "self_attn.q_norm", sizes.layers, sizes.head_width, bias=False),
        **_norm(layer + "self_attn.k_norm", sizes.layers, sizes.head_width, bias=False),
        **_linear(layer + "self_attn.q_proj", sizes.layers, heads, width, bias=False),
        **_linear(layer + "self_attn.k_proj", sizes.layers, kv, width, bias=False),
        **_linear(layer + "self_attn.v_proj", sizes.layers, kv, width, bias=False),
        **_linear(layer + "self_attn.o_proj", sizes.layers, width, heads, bias=False),
        **_linear(layer + "mlp.gate_proj", sizes.layers, sizes.mlp_width, width, bias=False),
        **_linear(layer + "mlp.up_proj", sizes.layers, sizes.mlp_width, width, bias=False),
        **_linear(layer + "mlp.down_proj", sizes.layers, width, sizes.mlp_width, bias=False),
        _TEXT + "norm.weight": (width,),
    }


def init_weights(sizes: Sizes, seed: int) -> Weights:
    """Float32: norms 1, biases 0, others normal; what adds to the stream of a model of n layers is smaller by the root of 2n."""
    weights: Weights = {}
    for number, (name, shape) in enumerate(weight_shapes(sizes).items()):
        if name.endswith("bias"):
            weights[name] = jnp.zeros(shape)
        elif "norm" in name:
            weights[name] = jnp.ones(shape)
        else:
            scale = 0.02 if name in (EMBEDDINGS, POSITIONS) else shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= (2 * sizes.layers) ** 0.5
            elif "blocks" in name and name.endswith(("attn.proj.weight", "linear_fc2.weight")):
                scale /= (2 * sizes.tower_layers) ** 0.5
            weights[name] = scale * jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), shape)
    return weights


def save_weights(weights: Weights, sizes: Sizes, file: Path, dtype: str = "bfloat16") -> None:
    """Writes a safetensors file with the checkpoint's names and shapes."""
    tensors: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        array = np.asarray(value, np.float32)
        if name == PATCHES:
            half = (array / 2).reshape(sizes.tower_width, 3, 1, sizes.patch, sizes.patch)
            tensors[name] = np.repeat(half, 2, axis=2)
        elif "*" in name:
            tensors |= {name.replace("*", str(place)): part for place, part in enumerate(array)}
        else:
            tensors[name] = array
    stored = {
        name: np.ascontiguousarray(tensors[name].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
        for name in sorted(tensors)
    }
    partial_file = file.with_suffix(".partial")
    write_safetensors(partial_file, stored)
    partial_file.replace(file)


def load_weights(directory: Path) -> tuple[Sizes, Weights]:
    """Reads what `save_weights` wrote, as float32."""
    sizes = Sizes.of(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    checkpoint = safetensors.Checkpoint(directory)
    weights: Weights = {}
    for name, shape in weight_shapes(sizes).items():
        names = [name.replace("*", str(place)) for place in range(shape[0])] if "*" in name else [name]
        parts = [checkpoint.tensor(one).astype(np.float32) for one in names]
        array = parts[0].sum(axis=2) if name == PATCHES else np.stack(parts)
        weights[name] = jnp.asarray(array.reshape(shape))
    return sizes, weights


def _layer_norm(weights: Weights, name: str, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _EPSILON)
    return (wide * weights[name + ".weight"] + weights[name + ".bias"]).astype(x.dtype)


def _rms_norm(weight: Array, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _EPSILON)
    return (wide * weight).astype(x.dtype)


def _apply(weights: Weights, name: str, x: Array) -> Array:
    result = x @ weights[name + ".weight"].T
    bias = weights.get(name + ".bias")
    return result if bias is None else result + bias


def _rotate(x_BTNH: Array, angles_BTF: Array) -> Array:
    """Rotates pairs of values, those of the first half with those of the second."""
    cos, sin = jnp.cos(angles_BTF)[:, :, None], jnp.sin(angles_BTF)[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def _layers(weights: Weights, prefix: str) -> list[Weights]:
    """The stacked weights of these names, taken apart."""
    own = {name.removeprefix(prefix): list(value) for name, value in weights.items() if name.startswith(prefix)}
    count = len(next(iter(own.values())))
    return [{name: values[place] for name, values in own.items()} for place in range(count)]


def _grid_weights(places_VP: Array, sizes_VP: Array, grid: int) -> Array:
    """Linear interpolation [V, P, grid] of a table of `grid` entries, stretched over a picture of so many patches."""
    source_VP = places_VP * (grid - 1) / jnp.maximum(sizes_VP - 1, 1)
    return jnp.maximum(0.0, 1.0 - jnp.abs(source_VP[..., None] - jnp.arange(grid)))


def encode_pictures(weights: Weights, sizes: Sizes, patches_VPC: Array, places_VP4: Array, segment_VP: Array) -> list[Array]:
    """Embeddings [V, P / 4, D] of pictures, and what is added behind each of the first text layers, in the type of the weights."""
    dtype = weights[PATCHES].dtype
    V, P, _ = patches_VPC.shape
    pixels = (patches_VPC.astype(jnp.float32) / 127.5 - 1.0).astype(dtype)
    x_VPD = _apply(weights, _TOWER + "patch_embed.proj", pixels)
    places = places_VP4.astype(jnp.float32)
    rows, columns = (_grid_weights(places[..., axis], places[..., axis + 2], sizes.grid) for axis in (0, 1))
    taps = (rows[..., :, None] * columns[..., None, :]).reshape(V, P, sizes.grid**2)
    x_VPD += taps.astype(dtype) @ weights[POSITIONS]
    head_width = sizes.tower_width // sizes.tower_heads
    frequencies = 10000.0 ** (-jnp.arange(0, head_width // 2, 2) / (head_width / 2))
    angles = (places[..., :2, None] * frequencies).reshape(V, P, head_width // 2)
    mask = (segment_VP[:, :, None] == segment_VP[:, None, :])[:, None]
    results: list[Array] = []
    mergers = _layers(weights, _TOWER + "deepstack_merger_list.*.") if sizes.deepstack else []
    for number, layer in enumerate(_layers(weights, _TOWER + "blocks.*.")):
        qkv = _apply(layer, "attn.qkv", _layer_norm(layer, "norm1", x_VPD)).reshape(V, P, 3, sizes.tower_heads, head_width)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        seen = jax.nn.dot_product_attention(_rotate(q, angles), _rotate(k, angles), v, mask=mask)
        x_VPD += _apply(layer, "attn.proj", seen.reshape(V, P, -1))
        inner = jax.nn.gelu(_apply(layer, "mlp.linear_fc1", _layer_norm(layer, "norm2", x_VPD)), approximate=True)
        x_VPD += _apply(layer, "mlp.linear_fc2", inner)
        if number in sizes.deepstack:
            merger = mergers[sizes.deepstack.index(number)]
            results.append(_merge(merger, "", _layer_norm(merger, "norm", x_VPD.reshape(V, P // MERGED, -1))))
    normed = _layer_norm(weights, _TOWER + "merger.norm", x_VPD).reshape(V, P // MERGED, -1)
    return [_merge(weights, _TOWER + "merger.", normed), *results]


def _merge(weights: Weights, prefix: str, x: Array) -> Array:
    inner = jax.nn.gelu(_apply(weights, prefix + "linear_fc1", x), approximate=False)
    return _apply(weights, prefix + "linear_fc2", inner)


@jax.custom_vjp
def place_embeddings(embeddings_ED: Array, source_T: Array) -> Array:
    """Row `source` of the embeddings for each token, 0 where it is -1. Each row is wanted at most once."""
    return jnp.where(source_T[:, None] >= 0, embeddings_ED[source_T], 0)


def _place_forward(embeddings_ED: Array, source_T: Array) -> tuple[Array, tuple[Array, Array]]:
    return place_embeddings(embeddings_ED, source_T), (source_T, embeddings_ED[:, :0])


def _place_backward(saved: tuple[Array, Array], gradient_TD: Array) -> tuple[Array, None]:
    """Gathers too: the usual gradient of a gather adds to rows at random, which a GPU does slowly."""
    source_T, like_E0 = saved
    end = like_E0.shape[0]
    target_E = jnp.full(end + 1, -1).at[jnp.where(source_T >= 0, source_T, end)].set(jnp.arange(source_T.shape[0]))[:-1]
    return jnp.where(target_E[:, None] >= 0, gradient_TD[target_E], 0), None


place_embeddings.defvjp(_place_forward, _place_backward)


def _rope_axes(sizes: Sizes) -> np.ndarray:
    """Which position (time, row, column) turns each frequency: row and column take turns with time, then time alone."""
    axes = np.zeros(sizes.head_width // 2, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sizes.rope_sections[axis] : 3] = axis
    return axes


def text_hidden(
    weights: Weights,
    sizes: Sizes,
    ids_RT: Array,
    positions_R3T: Array,
    segment_RT: Array,
    source_RT: Array,
    pictures: list[Array],
) -> Array:
    """Last hidden states [R, T, D], after the norm, of rows of documents with the embeddings of their pictures."""
    R, T = ids_RT.shape
    dtype = weights[EMBEDDINGS].dtype
    is_picture = (source_RT >= 0)[..., None]
    encoded = jnp.concatenate(pictures, axis=-1)
    placed = place_embeddings(encoded.reshape(-1, encoded.shape[-1]), source_RT.reshape(-1)).reshape(R, T, -1)
    given = jnp.split(placed, len(pictures), axis=-1)
    # A product with ones and zeros: the gradient of an index is a scatter, which a GPU does slowly.
    x_RTD = jnp.where(is_picture, given[0], jax.nn.one_hot(ids_RT, sizes.vocab_size, dtype=dtype) @ weights[EMBEDDINGS])
    frequencies = sizes.rope_theta ** (-jnp.arange(0, sizes.head_width, 2) / sizes.head_width)
    angles = jnp.moveaxis(positions_R3T.astype(jnp.float32)[:, _rope_axes(sizes)], 1, 2) * frequencies
    mask = (segment_RT[:, :, None] == segment_RT[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))
    for number, layer in enumerate(_layers(weights, _TEXT + "layers.*.")):
        x = _rms_norm(layer["input_layernorm.weight"], x_RTD)
        q, k, v = (_apply(layer, f"self_attn.{name}_proj", x).reshape(R, T, -1, sizes.head_width) for name in "qkv")
        q, k = _rms_norm(layer["self_attn.q_norm.weight"], q), _rms_norm(layer["self_attn.k_norm.weight"], k)
        seen = jax.nn.dot_product_attention(_rotate(q, angles), _rotate(k, angles), v, mask=mask[:, None])
        x_RTD += _apply(layer, "self_attn.o_proj", seen.reshape(R, T, -1))
        x = _rms_norm(layer["post_attention_layernorm.weight"], x_RTD)
        x_RTD += _apply(
            layer, "mlp.down_proj", jax.nn.silu(_apply(layer, "mlp.gate_proj", x)) * _apply(layer, "mlp.up_proj", x)
        )
        if number < len(sizes.deepstack):
            x_RTD += given[1 + number]
    return _rms_norm(weights[_TEXT + "norm.weight"], x_RTD)


def logits(weights: Weights, hidden: Array) -> Array:
    """Float32 scores of all tokens."""
    return jnp.matmul(hidden, weights[EMBEDDINGS].T, preferred_element_type=jnp.float32)
