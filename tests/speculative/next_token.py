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


def of_module(name: str, module: int) -> str:
    """A name in a module, from that in the first."""
    counted = r"(mtp\.layers|mtp_block|mtp_emb_norm|mtp_hidden_norm|mtp_linear_proj|model\.layers)\.(\d+)"
    return re.sub(counted, lambda found: f"{found[1]}.{int(found[2]) + module}", name)


def write(spelling: Spelling, folder: Path, count: int = 1, **values: object) -> Path:
    """The family's tiny model with random weights, and modules whose layers have their own values."""
    from scripts.tiny_configs import VARIANTS

    raw = {
        **VARIANTS[spelling.config].to_dict(),
        "num_nextn_predict_layers": count,
        "dtype": "float32",
        **spelling.values,
        **values,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    config, state = goldens.load(folder, load_format="dummy")
    goldens.save(config, state, folder, folder)
    checkpoint, rng = open_checkpoint(folder), np.random.default_rng(4)
    weights = {name: np.float32(checkpoint.tensor(name)) for name in checkpoint.entries}
    weights = {
        name: w + rng.standard_normal(w.shape, np.float32) * (0.3 if w.ndim == 1 else 0.1) for name, w in weights.items()
    }
    behind, width = {}, config.hidden_size
    for module in range(count):
        behind |= {
            re.sub(f"^{old}", of_module(new, module), name): w * rng.uniform(0.5, 1.5, w.shape).astype(np.float32)
            for old, new in spelling.copied.items()
            for name, w in weights.items()
            if re.match(old, name)
        }
        first, second, joined, last = (of_module(name, module) for name in spelling.names)
        for name in (first, second, last):
            behind[f"{name}.weight"] = 1 + rng.standard_normal(width, np.float32) / 4
        behind[f"{joined}.weight"] = rng.standard_normal((width, 2 * width), np.float32) / 4
    save_file({**weights, **behind}, folder / "model.safetensors")
    return folder


class ModuleOracle:
    """A module in float64, but for what its layers are, which dense attention computes."""

    def __init__(self, spelling: Spelling, directory: Path, module: int = 0):
        checkpoint = open_checkpoint(directory)
        self.names = tuple(of_module(name, module) for name in spelling.names)
        layer = of_module(spelling.layer, module) if module == 0 else of_module(spelling.layer.format(0), module)
        self.w = {name: np.float64(checkpoint.tensor(name)) for name in checkpoint.entries}
        config = load_model_config(directory)
        self.config = config
        layers = config.next_token.layers or config.layers[-1:]
        others = {f"{config.layer_name(i)}." for i in range(len(config.layers) + config.num_spare_layers)}
        ignored = (*(others - {f"{layer}."}), *config.names.ignored, "model.mtp", *self.names)
        names = dataclasses.replace(config.names, layer=layer, ignored=ignored)
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

    def forward(self, token_ids, states):
        """Hidden states [T, D] of tokens and what the module takes with each."""
        first, second, joined, last = self.names
        inputs = [self.norm(self.w[f"{self.config.names.embedding}.weight"][token_ids], first), self.norm(states, second)]
        x = np.concatenate(inputs, -1) @ self.w[f"{joined}.weight"].T
        x = self.padded_layers(self.state, np.pad(np.float32(x), ((0, MAX_LENGTH - len(x)), (0, 0))))[: len(x)]
        return self.norm(np.float64(x), last)

    def likeliest(self, state):
        names = self.config.names
        head = self.w[f"{names.embedding if self.config.tie_word_embeddings else names.head}.weight"]
        return int(np.argmax(head @ state))

    def drafts(self, tokens: list[int], hidden_states: HiddenStates, count: int) -> list[int]:
        """After these tokens."""
        return in_turn([self], tokens, hidden_states, count, chains=True)


def in_turn(modules, tokens: list[int], hidden_states: HiddenStates, count: int, *, chains: bool) -> list[int]:
    """Drafts of several modules after these tokens, from the beginning of the sequence each time; those beyond are of the last one.

    chains: a module takes what the one before it leaves, else the model's hidden states.
    """
    states, tokens = np.float64(hidden_states(tokens[:-1])[0]), list(tokens)
    for draft in range(count):
        module = modules[min(draft, len(modules) - 1)]
        left = module.forward(tokens[1 + min(draft, len(modules) - 1) :], states)
        tokens.append(module.likeliest(left[-1]))
        if draft >= len(modules) - 1:
            states = np.concatenate([states, left[-1:]])
        elif chains:
            states = left
    return tokens[-count:]
