import jax
import numpy as np
import pytest

from jaxllm.layers.build import build_model
from jaxllm.models.load_config import load_model_config
from scripts.demo_data.initial_weights import init_params
from tests.helpers import goldens


@pytest.mark.slow
def test_training_starts_with_smaller_residual_projections():
    config = load_model_config(goldens.FOLDER / "llama_gqa", dtype="bfloat16")
    state = init_params(build_model(config), jax.random.key(0))
    block = state["blocks"][0]
    assert block["mlp"]["down"]["weight"].dtype == np.float32
    assert float(block["mlp"]["down"]["weight"][...].std()) == pytest.approx(0.02 / 2, rel=0.1)
    assert float(block["mlp"]["gate_up"]["weight"][...].std()) == pytest.approx(0.02, rel=0.1)
