"""Checkpoints of families whose layers for multi-token prediction have other names or parts than DeepSeek's, and their drafts in NumPy.

No library has these modules: names and order are those of the checkpoints and of vLLM's description, Ernie's last norm that of FastDeploy.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from tests.helpers import goldens
from tests.speculative.by_hand import MAX_LENGTH, HiddenStates


@dataclass(frozen=True)
class Spelling:
    """Names of the tensors of a module in a family's checkpoints."""

    config: str
    """The family's tiny config."""
    copied: Mapping[str, str]
    """How the names of a layer's tensors begin in the module, by how those of a layer of the model do that is like it; regular
    expressions."""
    layer: str
    names: tuple[str, str, str, str]
    """Norms of the embedding and of the hidden state, the product that joins them, the last norm."""
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further values of config.json."""


def _around(first: str, last: str) -> tuple[str, str, str, str]:
    return (f"{first}.enorm", f"{first}.hnorm", f"{first}.eh_proj", last)


SPELLINGS = {
    "nemotron_h": Spelling(
        "nemotron_h",
        {r"backbone\.layers\.2\.": "mtp.layers.0.", r"backbone\.layers\.3\.": "mtp.layers.1."},
        "mtp.layers.{}",
        _around("mtp.layers.0", "mtp.layers.1.final_layernorm"),
        values={"mtp_layers_block_type": ["attention", "moe"]},
    ),
    "mimo_v2_flash": Spelling(
        "mimo_v2_flash",
        {
            r"model\.layers\.1\.(?=self_attn|input_layernorm)": "model.mtp.layers.0.",
            r"model\.layers\.0\.(?=mlp)": "model.mtp.layers.0.",
            r"model\.layers\.1\.post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm",
        },
        "model.mtp.layers.{}",
        _around("model.mtp.layers.0", "model.mtp.layers.0.final_layernorm"),
    ),
    "hy_v3": Spelling(
        "hy_v3",
        {r"model\.layers\.2\.": "model.layers.3."},
        "model.layers.3",
        _around("model.layers.3", "model.layers.3.final_layernorm"),
    ),
    "bailing": Spelling(
        "sarvam_moe",
        {r"model\.layers\.2\.": "model.layers.3."},
        "model.layers.3",
        _around("model.layers.3", "model.layers.3.final_layernorm"),
    ),
    "ernie4_5_moe": Spelling(
        "ernie4_5_moe",
        {r"model\.layers\.0\.": "model.mtp_block.0."},
        "model.mtp_block.{}",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "model.norm"),
    ),
}


def write(spelling: Spelling, folder: Path) -> Path:
    """The family's tiny model with random weights, and a module whose layers have their own values."""
    from scripts.tiny_configs import VARIANTS

    raw = {**VARIANTS[spelling.config].to_dict(), "num_nextn_predict_layers": 1, "dtype": "float32", **spelling.values}
    (folder / "config.json").write_text(json.dumps(raw))
    config, state = goldens.load(folder, load_format="dummy")
    goldens.save(config, state, folder, folder)
    checkpoint, rng = open_checkpoint(folder), np.random.default_rng(4)
    weights = {name: np.float32(checkpoint.tensor(name)) for name in checkpoint.entries}
    weights = {
        name: w + rng.standard_normal(w.shape, np.float32) * (0.3 if w.ndim == 1 else 0.1) for name, w in weights.items()
    }
    behind = {
        re.sub(f"^{old}", new, name): w * rng.uniform(0.5, 1.5, w.shape).astype(np.float32)
        for old, new in spelling.copied.items()
        for name, w in weights.items()
        if re.match(old, name)
    }
    first, second, joined, last = spelling.names
    width = config.hidden_size
    for name in (first, second, last):
        behind[f"{name}.weight"] = 1 + rng.standard_normal(width, np.float32) / 4
    behind[f"{joined}.weight"] = rng.standard_normal((width, 2 * width), np.float32) / 4
    save_file({**weights, **behind}, folder / "model.safetensors")
    return folder


class ModuleOracle:
    """The module in float64, but for what its layers are, which dense attention computes."""

    def __init__(self, spelling: Spelling, directory: Path):
        self.spelling, checkpoint = spelling, open_checkpoint(directory)
        self.w = {name: np.float64(checkpoint.tensor(name)) for name in checkpoint.entries}
        config = load_model_config(directory)
        self.config = config
        layers = config.next_token.layers or config.layers[-1:]
        ignored = tuple({f"{config.layer_name(i)}." for i in range(len(config.layers))} - {f"{spelling.layer}."})
        names = dataclasses.replace(
            config.names, layer=spelling.layer, ignored=(*ignored, *config.names.ignored, *spelling.names)
        )
        alone = dataclasses.replace(config, layers=layers, names=names, num_spare_layers=0)
        model = build_model(alone)
        self.state = load_weights(alone, model, directory, load_format="auto", mesh=make_mesh(1))
        graph = nnx.graphdef(model)

        @jax.jit
        def layers_of(state, x_TD):
            model = nnx.merge(graph, state)
            step = dense_step(jnp.zeros(MAX_LENGTH, jnp.int32), jnp.arange(MAX_LENGTH))
            runs = [(x_TD, model.blocks[0].first_norm(x_TD))]
            for block, norm in zip(
                model.blocks, [*(block.first_norm for block in list(model.blocks)[1:]), model.norm], strict=True
            ):
                runs = block(runs, norm, step)
            return runs[0][0]

        self.padded_layers = layers_of

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm.eps) * self.w[f"{name}.weight"]

    def drafts(self, tokens: list[int], hidden_states: HiddenStates, count: int) -> list[int]:
        """After these tokens."""
        first, second, joined, last = self.spelling.names
        names, states, tokens = self.config.names, list(np.float64(hidden_states(tokens[:-1])[0])), list(tokens)
        embedding = self.w[f"{names.embedding}.weight"]
        head = embedding if self.config.tie_word_embeddings else self.w[f"{names.head}.weight"]
        for _ in range(count):
            inputs = [self.norm(embedding[tokens[1:]], first), self.norm(np.stack(states), second)]
            x = np.concatenate(inputs, -1) @ self.w[f"{joined}.weight"].T
            x = self.padded_layers(self.state, np.pad(np.float32(x), ((0, MAX_LENGTH - len(x)), (0, 0))))[len(x) - 1]
            states.append(self.norm(np.float64(x), last))
            tokens.append(int(np.argmax(head @ states[-1])))
        return tokens[-count:]
