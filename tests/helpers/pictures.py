"""Pictures for tests, and plain ways to run a model over prompts with them: goldens in tests/goldens/*/pictures.json."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jaxllm.layers.attend import Attend
from jaxllm.layers.build import build_model, build_tower
from jaxllm.layers.dense_attention import dense_attend, dense_step
from jaxllm.layers.vision import PatchIndices, patch_indices
from jaxllm.loaders.encoder import load_encoder
from jaxllm.loaders.load import load_weights
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Vision
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.request import PromptItem
from jaxllm.rope_positions import rope_positions
from tests.helpers import vision_checkpoint
from tests.helpers.goldens import FOLDER

NAMES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/pictures.json")))

Size = tuple[int, int, int]
"""Seed, height and width of a picture."""


@dataclass(frozen=True)
class Result:
    """One prompt and what followed greedily."""

    prompt: list[int]
    """With one placeholder for each picture."""
    pictures: list[int]
    """Which of the golden's pictures are in the prompt, in order."""
    prompt_logprobs: list[float]
    """Logprobs of the prompt's tokens from the second on, placeholders of every embedding included."""
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Golden:
    checkpoint: dict[str, Any]
    """Arguments of `vision_checkpoint.write`."""
    pictures: list[Size]
    features: list[list[float]]
    """Embeddings of all images, concatenated: see `VisionTower`."""
    results: list[Result]


@functools.cache
def golden(name: str) -> Golden:
    values = json.loads((FOLDER / name / "pictures.json").read_text(encoding="utf-8"))
    results = [Result(**result) for result in values["results"]]
    return Golden(values["checkpoint"], values["pictures"], values["features"], results)


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """Random pixels, uint8 [height, width, 3]."""
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def sizes(vision: Vision, cells: Sequence[tuple[int, int]]) -> list[Size]:
    """Pictures of these heights and widths in cells; where pictures have one size, as many of that; where they have tiles, so many tiles
    below each other as cells."""
    side, whole = vision.patch_size * vision.merge_size, vision.position_grid // vision.merge_size
    if vision.family == "gemma3":
        cells = [(whole, whole)] * len(cells)
    if vision.has_tiles:
        cells = [(whole * rows, whole) for rows, _ in cells]
    return [(i, rows * side, columns * side) for i, (rows, columns) in enumerate(cells)]


def patches(pixels: np.ndarray, vision: Vision) -> tuple[tuple[int, int, int], np.ndarray]:
    """The grid of patches of a picture whose sides are whole cells, and the patches, uint8 [N, 3 · patch_size²], cell by cell."""
    size, merge = vision.patch_size, vision.merge_size
    h, w = (length // size for length in pixels.shape[:2])
    cells = pixels.reshape(h // merge, merge, size, w // merge, merge, size, 3)
    grid = (h // w, w, w) if vision.has_tiles else (1, h, w)
    return grid, cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3 * size**2)


def expanded(
    prompt: Sequence[int], grids: Sequence[tuple[int, int, int]], vision: Vision
) -> tuple[list[int], list[PromptItem]]:
    """A prompt with a placeholder for each embedding in place of one for each picture, and its items."""
    token_ids: list[int] = []
    items: list[PromptItem] = []
    for token in prompt:
        if token != vision.image_token_id:
            token_ids.append(token)
            continue
        t, h, w = grids[len(items)]
        grid = (t, h // vision.merge_size, w // vision.merge_size)
        item = PromptItem("image", bytes([len(items)]), len(token_ids), int(np.prod(grid)), grid=grid)
        if vision.family == "pixtral":  # a token ends each row and another the last, the next two of the vocabulary
            rows, columns = grid[1:]
            own = ([token] * columns + [token + 1]) * (rows - 1) + [token] * columns + [token + 2]
            runs = tuple((row * (columns + 1), columns) for row in range(rows))
            item = PromptItem("image", item.content_hash, item.position, len(own), embedding_runs=runs)
        if vision.family == "internvl":  # a token stands before the tiles and another behind, the next two of the vocabulary
            own, runs = [token + 1, *[token] * int(np.prod(grid)), token + 2], ((1, int(np.prod(grid))),)
            item = PromptItem("image", item.content_hash, item.position, len(own), embedding_runs=runs)
        if vision.family == "idefics3":  # a token stands before each tile and behind the last, the next of the vocabulary
            own = ([token + 1] + [token] * grid[1] * grid[2]) * t + [token + 1]
            runs = tuple((1 + tile * (1 + grid[1] * grid[2]), grid[1] * grid[2]) for tile in range(t))
            item = PromptItem("image", item.content_hash, item.position, len(own), embedding_runs=runs)
        items.append(item)
        token_ids += own if item.embedding_runs else [token] * item.num_tokens
    return token_ids, items


def write(name: str, directory: Path) -> Path:
    """The checkpoint of a golden."""
    return vision_checkpoint.write(directory, **golden(name).checkpoint)


def load(directory: Path, **options: Any) -> tuple[ModelConfig, nnx.State, nnx.State]:
    """A checkpoint's config, text model and encoder, on one device."""
    config, mesh = load_model_config(directory, **options), make_mesh(1)
    text = load_weights(config, build_model(config), directory, load_format="auto", mesh=mesh)
    return config, text, load_encoder(config, build_tower(config), config.vision.encoder, directory, mesh=mesh)


def encode(config: ModelConfig, tower: nnx.State, pixels: Sequence[np.ndarray], *, num_patches: int) -> np.ndarray:
    """[tokens, result_width] of pictures, packed one behind the other with padding."""
    vision = config.vision
    assert vision is not None
    grids, arrays = zip(*(patches(each, vision) for each in pixels), strict=True)
    together = np.concatenate(arrays)
    padded = np.full((num_patches, together.shape[1]), 255, np.uint8)
    padded[: len(together)] = together
    packed = patch_indices(vision, grids, num_patches).pack()
    return np.asarray(_encode(config)(tower, padded, packed))[: len(together) // vision.merge_size**2]


@functools.cache
def _encode(config: ModelConfig):
    graph = nnx.graphdef(build_tower(config))

    @jax.jit
    def encode(state, patches_PC, packed_KP):
        return nnx.merge(graph, state)(patches_PC, PatchIndices.unpack(packed_KP), attention="xla")

    return encode


def inputs(
    token_ids: Sequence[int], items: Sequence[PromptItem], encoded: np.ndarray, pad_to: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [T], encoded [T, result_width], whether a token is, bool [T], and rope positions [3, T], padded to T."""
    ids, is_given = np.zeros(pad_to, np.int32), np.zeros(pad_to, bool)
    ids[: len(token_ids)] = token_ids
    given, start = np.zeros((pad_to, encoded.shape[1]), encoded.dtype), 0
    for item in items:
        for offset, count in item.embedding_runs or ((0, item.num_tokens),):
            own = slice(item.position + offset, item.position + offset + count)
            given[own], is_given[own] = encoded[start : start + count], True
            start += count
    return ids, given, is_given, rope_positions(items, 0, pad_to)


def attend(vision: Vision, is_given_T: Array) -> Attend:
    """Dense attention of one sequence with these tokens of pictures. If these see each other, there is text between pictures."""
    index_T = jnp.arange(len(is_given_T))
    if not vision.attends_within:
        return dense_attend(index_T)
    next_text_T = lax.cummin(jnp.where(is_given_T, len(is_given_T), index_T), reverse=True)
    return dense_attend(index_T, num_later_T=jnp.where(is_given_T, next_text_T - index_T - 1, 0))


def set_given(step, vision: Vision, given_TX, is_given_T, rope_3T) -> None:
    """Put what an encoder made into a step."""
    L = vision.output_size
    step.given_TD, step.is_given_T, step.rope_positions_3T = given_TX[:, :L], is_given_T, rope_3T
    step.deepstack = [given_TX[:, (1 + j) * L : (2 + j) * L] for j in range(vision.num_deepstack)] or None


def logits(
    config: ModelConfig,
    text: nnx.State,
    token_ids: Sequence[int],
    items: Sequence[PromptItem],
    encoded: np.ndarray,
    *,
    pad_to: int,
) -> np.ndarray:
    """[T, V] of one sequence by dense attention."""
    return np.asarray(_logits(config)(text, *inputs(token_ids, items, encoded, pad_to)))[: len(token_ids)]


@functools.cache
def _logits(config: ModelConfig):
    graph = nnx.graphdef(build_model(config))

    @jax.jit
    def forward(state, token_ids_T, given_TX, is_given_T, rope_3T):
        model = nnx.merge(graph, state)
        step = dense_step(token_ids_T, jnp.arange(len(token_ids_T)))
        step.attend = attend(config.vision, is_given_T)
        set_given(step, config.vision, given_TX, is_given_T, rope_3T)
        return model.logits(model(step))

    return forward
