"""Vision encoders in NumPy and float64, written from the papers' formulas with loops over images: an oracle without torch."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
_erf = np.vectorize(math.erf)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def layer_norm(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Full attention of q, k, v [N, heads, d]: [N, heads · d]."""
    scores = np.einsum("phd,qhd->hpq", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hpq,qhd->phd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


def rotated(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[N, heads, d] turned by row in one half of the frequencies, by column in the other."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(np.arange(0, half, 2) / half)
    angles = np.concatenate([places[:, :1] * frequencies, places[:, 1:] * frequencies], axis=1)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def places_of(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of each patch, cell by cell."""
    found = []
    for top in range(0, h, merge):
        for left in range(0, w, merge):
            found += [(top + i, left + j) for i in range(merge) for j in range(merge)]
    return np.array(found)


def qwen3_vl(weights: Weights, config: Mapping[str, Any], grid: tuple[int, int, int], patches: np.ndarray) -> np.ndarray:
    """[tokens, result_width] of one image."""
    weights = {
        name.removeprefix("model.visual."): value.astype(np.float64) for name, value in weights.items() if "visual" in name
    }
    vision, (_, h, w) = config["vision_config"], grid
    merge, width, heads = vision["spatial_merge_size"], vision["hidden_size"], vision["num_heads"]
    places, size = places_of(h, w, merge), vision["patch_size"]
    pixels = np.repeat((patches.reshape(-1, 3, 1, size**2) / 255 - 0.5) / 0.5, 2, axis=2).reshape(h * w, -1)
    x = pixels @ weights["patch_embed.proj.weight"].reshape(width, -1).T + weights["patch_embed.proj.bias"]
    x = x + _interpolated(weights["pos_embed.weight"], h, w)[places[:, 0], places[:, 1]]

    def merged(name: str, x: np.ndarray, *, norm_first: bool) -> np.ndarray:
        cells = (layer_norm(weights, f"{name}.norm", x) if norm_first else x).reshape(-1, merge**2 * width)
        cells = cells if norm_first else layer_norm(weights, f"{name}.norm", cells)
        return linear(weights, f"{name}.linear_fc2", gelu(linear(weights, f"{name}.linear_fc1", cells)))

    added = []
    for i in range(vision["depth"]):
        block = f"blocks.{i}"
        qkv = linear(weights, f"{block}.attn.qkv", layer_norm(weights, f"{block}.norm1", x)).reshape(h * w, 3, heads, -1)
        out = attention(rotated(qkv[:, 0], places), rotated(qkv[:, 1], places), qkv[:, 2])
        x = x + linear(weights, f"{block}.attn.proj", out)
        fed = gelu_tanh(linear(weights, f"{block}.mlp.linear_fc1", layer_norm(weights, f"{block}.norm2", x)))
        x = x + linear(weights, f"{block}.mlp.linear_fc2", fed)
        if i in vision["deepstack_visual_indexes"]:
            added.append(merged(f"deepstack_merger_list.{len(added)}", x, norm_first=False))
    return np.concatenate([merged("merger", x, norm_first=True), *added], axis=1)


def _interpolated(table: np.ndarray, h: int, w: int) -> np.ndarray:
    """[h, w, width] of a square table, bilinear with corners on corners."""
    side = math.isqrt(len(table))
    table = table.reshape(side, side, -1)
    for axis, count in enumerate((h, w)):
        source = np.arange(count) * (side - 1) / max(count - 1, 1)
        low = np.floor(source).astype(int)
        high, part = np.minimum(low + 1, side - 1), source - low
        part = part.reshape(-1, *(1,) * (2 - axis))
        table = table.take(low, axis) * (1 - part) + table.take(high, axis) * part
    return table
