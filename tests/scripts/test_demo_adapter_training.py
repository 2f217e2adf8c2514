"""The training of the demo model's adapter, on a model of two narrow layers; the files are those of PEFT."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

pytest.importorskip("optax")

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.lora.checkpoint import read_adapter
from jaxllm.lora.targets import adaptable
from scripts.demo_data.adapting import Adapting, Lora, Sizes, merged, save_adapter
from scripts.demo_data.packing import TRAINED
from scripts.demo_data.training import Recipe
from tests.helpers.narrow_model import CONFIG, sharpened_state

pytestmark = pytest.mark.slow
SIZES = Sizes(rank=4, alpha=8)


@pytest.fixture(scope="module")
def base():
    return sharpened_state()


@pytest.fixture(scope="module")
def params():
    return {name: leaf + 0.05 for name, leaf in SIZES.init(CONFIG, 3).items()}


def test_a_merged_adapter_computes_what_the_applied_one_does(base, params):
    graph, _ = nnx.split(build_model(CONFIG))
    ids_T = jnp.arange(9)

    def hidden(state, adapt):
        return nnx.merge(graph, state)(replace(dense_step(ids_T, ids_T), adapt=adapt))

    applied = hidden(base, Lora(SIZES, params))
    np.testing.assert_allclose(hidden(merged(CONFIG, base, Lora(SIZES, params)), None), applied, rtol=1e-3, atol=1e-3)
    assert np.abs(applied - hidden(base, None)).max() > 0.1


def test_a_saved_adapter_is_read_as_it_was_trained(params, tmp_path):
    save_adapter(tmp_path, SIZES, params, "demo", "float32")
    targets = {name: shape for part in adaptable(build_model(CONFIG)) for name, shape in part.modules.items()}
    files = read_adapter(tmp_path, targets, max_rank=8, rank=8)
    assert set(files.modules) == {name for name in targets if ".layers." in name} and len(files.modules) == 14
    for name, value in params.items():
        read = files.tensor(name)
        np.testing.assert_allclose(read[:4] if "lora_A" in name else read[:, :4] / 2, value, rtol=1e-6)
    assert all(name.startswith("base_model.model.model.layers.") for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


def test_training_lowers_the_loss_and_leaves_the_base_alone(base):
    training = Adapting(CONFIG, base, SIZES, Recipe(4, 1, 1, 16, 32, peak_rate=0.03, warmup_steps=2), seed=0)
    sequence = np.arange(2000, dtype=np.uint16) % 7 | np.uint16(TRAINED)
    data = (sequence[:1600].reshape(-1, 16), sequence[:1600].reshape(-1, 32), sequence)
    lines: list[str] = []
    training.train(data, 0.0, max_steps=30, report=lines.append, test=str, tests=(), log_every=10)
    losses = [float(line.split("chat loss")[1].split()[0]) for line in lines if "chat loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, base, jax.device_get(training.state["base"]))
