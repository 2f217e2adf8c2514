"""Random checkpoints of drafters, and their drafts computed another way, from the beginning of the sequence each time."""

import dataclasses
import json
import shutil
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
from jaxllm.parallel.mesh import make_mesh
from tests.helpers import goldens
from tests.speculative.by_hand import MAX_LENGTH, HiddenStates

MTP_TARGET, LAST = goldens.FOLDER / "deepseek_v3", 2
H, V, DRAFT_V, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 128, 40, 8, 2, 8, 48
TARGET = goldens.FOLDER / "llama_gqa"
LAYERS = (0, 1, 2)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 16,
    "hidden_act": "silu",
}
CONFIG_3 = {**CONFIG, "draft_vocab_size": DRAFT_V, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}


def layer_shapes(layer: str, inputs: int, *norms: str) -> dict[str, tuple[int, ...]]:
    """Weights of a layer with this name whose attention takes so many values."""
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (MLP, H),
        f"{layer}.mlp.up_proj.weight": (MLP, H),
        f"{layer}.mlp.down_proj.weight": (H, MLP),
        **{f"{layer}.{norm}.weight": (H,) for norm in (*norms, "post_attention_layernorm")},
    }


def head_tensors(
    *,
    is_third: bool,
    layer: str = "midlayer",
    draft_vocab: int = DRAFT_V,
    num_layers: int = 1,
    norms: dict[str, int] | None = None,
    **others,
) -> dict[str, np.ndarray]:
    """A random head. norms: widths of those of the target's vectors, by name."""
    rng = np.random.default_rng(3)
    inputs, of_layer = (2 * H, ("input_layernorm", "hidden_norm")) if is_third else (H, ())
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, len(LAYERS) * H if is_third else 2 * H)}
    shapes |= layer_shapes(layer, inputs, *of_layer)
    for later in range(1, num_layers):
        shapes |= layer_shapes(f"layers.{later}", H, "input_layernorm")
    shapes |= {f"{name}.weight": (width,) for name, width in (norms or {}).items()}
    if is_third:
        shapes |= {"norm.weight": (H,), "lm_head.weight": (draft_vocab, H)}
    found = {name: rng.standard_normal(shape) * 2 / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    found |= {name: 1 + 0.3 * rng.standard_normal(shape) for name, shape in shapes.items() if len(shape) == 1}
    values = {name: value.astype(np.float32) for name, value in found.items()}
    if is_third and draft_vocab != V:
        ids = np.sort(rng.choice(V, draft_vocab, replace=False))
        values["d2t"] = ids - np.arange(draft_vocab)
        values["t2d"] = np.isin(np.arange(V), ids)
    return {**values, **others}


def write(directory: Path, config: dict, weights: dict[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


class EagleOracle:
    """The head in float64, from the beginning of the sequence each time."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict):
        self.w = {name.removeprefix("midlayer.").removeprefix("layers.0."): np.float64(w) for name, w in weights.items()}
        self.config, self.is_third = config, "norm.weight" in weights
        target = open_checkpoint(TARGET)
        self.embedding = self.w.get("embed_tokens.weight", np.float64(target.tensor("model.embed_tokens.weight")))
        self.head = self.w.get("lm_head.weight", np.float64(target.tensor("lm_head.weight")))

    def norm(self, x, name):
        return rms(x, self.w[f"{name}.weight"])

    def drafts(self, tokens: list[int], hidden_states: HiddenStates, num_drafts: int, noise=None) -> list[int]:
        """After these tokens. noise: [positions, vocabulary], added to logits."""
        hidden, features = hidden_states(tokens[:-1])
        states = list(self.fused(features)) if self.is_third else list(np.float64(hidden))
        tokens, drafts = list(tokens), []
        for _ in range(num_drafts):
            out, state = self.forward(self.embedding[tokens[1:]], np.stack(states))
            logits = np.full(V, -np.inf)
            ids = np.arange(len(self.head)) + self.w.get("d2t", np.zeros(len(self.head))).astype(int)
            logits[ids] = self.head @ out
            drafts.append(int(np.argmax(logits + (0 if noise is None else noise[len(tokens)]))))
            tokens.append(drafts[-1])
            states.append(out if self.config.get("norm_output") else state)
        return drafts

    def fused(self, features):
        if self.config.get("fc_norm"):
            features = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(features)]
        x = np.concatenate(features, -1)
        return (self.norm(x, "input_norm") if self.config.get("norm_before_fc") else x) @ self.w["fc.weight"].T

    def forward(self, e, h):
        """The last token's input of the logits, and its hidden state."""
        w = self.w
        if self.is_third:
            normed = self.norm(h, "hidden_norm")
            x = normed if self.config.get("norm_before_residual") else h
            inputs = np.concatenate([self.norm(e, "input_layernorm"), normed], -1)
        else:
            x = inputs = np.concatenate([e, h], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        x = layer(x, inputs, self.w)
        for later in range(1, self.config.get("num_hidden_layers", 1)):
            prefix = f"layers.{later}."
            own = {name.removeprefix(prefix): w for name, w in self.w.items() if name.startswith(prefix)}
            x = layer(x, rms(x, own["input_layernorm.weight"]), own)
        return (self.norm(x, "norm") if self.is_third else x)[-1], x[-1]


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def layer(x, inputs, w):
    """x after a layer whose attention takes `inputs`."""
    length = len(x)
    q, k, v = ((inputs @ w[f"self_attn.{n}_proj.weight"].T).reshape(length, -1, HEAD_DIM) for n in "qkv")
    angle = np.arange(length)[:, None] / 5000.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    q, k = (turned(x, angle[:, None]) for x in (q, k))
    x = x + attended(q, k, v, np.tril(np.ones((length, length), bool))) @ w["self_attn.o_proj.weight"].T
    return x + mlp(rms(x, w["post_attention_layernorm.weight"]), w)


def attended(q, k, v, sees):
    """[queries, heads x width]; sees: [queries, keys]."""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->tns", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(sees[:, None], scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("tns,snh->tnh", share / share.sum(-1, keepdims=True), v).reshape(len(q), -1)


def mlp(y, w):
    gate = y @ w["mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def turned(x, angle):
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1)


def write_with_next_token_layer(folder: Path, target: Path = MTP_TARGET, index_of: int = LAST) -> Path:
    """The target with a layer behind the last, which has its own values. index_of: the layer whose index it has, if layers have some."""
    folder = shutil.copytree(target, folder / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    checkpoint, rng = open_checkpoint(target), np.random.default_rng(2)
    weights = {name: np.float32(checkpoint.tensor(name)) for name in checkpoint.entries}
    layer, spare, indexer = f"model.layers.{LAST}.", f"model.layers.{LAST + 1}.", f"model.layers.{index_of}.self_attn.indexer."
    behind = {name.replace(layer, spare): w for name, w in weights.items() if name.startswith(layer)}
    behind |= {name.replace(str(index_of), str(LAST + 1), 1): w for name, w in weights.items() if name.startswith(indexer)}
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


def write_with_next_token_layer_apart(folder: Path, golden: str = "qwen3_5") -> tuple[Path, Path]:
    """The golden of Qwen 3.5, with more tokens, and such a layer beside it, as its checkpoints have it; and the same with the names of
    DeepSeek's, for the oracle."""
    apart = shutil.copytree(goldens.FOLDER / golden, folder / "apart")
    raw = json.loads((apart / "config.json").read_text())
    (apart / "config.json").write_text(json.dumps({**raw, "vocab_size": V, "mtp_num_hidden_layers": 1}))
    checkpoint, rng = open_checkpoint(apart), np.random.default_rng(5)
    weights = {name: np.float32(checkpoint.tensor(name)) for name in checkpoint.entries}
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = np.concatenate([embedding, embedding[: V - len(embedding)][:, ::-1]])
    last, width = "model.layers.3.", embedding.shape[1]
    behind = {name.replace(last, "layers.0."): w for name, w in weights.items() if name.startswith(last)}
    behind = {name: w * rng.uniform(0.5, 1.5, w.shape).astype(np.float32) for name, w in behind.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        behind[f"{name}.weight"] = rng.standard_normal(width).astype(np.float32) / 4
    behind["fc.weight"] = rng.standard_normal((width, 2 * width)).astype(np.float32) / 4
    save_file({**weights, **{f"mtp.{name}": w for name, w in behind.items()}}, apart / "model.safetensors")
    named = {"layers.0.": "", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc.": "eh_proj."}

    def renamed(name: str) -> str:
        old, new = next(((old, new) for old, new in named.items() if name.startswith(old)), ("", "shared_head."))
        return f"model.layers.4.{new}{name.removeprefix(old)}"

    as_behind = shutil.copytree(apart, folder / "behind")
    save_file({**weights, **{renamed(name): w for name, w in behind.items()}}, as_behind / "model.safetensors")
    return apart, as_behind


class NextTokenOracle:
    """The layer in float64, but for what a layer of the target is, which dense attention computes.

    last: the target's last layer. offset: added to weights of norms. index_of: the layer of the target whose index it has.
    """

    def __init__(self, directory, last: int = LAST, offset: float = 0.0, index_of: int | None = None):
        self.prefix, self.offset = f"model.layers.{last + 1}", offset
        checkpoint = open_checkpoint(directory)
        self.w = {name: np.float64(checkpoint.tensor(name)) for name in checkpoint.entries}
        # The layer as the last of a model.
        config = goldens.load(directory)[0]
        own, self.eps = config.layers[-1], config.norm.eps
        if index_of is not None:
            own = dataclasses.replace(own, attention=config.layers[index_of].attention)
        deeper = dataclasses.replace(config, layers=(*config.layers, own), num_spare_layers=0)
        names = [f"{self.prefix}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")]
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
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * (self.w[f"{self.prefix}.{name}.weight"] + self.offset)

    def drafts(self, tokens: list[int], hidden_states: HiddenStates, count: int) -> list[int]:
        """After these tokens."""
        states, tokens = list(np.float64(hidden_states(tokens[:-1])[0])), list(tokens)
        for _ in range(count):
            embedded = self.norm(self.w["model.embed_tokens.weight"][tokens[1:]], "enorm")
            joined = np.concatenate([embedded, self.norm(np.stack(states), "hnorm")], -1)
            x = joined @ self.w[f"{self.prefix}.eh_proj.weight"].T
            states.append(self.norm(self.layer(x)[-1], "shared_head.norm"))
            tokens.append(int(np.argmax(self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]) @ states[-1])))
        return tokens[-count:]

    def layer(self, x):
        """After it; x: of the whole sequence."""
        found = self.padded_layer(self.state, np.pad(np.float32(x), ((0, MAX_LENGTH - len(x)), (0, 0))))
        return np.float64(found[: len(x)])
