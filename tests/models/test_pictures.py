"""Models that see images against what transformers computed (tests/goldens/*/pictures.json), by dense attention."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.kernel_policy import CPU
from jaxllm.layers.build import build_model
from jaxllm.layers.step import Step
from jaxllm.media import MediaOptions
from jaxllm.media.processor import make_processor
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.shards import make_shards
from scripts import make_picture_goldens
from tests.helpers import goldens, pictures, vision_checkpoint
from tests.helpers.slow import slow_except

PAD_TO, NUM_PATCHES = 128, 96


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Checkpoints of goldens, each written and loaded once."""
    found = {}

    def load(name):
        if name not in found:
            directory = pictures.write(name, tmp_path_factory.mktemp(name))
            found[name] = (directory, *pictures.load(directory))
        return found[name]

    return load


def prompt_of(config, tower, golden, result):
    """Token ids of a prompt, its items, and what its pictures are encoded to."""
    vision, sizes = config.vision, [golden.pictures[i] for i in result.pictures]
    images = [pictures.picture(*size) for size in sizes]
    token_ids, items = pictures.expanded(result.prompt, [pictures.patches(image, vision)[0] for image in images], vision)
    if not images:
        return token_ids, items, np.zeros((0, vision.result_width), np.float32)
    return token_ids, items, pictures.encode(config, tower, images, num_patches=NUM_PATCHES)


@pytest.mark.parametrize("name", slow_except(["qwen3_vl", "qwen2_5_vl"], pictures.NAMES))
def test_features_equal_those_of_transformers(name, loaded):
    _, config, _, tower = loaded(name)
    golden = pictures.golden(name)
    found = pictures.encode(config, tower, [pictures.picture(*size) for size in golden.pictures], num_patches=NUM_PATCHES)
    np.testing.assert_allclose(found, golden.features, atol=1e-5)


@pytest.mark.parametrize("name", slow_except(["qwen3_vl", "qwen2_5_vl"], pictures.NAMES))
def test_logprobs_and_greedy_tokens_equal_those_of_transformers(name, loaded):
    _, config, text, tower = loaded(name)
    golden = pictures.golden(name)
    assert [len(result.pictures) for result in golden.results] == [2, 1, 0]
    for result in golden.results:
        prompt, items, encoded = prompt_of(config, tower, golden, result)
        token_ids = prompt + result.tokens
        assert len(result.tokens) == 64
        rows = jax.nn.log_softmax(pictures.logits(config, text, token_ids, items, encoded, pad_to=PAD_TO))
        rows = np.asarray(rows)[:-1]
        np.testing.assert_array_equal(rows[len(prompt) - 1 :].argmax(axis=1), result.tokens)
        found = rows[np.arange(len(rows)), token_ids[1:]]
        np.testing.assert_allclose(found, result.prompt_logprobs + result.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "min_tokens"),
    # Whether tokens are computed in two runs is not the model's affair.
    # Families differ in their encoders, which are not split, and in text models, which tests/models/test_families.py splits.
    slow_except([("qwen3_vl", 8)], [("qwen3_vl", 8), ("gemma3", 8), ("qwen3_vl_moe", 8), ("qwen3_vl", 10_000)]),
    ids=lambda value: {8: "two runs", 10_000: "one run"}.get(value, value),
)
def test_two_devices_compute_what_one_does(name, min_tokens, loaded):
    directory, config, text, tower = loaded(name)
    golden = pictures.golden(name)
    prompt, items, encoded = prompt_of(config, tower, golden, golden.results[0])
    expected = pictures.logits(config, text, prompt, items, encoded, pad_to=PAD_TO)
    split, state = goldens.load(directory, tensor_parallel_size=2)
    graph, mesh = nnx.graphdef(build_model(split)), make_mesh(2)
    shards = make_shards(mesh, replace(CPU, min_tokens_of_two_runs=min_tokens))

    def forward(state, token_ids_T, given_TX, is_given_T, rope_3T):
        model, positions_T = nnx.merge(graph, state), jnp.arange(PAD_TO)
        step = Step(token_ids_T, positions_T, pictures.attend(split.vision, is_given_T), shards)
        pictures.set_given(step, split.vision, given_TX, is_given_T, rope_3T)
        return shards.all_columns(model.logits(model(step), shards))

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=(specs, *(P(),) * 4), out_specs=P(), check_vma=False)
    found = np.asarray(jax.jit(mapped)(state, *pictures.inputs(prompt, items, encoded, PAD_TO)))
    np.testing.assert_allclose(found[: len(prompt), : config.vocab_size], expected, atol=1e-4)


EXTREMES = {
    "least, thin, wide and tall": [(1, 1), (200, 1), (1, 200), (6400, 32), (32, 6400)],
    "large": [(1100, 900)],
    "many": [(40 + 37 * i % 400, 30 + 53 * i % 300) for i in range(10)],
}
"""Widths and heights of images as they come, in pixels."""


@pytest.mark.torch
@pytest.mark.parametrize("extreme", sorted(EXTREMES))
@pytest.mark.parametrize("name", sorted(make_picture_goldens.VARIANTS.keys() - {"qwen3_vl_moe", "internvl_large", "smolvlm"}))
def test_features_of_extreme_sizes_equal_those_of_transformers(name, extreme, tmp_path):
    """Sizes as the family's preparation makes them, alone and packed together behind each other. Models left out prepare images as
    another does."""
    torch = pytest.importorskip("torch")
    vision_checkpoint.write(tmp_path, **make_picture_goldens.VARIANTS[name], seed=5)
    config, _, tower = pictures.load(tmp_path)
    vision, prepare = config.vision, make_processor(tmp_path, config.vision, MediaOptions())
    side = vision.patch_size * vision.merge_size
    grids = [prepare._family.grid(*size) for size in EXTREMES[extreme]]
    images = [pictures.picture(i, t * h * side, w * side) for i, (t, h, w) in enumerate(grids)]
    num_patches = vision.merge_size**2 * sum(t * h * w for t, h, w in grids)
    unit = vision.position_grid**2 if vision.has_tiles or vision.family == "gemma3" else vision.merge_size**2
    found = pictures.encode(config, tower, images, num_patches=num_patches + 2 * unit)
    with torch.no_grad():
        expected = make_picture_goldens.Reference(tmp_path).features(images)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(make_picture_goldens.VARIANTS))
def test_other_weights_and_sizes_equal_transformers_itself(name, tmp_path):
    torch = pytest.importorskip("torch")
    vision_checkpoint.write(tmp_path, **make_picture_goldens.VARIANTS[name], seed=77)
    config, text, tower = pictures.load(tmp_path)
    vision = config.vision
    images = [pictures.picture(*size) for size in pictures.sizes(vision, [(5, 3), (1, 6), (4, 4)])]
    prompt = [7, 8, vision.image_token_id, 9, vision.image_token_id, 10, vision.image_token_id, 11, 12]
    token_ids, items = pictures.expanded(prompt, [pictures.patches(image, vision)[0] for image in images], vision)
    encoded = pictures.encode(config, tower, images, num_patches=160)
    found = jax.nn.log_softmax(pictures.logits(config, text, token_ids, items, encoded, pad_to=64))
    with torch.no_grad():
        reference = make_picture_goldens.Reference(tmp_path)
        np.testing.assert_allclose(encoded, reference.features(images), atol=1e-5)
        np.testing.assert_allclose(found, reference.logprobs(token_ids, images).numpy(), atol=1e-4)
