"""EAGLE heads against float64 NumPy, in steps as an engine makes them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.layout import parameters
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.speculative import eagle
from tests.helpers import goldens
from tests.speculative.by_hand import MAX_LENGTH, ByHand, Sequence, target_hidden_states

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


def tensors(*, is_third: bool, layer: str = "midlayer", draft_vocab: int = DRAFT_V, **others) -> dict[str, np.ndarray]:
    """A random head."""
    rng = np.random.default_rng(3)
    inputs, norms = (2 * H, ("input_layernorm", "hidden_norm")) if is_third else (H, ())
    shapes = {
        "fc.weight": (H, len(LAYERS) * H if is_third else 2 * H),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (MLP, H),
        f"{layer}.mlp.up_proj.weight": (MLP, H),
        f"{layer}.mlp.down_proj.weight": (H, MLP),
        **{f"{layer}.{norm}.weight": (H,) for norm in (*norms, "post_attention_layernorm")},
    }
    if is_third:
        shapes |= {"norm.weight": (H,), "lm_head.weight": (draft_vocab, H)}
    found = {name: rng.standard_normal(shape) * 2 / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    found |= {name: 1 + 0.3 * rng.standard_normal(H) for name, shape in shapes.items() if len(shape) == 1}
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


class Oracle:
    """The head in float64, from the beginning of the sequence each time."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict):
        self.w = {name.removeprefix("midlayer.").removeprefix("layers.0."): np.float64(w) for name, w in weights.items()}
        self.config, self.is_third = config, "norm.weight" in weights
        target = open_checkpoint(TARGET)
        self.embedding = self.w.get("embed_tokens.weight", np.float64(target.tensor("model.embed_tokens.weight")))
        self.head = self.w.get("lm_head.weight", np.float64(target.tensor("lm_head.weight")))

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.w[f"{name}.weight"]

    def drafts(self, tokens: list[int], hidden, num_drafts: int, noise=None) -> list[int]:
        """After these tokens; hidden: of all but the last."""
        states = [h @ self.w["fc.weight"].T for h in hidden] if self.is_third else list(hidden)
        tokens, drafts = list(tokens), []
        for _ in range(num_drafts):
            out, state = self.forward(self.embedding[tokens[1:]], np.stack(states))
            logits = np.full(V, -np.inf)
            ids = np.arange(len(self.head)) + self.w.get("d2t", np.zeros(len(self.head))).astype(int)
            logits[ids] = self.head @ out
            drafts.append(int(np.argmax(logits + (0 if noise is None else noise[len(tokens)]))))
            tokens.append(drafts[-1])
            states.append(state)
        return drafts

    def forward(self, e, h):
        """Of the last token: what logits are of, and its hidden state."""
        w = self.w
        if self.is_third:
            normed = self.norm(h, "hidden_norm")
            x = normed if self.config.get("norm_before_residual") else h
            inputs = np.concatenate([self.norm(e, "input_layernorm"), normed], -1)
        else:
            x = inputs = np.concatenate([e, h], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        length = len(x)
        q, k, v = ((inputs @ w[f"self_attn.{n}_proj.weight"].T).reshape(length, -1, HEAD_DIM) for n in "qkv")
        angle = np.arange(length)[:, None] / 5000.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        q, k = (turned(x, angle[:, None]) for x in (q, k))
        k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = np.einsum("nh,snh->ns", q[-1], k) / np.sqrt(HEAD_DIM)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("ns,snh->nh", share / share.sum(-1, keepdims=True), v).ravel()
        x = x[-1] + out @ w["self_attn.o_proj.weight"].T
        y = self.norm(x, "post_attention_layernorm")
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return (self.norm(x, "norm") if self.is_third else x), x


def turned(x, angle):
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1)


def run_and_compare(drafter, oracle: Oracle, size: int = 1, noise: np.ndarray | None = None) -> None:
    config, state = goldens.load(TARGET)
    split, split_state = goldens.load(TARGET, tensor_parallel_size=size)
    states = target_hidden_states(config, state, drafter.feature_layers)
    rng = np.random.default_rng(1)
    a, b = (Sequence(rng.integers(0, V, n).tolist()) for n in (7, 3))
    engine = ByHand(drafter, split, split_state, states, [a, b], size, noise)

    def check(found: np.ndarray, sequences: list[Sequence]) -> None:
        for drafts, sequence in zip(found, engine.sequences, strict=True):
            if any(sequence is s for s in sequences):
                hidden, features = states(sequence.tokens[:-1])
                given = np.concatenate(features, -1) if drafter.feature_layers else hidden
                expected = oracle.drafts(sequence.tokens, np.float64(given), drafter.num_drafts, noise)
                assert drafts.tolist() == expected

    check(engine.step([a.tokens[:5], b.tokens], num_right=[5, 3], drawn=[None, 17]), [b])
    check(engine.step([a.tokens[5:], [17, 3, 4, 5]], num_right=[2, 2], drawn=[99, 6]), [a, b])
    for right, drawn in (([4, 1], [11, 12]), ([1, 4], [13, 14]), ([2, 3], [15, 16])):
        own = [[s.tokens[-1], *rng.integers(0, V, 3).tolist()] for s in engine.sequences]
        check(engine.step(own, num_right=right, drawn=drawn), [a, b])


THIRD = tensors(is_third=True)
FIRST = tensors(is_third=False, layer="layers.0")
EMBEDDING = np.random.default_rng(5).standard_normal((V, H)).astype(np.float32)


@pytest.mark.parametrize(
    ("config", "weights", "size", "is_drawn"),
    [
        (CONFIG_3, THIRD, 1, False),
        (CONFIG_3, THIRD, 2, True),
        (
            {**CONFIG_3, "draft_vocab_size": None, "norm_before_residual": True, "architectures": ["LlamaForCausalLMEagle3"]},
            tensors(is_third=True, layer="layers.0", draft_vocab=V, **{"embed_tokens.weight": EMBEDDING}),
            4,
            False,
        ),
        ({**CONFIG, "bias": True}, {**FIRST, "fc.bias": THIRD["norm.weight"]}, 1, True),
        (CONFIG, {**FIRST, "lm_head.weight": EMBEDDING, "embed_tokens.weight": EMBEDDING[::-1].copy()}, 2, False),
    ],
    ids=["eagle3", "eagle3 tp2 drawn", "eagle3 whole vocabulary tp4", "eagle drawn", "eagle own head tp2"],
)
def test_drafts_are_those_of_the_head_alone(tmp_path, config, weights, size, is_drawn):
    directory = write(tmp_path / "head", config, weights)
    target = goldens.load(TARGET, tensor_parallel_size=size)[0]
    options = {"num_drafts": 3, "is_drawn": is_drawn, "tensor_parallel_size": size}
    drafter = eagle.make(directory, target, is_third="norm.weight" in weights, **options)
    assert drafter.num_lookahead == 2 and len(drafter.feature_layers) == (3 if "norm.weight" in weights else 0)
    noise = np.random.default_rng(9).gumbel(size=(MAX_LENGTH, V)) * 3 if is_drawn else None
    run_and_compare(drafter, Oracle(weights, config), size, noise)


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        ({"vocab_size": 100}, {}, "vocab_size is 100, must be the target's 128"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, supported: 1"),
        ({"eagle_config": {"norm_before_fc": True}}, {}, "norm_before_fc is True, supported: False"),
        ({"target_hidden_size": 32}, {}, "target_hidden_size is 32, the target's hidden_size is 64"),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            {},
            r"layer_ids is \[2, 1, -1\], must be a list of layers of the target, 0 to 2",
        ),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, {}, "DeepseekV3ForCausalLM"),
        (
            {},
            {"fc.weight": np.zeros((H, 2 * H), np.float32)},
            r"fc.weight in .* is \[64, 128\], must be \[64, 192\] for 3 hidden states",
        ),
        ({}, {"d2t": THIRD["d2t"] + 90}, "d2t in .* gives the token ids .*, must be those of the target's 128 tokens"),
        ({}, {"d2t": None}, "d2t in .* is missing, must be 40 integers"),
        ({}, {"midlayer.hidden_norm.weight": None}, "1 missing: midlayer.hidden_norm.weight"),
        ({}, {"norm.weight": np.zeros(32, np.float32)}, r"norm.weight is \[32\], must be \[64\]"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            {},
            "the draft head .*: tensor_parallel_size is 2",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_names_and_sizes(tmp_path, config, weights, told):
    weights = {name: value for name, value in {**THIRD, **weights}.items() if value is not None}
    directory = write(tmp_path / "head", {**CONFIG_3, **config}, weights)
    target = goldens.load(TARGET, tensor_parallel_size=2)[0]
    with pytest.raises((ConfigError, ModelLoadError), match=told):
        eagle.make(directory, target, is_third=True, num_drafts=3, tensor_parallel_size=2).load(make_mesh(2), SILENT)


def test_random_weights_have_the_shapes_of_a_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_3))
    target = goldens.load(TARGET, tensor_parallel_size=2)[0]
    options = {"num_drafts": 2, "tensor_parallel_size": 2}
    dummy = eagle.make(tmp_path, target, is_third=True, load_format="dummy", **options)
    real = eagle.make(write(tmp_path / "head", CONFIG_3, THIRD), target, is_third=True, **options)
    found, expected = ({path: leaf.shape for path, leaf in parameters(d.load(make_mesh(2), SILENT))} for d in (dummy, real))
    assert found == expected
