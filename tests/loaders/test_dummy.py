import jax
import numpy as np
import pytest

from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.loaders import dummy
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.mesh import make_mesh
from tests.helpers import goldens


def test_dummy_weights_are_placed_and_scaled():
    config, state = goldens.load(goldens.FOLDER / "llama_bias", tensor_parallel_size=2, load_format="dummy")
    mesh = make_mesh(2)
    for path, variable in parameters(state):
        values = variable[...]
        assert values.sharding.is_equivalent_to(sharding(mesh, axes_of(variable)), values.ndim)
        if path[-1] == "bias":
            assert (values == 0).all()
        elif "norm" in str(path[-2]):
            assert (values == 1).all()
        else:
            assert float(values.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.slow
def test_dummy_model_is_the_same_on_any_number_of_devices():
    prompt = list(range(12))
    one, eight = (goldens.load(goldens.FOLDER / "qwen2", tensor_parallel_size=size, load_format="dummy") for size in (1, 8))
    np.testing.assert_allclose(goldens.logits(*one, prompt), goldens.logits(*eight, prompt)[:, :131], atol=1e-5)


def test_one_program_for_layers_that_are_alike():
    """A call for each array would wait for a thread that traces programs, about 50 ms each."""
    dummy._maker.cache_clear()
    loaded = []
    config = load_model_config(goldens.FOLDER / "llama_gqa", overrides={"num_hidden_layers": 12})
    model = build_model(config)
    state = dummy.dummy_weights(config, model, make_mesh(1), seed=0, progress=lambda *counts: loaded.append(counts))
    assert dummy._maker.cache_info().currsize == 3, "embedding and head, the last norm, a layer"
    assert len(loaded) == 12 + 3 and loaded[-1][0] == loaded[-1][1] == sum(x.nbytes for x in jax.tree.leaves(state))
