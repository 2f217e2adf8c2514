"""An EAGLE-3 head in float64 NumPy, read from its published form: the oracle of everything that computes or trains one."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class Eagle3:
    """One sequence at a time: `forward` adds to the keys and values of what it computed before."""

    def __init__(self, directory: Path, embedding_VD: np.ndarray):
        """embedding_VD: the target's, which the head shares."""
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.feature_layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        tensors = load_file(directory / "model.safetensors")
        self.offsets = tensors.pop("d2t")
        self.can_draft = tensors.pop("t2d")
        self.weights = {name.removesuffix(".weight"): tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.embedding_VD = np.asarray(embedding_VD, np.float64)
        self.forget()

    def forget(self) -> None:
        """Begin another sequence."""
        H = self.config["head_dim"]
        self.keys = self.values = np.zeros((0, self.config["num_key_value_heads"], H))

    def fuse(self, features_TF: np.ndarray) -> np.ndarray:
        """The first hidden states of positions from what enters the target's layers there, joined."""
        return np.asarray(features_TF, np.float64) @ self.weights["fc"].T

    def forward(self, hidden_TD: np.ndarray, next_ids_T: np.ndarray) -> np.ndarray:
        """The hidden states after the next positions of the sequence. next_ids_T: the token after each of these positions."""
        T, H = len(hidden_TD), self.config["head_dim"]
        positions_T = len(self.keys) + np.arange(T)
        x = np.concatenate(
            [
                self._norm(self.embedding_VD[next_ids_T], "midlayer.input_layernorm"),
                self._norm(hidden_TD, "midlayer.hidden_norm"),
            ],
            axis=1,
        )
        q, k, v = ((x @ self.weights[f"midlayer.self_attn.{name}_proj"].T).reshape(T, -1, H) for name in "qkv")
        self.keys = np.concatenate([self.keys, self._rotate(k, positions_T)])
        self.values = np.concatenate([self.values, v])
        groups = q.shape[1] // k.shape[1]
        scores = np.einsum("tnh,snh->nts", self._rotate(q, positions_T), np.repeat(self.keys, groups, axis=1)) / np.sqrt(H)
        scores = np.where(np.arange(len(self.keys)) <= positions_T[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", weights, np.repeat(self.values, groups, axis=1)).reshape(T, -1)
        hidden_TD = hidden_TD + attended @ self.weights["midlayer.self_attn.o_proj"].T
        normed = self._norm(hidden_TD, "midlayer.post_attention_layernorm")
        gate, up = (normed @ self.weights[f"midlayer.mlp.{name}_proj"].T for name in ("gate", "up"))
        return hidden_TD + (gate / (1 + np.exp(-gate)) * up) @ self.weights["midlayer.mlp.down_proj"].T

    def logits(self, hidden_TD: np.ndarray) -> np.ndarray:
        """[T, draft vocabulary]."""
        return self._norm(hidden_TD, "norm") @ self.weights["lm_head"].T

    def token_ids(self, draft_ids: np.ndarray) -> np.ndarray:
        """The target's ids of ids of the draft vocabulary."""
        return draft_ids + self.offsets[draft_ids]

    def drafts(self, features_TF: np.ndarray, next_ids_T: np.ndarray, num_drafts: int) -> list[int]:
        """The tokens that the head expects, greedily, after the last of next_ids_T.

        features_TF: of all tokens of a sequence but the last. next_ids_T: all tokens but the first.
        """
        self.forget()
        hidden_TD = self.forward(self.fuse(features_TF), np.asarray(next_ids_T))
        drafts: list[int] = []
        while True:
            drafts.append(int(self.token_ids(np.argmax(self.logits(hidden_TD[-1:]), axis=1))[0]))
            if len(drafts) == num_drafts:
                return drafts
            hidden_TD = self.forward(hidden_TD[-1:], np.array(drafts[-1:]))

    def _norm(self, x_TD: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x_TD * x_TD, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x_TD / scale * self.weights[name]

    def _rotate(self, x_TNH: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
        first, second = np.split(x_TNH, 2, axis=-1)
        half = first.shape[-1]
        angles = positions_T[:, None, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
