"""The training and the measurement of the demo model's drafters, on models of two narrow layers; the files that come with jaxllm."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

pytest.importorskip("optax")

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from scripts.demo_data import eagle3
from scripts.demo_data.acceptance import AcceptanceTest, tokens_per_step
from scripts.demo_data.direct import DirectModel
from scripts.demo_data.distilling import Distilling, DraftModelTraining, Eagle3Training, read
from scripts.demo_data.packing import TRAINED
from scripts.demo_data.training import Recipe
from tests.helpers.eagle3_numpy import Eagle3
from tests.helpers.narrow_model import CONFIG, sharpened_state

DATA = Path(__file__).parents[2] / "jaxllm" / "data"
HEAD = eagle3.Eagle3Sizes(
    hidden_size=32,
    vocab_size=96,
    draft_vocab_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    feature_layers=(0, 1),
    max_position_embeddings=512,
)
COLUMNS = np.sort(np.random.default_rng(0).permutation(96)[:40])


@pytest.fixture(scope="module")
def target():
    return sharpened_state()


def _head(target):
    head = Eagle3Training(HEAD, COLUMNS, target["embedding"]["weight"][...])
    params = head.init(2)
    return head, {name: leaf.astype(jnp.bfloat16).astype(jnp.float32) for name, leaf in params.items()}


@pytest.mark.slow
def test_a_saved_head_drafts_what_the_trained_one_does(target, tmp_path):
    head, params = _head(target)
    eagle3.save_head(tmp_path, HEAD, params, COLUMNS)
    oracle = Eagle3(tmp_path, np.asarray(target["embedding"]["weight"][...]))
    graph, _ = nnx.split(build_model(CONFIG))

    @jax.jit
    def drafted(params, ids_T):
        positions_T = jnp.arange(len(ids_T))
        reading = read(nnx.merge(graph, target), HEAD.feature_layers, ids_T, positions_T, jnp.zeros_like(positions_T))
        return reading.features_TF, jnp.stack(head.logits(params, reading, 4))

    ids = np.random.default_rng(1).integers(0, 96, 24)
    for known in (2, 9, 20):
        features_TF, _ = drafted(params, ids)
        chain = oracle.drafts(features_TF[: known - 1], ids[1:known], 4)
        assert set(chain) <= set(COLUMNS) and np.all(oracle.can_draft[chain])
        ids_T = np.concatenate([ids[:known], chain, np.zeros(24 - known, int)])[:24]
        logits_JTV = np.asarray(drafted(params, ids_T)[1])
        assert COLUMNS[np.argmax(logits_JTV[:, known - 2], axis=1)].tolist() == chain


@pytest.mark.slow
def test_features_are_what_enters_the_layers(target):
    model = nnx.merge(nnx.split(build_model(CONFIG))[0], target)
    ids_T, positions_T = jnp.arange(7), jnp.arange(7)
    reading = read(model, (0, 1), ids_T, positions_T, jnp.zeros_like(ids_T))
    step = dense_step(ids_T, positions_T)
    np.testing.assert_array_equal(reading.features_TF[:, :32], model.embedding(ids_T))
    np.testing.assert_allclose(reading.features_TF[:, 32:], model.run(model.embed(step), step, range(1))[0][0], rtol=1e-6)
    np.testing.assert_allclose(reading.logits_TV, model.logits(model(step)), rtol=1e-5, atol=1e-5)


def _distilling(target, depth: int) -> Distilling:
    drafters = [_head(target)[0], DraftModelTraining(CONFIG)]
    recipe = Recipe(4, 1, 1, 16, 32, peak_rate=0.03, warmup_steps=2)
    return Distilling(CONFIG, target, HEAD.feature_layers, drafters, recipe, depth, seed=0)


@pytest.mark.slow
def test_training_lowers_the_losses(target):
    training = _distilling(target, depth=2)
    before = jax.device_get(training.state["target"])
    sequence = np.arange(2000, dtype=np.uint16) % 7 | np.uint16(TRAINED)
    data = (sequence[:1600].reshape(-1, 16), sequence[:1600].reshape(-1, 32), sequence)
    lines: list[str] = []
    training.train(data, 0.0, max_steps=30, report=lines.append, test=lambda: "tested", log_every=10)
    for name in ("eagle3 loss", "draft loss"):
        losses = [float(line.split(name)[1].split()[0]) for line in lines if name in line]
        assert len(losses) == 3 and losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(training.state["target"]))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counted_steps_are_those_of_drafting_and_verifying(target, temperature):
    """A draft model near the target, step by step as an engine would do it."""
    noisy = jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), target)
    test = AcceptanceTest(CONFIG, target, (1,), depth=3, batch=1)
    drafter = DraftModelTraining(CONFIG)
    generated = test.generate([[5, 17, 80]], [0], 40, temperature)
    (text,) = generated.texts
    assert test.measure(drafter, target, generated)[2] == pytest.approx((len(text) - 4) / -(-(len(text) - 4) // 4))
    draft_model, num_known, steps = DirectModel(CONFIG, noisy), 4, 0
    while num_known < len(text):
        drafts = draft_model.generate([text[:num_known]], [], 3, 1, temperature)[0]
        matching = [draft == token for draft, token in zip(drafts, text[num_known:], strict=False)]
        num_known += 1 + [*matching, False].index(False)
        steps += 1
    measured = test.measure(drafter, noisy, generated)
    assert measured[2] == pytest.approx((len(text) - 4) / steps)
    assert 1.0 < measured[0] < measured[2] < 4.0


def test_tokens_past_the_end_are_not_counted():
    accepted = [9] * 20
    assert tokens_per_step(accepted, num_prompt=3, num_tokens=4, num_drafts=4) == (0, 0)
    assert tokens_per_step(accepted, num_prompt=3, num_tokens=9, num_drafts=4) == (5, 1)
    assert tokens_per_step(accepted, num_prompt=3, num_tokens=10, num_drafts=4) == (6, 2)
    assert tokens_per_step([0] * 20, num_prompt=3, num_tokens=10, num_drafts=4) == (6, 6)
    assert tokens_per_step([0, 0, 2, 9, 9, 1, 9, 9], num_prompt=3, num_tokens=9, num_drafts=4) == (5, 2)


def test_the_shipped_head_is_as_its_config_says():
    tensors = load_file(DATA / "demo_eagle3" / "model.safetensors")
    config = json.loads((DATA / "demo_eagle3" / "config.json").read_text())
    sizes = eagle3.Eagle3Sizes(
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        feature_layers=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        max_position_embeddings=config["max_position_embeddings"],
    )
    assert config == sizes.config_json("bfloat16")
    token_ids = np.arange(sizes.draft_vocab_size) + tensors.pop("d2t")
    assert (
        np.all(np.diff(token_ids) > 0) and token_ids[[0, -1]].tolist() <= [0, sizes.vocab_size - 1] and {0, 2} <= set(token_ids)
    )
    np.testing.assert_array_equal(np.flatnonzero(tensors.pop("t2d")), token_ids)
    assert {name: tensor.shape for name, tensor in tensors.items()} == sizes.shapes
