"""Layers for multi-token prediction: around them NumPy, they themselves by dense attention over whole sequences."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import load_weights
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.speculative import mtp
from tests.helpers import goldens
from tests.speculative.by_hand import MAX_LENGTH, ByHand, Sequence, target_hidden_states

GOLDEN, V, H, LAST = goldens.FOLDER / "deepseek_v3", 128, 64, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint with a layer behind the last, which has values of its own."""
    folder = tmp_path_factory.mktemp("mtp") / "model"
    shutil.copytree(GOLDEN, folder)
    checkpoint, rng = open_checkpoint(GOLDEN), np.random.default_rng(2)
    weights = {name: np.float32(checkpoint.tensor(name)) for name in checkpoint.entries}
    layer, spare = f"model.layers.{LAST}.", f"model.layers.{LAST + 1}."
    behind = {name.replace(layer, spare): w for name, w in weights.items() if name.startswith(layer)}
    behind = {name: w * rng.uniform(0.5, 1.5, w.shape).astype(np.float32) for name, w in behind.items()}
    behind |= {
        f"{spare}{name}.weight": 1 + rng.standard_normal(H).astype(np.float32) / 4
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    behind[f"{spare}eh_proj.weight"] = rng.standard_normal((H, 2 * H)).astype(np.float32) / 8
    shared = {
        f"{spare}embed_tokens.weight": weights["model.embed_tokens.weight"],
        f"{spare}shared_head.head.weight": weights["lm_head.weight"],
    }
    save_file({**weights, **behind, **shared}, folder / "model.safetensors")
    return folder


class Oracle:
    def __init__(self, directory):
        checkpoint = open_checkpoint(directory)
        self.w = {name: np.float64(checkpoint.tensor(name)) for name in checkpoint.entries}
        # The layer as the last of a model.
        config = goldens.load(directory)[0]
        deeper = dataclasses.replace(config, layers=(*config.layers, config.layers[-1]), num_spare_layers=0)
        names = [f"model.layers.{LAST + 1}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")]
        deeper = dataclasses.replace(deeper, names=dataclasses.replace(deeper.names, ignored=tuple(names)))
        model = build_model(deeper)
        state = load_weights(deeper, model, directory, load_format="auto", mesh=make_mesh(1))
        graph = nnx.graphdef(model)

        @jax.jit
        def layer(state, x_TD):
            model = nnx.merge(graph, state)
            step, block = dense_step(jnp.zeros(MAX_LENGTH, jnp.int32), jnp.arange(MAX_LENGTH)), model.blocks[-1]
            return block([(x_TD, block.attention_norm(x_TD))], model.norm, step)[0][0]

        self.padded_layer, self.state = layer, state

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.w[f"model.layers.{LAST + 1}.{name}.weight"]

    def drafts(self, tokens, hidden, count):
        states, tokens = list(np.float64(hidden)), list(tokens)
        for _ in range(count):
            embedded = self.norm(self.w["model.embed_tokens.weight"][tokens[1:]], "enorm")
            joined = np.concatenate([embedded, self.norm(np.stack(states), "hnorm")], -1)
            x = joined @ self.w[f"model.layers.{LAST + 1}.eh_proj.weight"].T
            states.append(self.norm(self.layer(x)[-1], "shared_head.norm"))
            tokens.append(int(np.argmax(self.w["lm_head.weight"] @ states[-1])))
        return tokens[-count:]

    def layer(self, x):
        """After it; x: of the whole sequence."""
        found = self.padded_layer(self.state, np.pad(np.float32(x), ((0, MAX_LENGTH - len(x)), (0, 0))))
        return np.float64(found[: len(x)])


def test_drafts_are_those_of_the_layer_alone(directory):
    size = 2
    split, split_state = goldens.load(directory, tensor_parallel_size=size)
    drafter = mtp.make(directory, split, num_drafts=2)
    assert drafter.num_lookahead == 1 and drafter.feature_layers == ()
    states, oracle = target_hidden_states(*goldens.load(directory), ()), Oracle(directory)
    rng = np.random.default_rng(1)
    a, b = (Sequence(rng.integers(0, V, n).tolist()) for n in (7, 3))
    engine = ByHand(drafter, split, split_state, states, [a, b], size)

    def check(found: np.ndarray, *sequences: Sequence) -> None:
        for drafts, sequence in zip(found, engine.sequences, strict=True):
            if any(sequence is s for s in sequences):
                assert drafts.tolist() == oracle.drafts(sequence.tokens, states(sequence.tokens[:-1])[0], 2)

    check(engine.step([a.tokens[:5], b.tokens], num_right=[5, 3], drawn=[None, 17]), b)
    check(engine.step([a.tokens[5:], [17, 3, 4, 5]], num_right=[2, 2], drawn=[99, 6]), a, b)
    own = [[s.tokens[-1], *rng.integers(0, V, 3).tolist()] for s in engine.sequences]
    check(engine.step(own, num_right=[1, 4], drawn=[13, 14]), a, b)


def test_a_target_without_the_layer_is_refused(tmp_path):
    target = goldens.load(goldens.FOLDER / "llama_gqa")[0]
    with pytest.raises(ConfigError, match="llama_gqa .LlamaForCausalLM. has no layers for multi-token prediction"):
        mtp.make(goldens.FOLDER / "llama_gqa", target, num_drafts=1)
    with pytest.raises(ConfigError, match="load_format is orbax, whose checkpoints have no layers for multi-token prediction"):
        mtp.make(GOLDEN, goldens.load(GOLDEN)[0], load_format="orbax")
    target = goldens.load(GOLDEN)[0]  # its config.json has the layer, its weights have not
    with pytest.raises(ModelLoadError, match=r"missing: model.layers.3.eh_proj.weight, model.layers.3.enorm.weight"):
        mtp.make(GOLDEN, target, num_drafts=1).load(make_mesh(1), SILENT)
    assert json.loads((GOLDEN / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_random_weights_have_the_shapes_of_the_layer(directory):
    config = goldens.load(directory, tensor_parallel_size=2)[0]
    shapes = []
    for load_format in ("dummy", "auto"):
        state = mtp.make(directory, config, num_drafts=1, load_format=load_format).load(make_mesh(2), SILENT)
        shapes.append([leaf.shape for _, leaf in nnx.to_flat_state(state)])
    assert shapes[0] == shapes[1]
