"""The training step and the direct decoding of the demo model, on a model of two narrow layers."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("optax")

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from scripts.demo_data.direct import DirectModel
from scripts.demo_data.packing import STARTS, TRAINED
from scripts.demo_data.training import Recipe, Trainer, row_losses
from tests.helpers.narrow_model import CONFIG, sharpened_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def state():
    return sharpened_state()


def _losses(state, tokens) -> tuple[float, int]:
    graph, _ = nnx.split(build_model(CONFIG))
    total, count = jax.jit(lambda state, tokens: row_losses(nnx.merge(graph, state), tokens))(
        state, jnp.array(tokens, jnp.uint16)
    )
    return float(total), int(count)


def _document(rng: random.Random, length: int) -> np.ndarray:
    document = np.array([rng.randrange(96) for _ in range(length)], np.uint16)
    document[length // 2 :] |= TRAINED
    document[0] |= STARTS
    return document


def test_documents_of_a_row_do_not_see_each_other(state):
    rng = random.Random(0)
    first, second = _document(rng, 24), _document(rng, 40)
    padding = np.full(32, STARTS, np.uint16)
    together, count = _losses(state, np.concatenate([first, second]))
    alone = [_losses(state, np.concatenate([document, padding])[:64]) for document in (first, second)]
    assert count == sum(entry[1] for entry in alone) == 32
    assert together == pytest.approx(sum(entry[0] for entry in alone), rel=1e-4)


def test_direct_answers_are_those_of_the_whole_computation(state):
    rng = random.Random(0)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in (2, 17, 128, 130)]
    direct = DirectModel(CONFIG, state)
    answers = direct.answer(prompts, [0, 5], max_new=6, batch=3)
    graph, _ = nnx.split(build_model(CONFIG))
    positions = jnp.arange(136)

    @jax.jit
    def best_next(state, token_ids):
        model = nnx.merge(graph, state)
        return jnp.argmax(model.logits(model(dense_step(token_ids, positions))), axis=1)

    for prompt, answer in zip(prompts, answers, strict=True):
        padded = np.zeros(136, np.int32)
        padded[: len(prompt) + len(answer)] = prompt + answer
        best = np.asarray(best_next(state, padded))[len(prompt) - 1 :].tolist()
        assert best[: len(answer)] == answer
        assert not set(answer) & {0, 5}
        assert len(answer) == 6 or best[len(answer)] in (0, 5)


def test_log_likelihood_skips_padding_and_the_first_token(state):
    direct = DirectModel(CONFIG, state)
    windows = [[1, 2, 3, 4, 5], [6, 7]]
    apart = sum(direct.log_likelihood([window], batch=1) for window in windows)
    assert direct.log_likelihood(windows, batch=4) == pytest.approx(apart, rel=1e-5)


def test_rate_warms_up_stays_and_falls_to_zero():
    recipe = Recipe(1, 1, 1, 8, 16, peak_rate=0.5, warmup_steps=10, constant_until=0.5)
    assert recipe.rate(0, 0.0) == pytest.approx(0.05)
    assert recipe.rate(100, 0.4) == 0.5
    assert recipe.rate(100, 0.75) == pytest.approx(0.25)
    assert recipe.rate(100, 1.0) == 0.0


def test_training_lowers_the_loss():
    recipe = Recipe(4, 1, 1, 16, 32, peak_rate=0.01, warmup_steps=2)
    trainer = Trainer(CONFIG, recipe, seed=0)
    sequence = np.arange(2000, dtype=np.uint16) % 7 | np.uint16(TRAINED)
    data = (sequence[:1600].reshape(-1, 16), sequence[:1600].reshape(-1, 32), sequence)
    lines: list[str] = []
    trainer.train(data, 0.0, max_steps=30, report=lines.append, test=lambda: "tested", log_every=10)
    losses = [float(line.split("chat loss ")[1].split()[0]) for line in lines if "chat loss" in line]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]
    assert lines.count("tested") == 3 and "trained 30 steps" in lines[-1]
