import jax
from flax import nnx

from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import parameters
from jaxllm.models.load_config import load_model_config
from tests.helpers import goldens


def test_parameters_come_in_the_order_of_the_flattened_state():
    config = load_model_config(goldens.FOLDER / "llama_gqa", overrides={"num_hidden_layers": 12})
    model = build_model(config)
    assert [variable.shape for _, variable in parameters(model)] == [x.shape for x in jax.tree.leaves(nnx.state(model))]
    paths = ["/".join(map(str, path)) for path, _ in parameters(model)]
    by_jax = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(nnx.state(model))]
    assert [path.removesuffix("/value") for path in by_jax] == paths
