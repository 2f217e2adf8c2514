"""The training of the demo model that sees, on narrow layers: files, packing, step, workers, answers."""

import json
import random
import time

import jax
import numpy as np
import pytest

from scripts.demo_data.packing import TRAINED
from scripts.demo_data.vision import dialogues, model_files, optimizer, rows, scoring
from scripts.demo_data.vision.model import PATCHES, init_weights, load_weights, place_embeddings, save_weights, weight_shapes
from scripts.demo_data.vision.model_files import Sizes
from scripts.demo_data.vision.training import Recipe
from tests.helpers.demo_vision import NARROW, all_logits


@pytest.fixture(scope="module")
def tokenizer():
    return model_files.train_tokenizer(num_dialogues=1500)


def _weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).normal
    return {
        name: (("norm" in name and name.endswith("weight")) + draw(0, 0.15, shape)).astype(np.float32)
        for name, shape in weight_shapes(NARROW).items()
    }


def test_config_json_gives_back_the_sizes():
    assert Sizes.of(NARROW.config_json()) == NARROW
    assert Sizes.of(Sizes().config_json()) == Sizes()


def test_the_model_has_the_size_that_fits_the_package():
    shapes = jax.eval_shape(lambda: init_weights(Sizes(), 0))
    stored = sum(value.size for value in shapes.values()) + shapes[PATCHES].size  # two time slices in the file
    assert 2 * stored < 12e6


def test_saved_weights_are_read_back(tmp_path):
    weights = _weights()
    (tmp_path / "config.json").write_text(json.dumps(NARROW.config_json()))
    save_weights(weights, NARROW, tmp_path / "model.safetensors", dtype="float32")
    sizes, read = load_weights(tmp_path)
    assert sizes == NARROW and read.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(read[name], value, rtol=1e-6)


def test_the_gradient_of_placed_embeddings_is_that_of_the_gather():
    embeddings, factors = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    source = np.array([-1, 4, 0, -1, 5, -1])
    placed, gradient = jax.jit(jax.value_and_grad(lambda e: (place_embeddings(e, source) * factors).sum()))(embeddings)
    expected = np.zeros_like(embeddings)
    expected[source[source >= 0]] = factors[source >= 0]
    assert placed == pytest.approx((expected * embeddings).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((3, 24, 16), (16, 24)):
        matrix = jax.random.normal(jax.random.key(1), shape)
        values = np.linalg.svd(np.asarray(jax.jit(optimizer.orthogonalize)(matrix)), compute_uv=False)
        assert values.min() > 0.5 and values.max() < 1.3


def test_rate_warms_up_and_falls_along_a_cosine():
    recipe = Recipe(peak_rate=0.5, warmup_steps=10, last_rate=0.0)
    assert recipe.rate(0, 0.0) == pytest.approx(0.05)
    assert recipe.rate(100, 0.5) == pytest.approx(0.25)
    assert recipe.rate(100, 1.0) == pytest.approx(0.0)


@pytest.mark.slow
def test_answers_with_images_are_those_of_the_whole_computation(tokenizer):
    from scripts.demo_data.vision.answers import Answerer

    weights = _weights()
    some = [scoring.ask(*entry) for entry in dialogues.held_out_questions(1)][-4:]
    answers = Answerer(weights, NARROW, tokenizer, "float32", 4).token_ids(some)
    documents = rows.Documents(tokenizer)
    for asked, answer in zip(some, answers, strict=True):
        document = documents.of_prompt(asked.prompt, asked.images)
        for token in answer[:3]:
            assert int(all_logits(weights, document)[-1].argmax()) == token
            document = document._replace(tokens=np.append(document.tokens, np.uint16(token)))


@pytest.mark.slow
def test_images_and_dialogues_in_a_row_do_not_see_each_other(tokenizer):
    from scripts.demo_data.vision.training import batch_loss

    weights = _weights()
    rng = random.Random(0)
    documents = rows.Documents(tokenizer).of([dialogues.seen(rng, 2) for _ in range(8)], rng)
    first, second = sorted(documents, key=lambda document: len(document.tokens))[:2]

    def loss(*some) -> tuple[float, int]:
        shape = rows.BatchShape(1, 256, 1, 800)
        batch = shape.empty()
        packer = rows.Packer(shape, batch)
        assert all(packer.add(document) for document in some)
        mean, _ = jax.jit(lambda weights, batch: batch_loss(weights, NARROW, batch, "float32"))(weights, batch)
        count = int(((batch.tokens_RT & TRAINED) != 0).sum())
        return float(mean) * count, count

    together, count = loss(first, second)
    alone = [loss(first), loss(second)]
    assert count == alone[0][1] + alone[1][1]
    assert together == pytest.approx(alone[0][0] + alone[1][0], rel=1e-4)


@pytest.mark.slow
def test_training_with_workers_lowers_the_loss_and_a_lost_worker_is_told(tokenizer, tmp_path):
    from scripts.demo_data.vision.training import Trainer
    from scripts.demo_data.vision.workers import working

    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = rows.BatchShape(2, 256, 2, 400)
    trainer = Trainer(NARROW, shape, Recipe(0.01, 3), init_weights(NARROW, 0), dtype="float32")
    lines: list[str] = []
    saved: list[int] = []
    with working(tmp_path / "tokenizer.json", shape, 0, 1) as workers:
        trainer.train(
            workers,
            time.monotonic() + 120,
            max_steps=18,
            report=lines.append,
            checkpoint=lambda: saved.append(1),
            log_seconds=0.0,
            checkpoint_seconds=0.0,
        )
        losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]
        assert losses[-1] < 0.8 * losses[0]
        assert saved and "trained 18 steps" in lines[-1]
        workers._processes[0].terminate()
        with pytest.raises(RuntimeError, match="has ended"):
            while True:
                workers.take(timeout=1.0)
