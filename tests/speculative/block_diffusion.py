"""A random head of block diffusion, and its drafts in float64 NumPy, from the beginning of the sequence each time."""

import numpy as np

from jaxllm.loaders.formats import open_checkpoint
from tests.speculative.by_hand import HiddenStates
from tests.speculative.checkpoints import CONFIG as LLAMA
from tests.speculative.checkpoints import DRAFT_V, HEAD_DIM, TARGET, H, V, attended, layer_shapes, mlp, rms, turned

WINDOW, NUM_LAYERS = 5, 2
CONFIG = {
    **LLAMA,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "head_dim": HEAD_DIM,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "dflash_config": {"target_layer_ids": [0], "mask_token_id": 127},
}


def head_tensors(*, draft_vocab: int = V, seed: int = 6) -> dict[str, np.ndarray]:
    """A head over one of the target's vectors, or over two with a separate vocabulary."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, H if draft_vocab == V else 2 * H), "hidden_norm.weight": (H,)}
    shapes["norm.weight"] = (H,)
    for layer in range(NUM_LAYERS):
        shapes |= layer_shapes(f"layers.{layer}", H, "input_layernorm")
        shapes |= {f"layers.{layer}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    if draft_vocab != V:
        shapes["lm_head.weight"] = (draft_vocab, H)
    found = {name: rng.standard_normal(shape) * 2 / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    found |= {name: 1 + 0.3 * rng.standard_normal(shape) for name, shape in shapes.items() if len(shape) == 1}
    values = {name: value.astype(np.float32) for name, value in found.items()}
    if draft_vocab != V:
        ids = np.sort(rng.choice(V, DRAFT_V, replace=False))
        values["d2t"] = ids - np.arange(DRAFT_V)
    return values


class BlockOracle:
    """The head in float64."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict):
        self.w, target = {name: np.float64(w) for name, w in weights.items()}, open_checkpoint(TARGET)
        self.embedding = np.float64(target.tensor("model.embed_tokens.weight"))
        self.head = self.w.get("lm_head.weight", np.float64(target.tensor("lm_head.weight")))
        self.kinds = config.get("layer_types", ["full_attention"] * NUM_LAYERS)
        self.mask = {**config, **config.get("dflash_config", {})}["mask_token_id"]

    def drafts(self, tokens: list[int], hidden_states: HiddenStates, num_drafts: int, noise=None) -> list[int]:
        """After these tokens. noise: [positions, vocabulary], added to logits."""
        _, features = hidden_states(tokens[:-1])
        context = rms(np.concatenate(features, -1) @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        x = self.embedding[[tokens[-1], *[self.mask] * num_drafts]]
        for layer, kind in enumerate(self.kinds):
            prefix = f"layers.{layer}."
            own = {name.removeprefix(prefix): w for name, w in self.w.items() if name.startswith(prefix)}
            x = self.layer(x, context, own, is_windowed=kind == "sliding_attention")
        logits = np.full((num_drafts, V), -np.inf)
        ids = np.arange(len(self.head)) + self.w.get("d2t", np.zeros(len(self.head))).astype(int)
        logits[:, ids] = rms(x[1:], self.w["norm.weight"]) @ self.head.T
        if noise is not None:
            logits += noise[len(tokens) : len(tokens) + num_drafts]
        return logits.argmax(-1).tolist()

    def layer(self, x, context, w, *, is_windowed: bool):
        y = rms(x, w["input_layernorm.weight"])
        inputs, first = np.concatenate([context, y]), len(context)
        q, k, v = ((inputs @ w[f"self_attn.{n}_proj.weight"].T).reshape(len(inputs), -1, HEAD_DIM) for n in "qkv")
        position = np.arange(len(inputs))
        angle = position[:, None] / 5000.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        q, k = (turned(rms(z, w[f"self_attn.{n}_norm.weight"]), angle[:, None]) for n, z in (("q", q), ("k", k)))
        behind = position[first:, None] - position
        sees = (behind >= 0) & (behind < WINDOW) if is_windowed else np.ones(behind.shape, bool)
        x = x + attended(q[first:], k, v, sees) @ w["self_attn.o_proj.weight"].T
        return x + mlp(rms(x, w["post_attention_layernorm.weight"]), w)
