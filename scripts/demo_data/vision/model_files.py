"""The files of the model beside its weights: config, tokenizer with chat template, settings of pictures."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .. import chat_tokenizer
from ..chat_tokenizer import END_OF_TEXT_ID, STOP_IDS
from .dialogues import IMAGE_PAD, PICTURE, training_dialogue
from .scenes import CELL, MAX_CELLS, MIN_CELLS

VISION_START, VISION_END, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
SPECIAL_TOKENS = (*chat_tokenizer.SPECIAL_TOKENS, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
"""Their ids are their places here."""
IMAGE_PAD_ID = SPECIAL_TOKENS.index(IMAGE_PAD)
VOCAB_SIZE = 2048

_TEXT_PART = "{%- elif part.text is defined -%}{{ part.text }}"
_IMAGE_PART = "{%- elif part.type in ('image', 'image_url') or part.image is defined -%}{{ '" + PICTURE + "' }}"
CHAT_TEMPLATE = chat_tokenizer.CHAT_TEMPLATE.replace(_TEXT_PART, _TEXT_PART + _IMAGE_PART)
"""The demo model's, in which a part of a message may also be a picture."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model: `Qwen3VLForConditionalGeneration` in small."""

    width: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    mlp_width: int = 640
    rope_theta: float = 10000.0
    rope_sections: tuple[int, int, int] = (12, 10, 10)
    """How many frequencies turn by time, row and column."""
    tower_width: int = 128
    tower_layers: int = 4
    tower_heads: int = 2
    tower_mlp_width: int = 384
    grid: int = 16
    """Rows, and columns, of the tower's learned positions."""
    deepstack: tuple[int, ...] = (1,)
    vocab_size: int = VOCAB_SIZE
    patch: int = CELL // 2
    merge: int = 2

    def config_json(self) -> dict[str, Any]:
        """The model as transformers describes it."""
        rope = {"rope_type": "default", "mrope_section": list(self.rope_sections), "mrope_interleaved": True}
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": IMAGE_PAD_ID,
            "video_token_id": SPECIAL_TOKENS.index(VIDEO_PAD),
            "vision_start_token_id": SPECIAL_TOKENS.index(VISION_START),
            "vision_end_token_id": SPECIAL_TOKENS.index(VISION_END),
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": list(STOP_IDS),
            "text_config": {
                "model_type": "qwen3_vl_text",
                "vocab_size": self.vocab_size,
                "hidden_size": self.width,
                "intermediate_size": self.mlp_width,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_width,
                "hidden_act": "silu",
                "max_position_embeddings": chat_tokenizer.MAX_LENGTH,
                "rms_norm_eps": 1e-6,
                "rope_theta": self.rope_theta,
                "rope_scaling": rope,
                "attention_bias": False,
                "tie_word_embeddings": True,
                "eos_token_id": list(STOP_IDS),
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": self.tower_layers,
                "hidden_size": self.tower_width,
                "hidden_act": "gelu_pytorch_tanh",
                "intermediate_size": self.tower_mlp_width,
                "num_heads": self.tower_heads,
                "in_channels": 3,
                "patch_size": self.patch,
                "spatial_merge_size": self.merge,
                "temporal_patch_size": 2,
                "out_hidden_size": self.width,
                "num_position_embeddings": self.grid**2,
                "deepstack_visual_indexes": list(self.deepstack),
            },
        }

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """The sizes that a config.json has."""
        text, vision = config["text_config"], config["vision_config"]
        return cls(
            width=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_width=text["head_dim"],
            mlp_width=text["intermediate_size"],
            rope_theta=text["rope_theta"],
            rope_sections=tuple(text["rope_scaling"]["mrope_section"]),
            tower_width=vision["hidden_size"],
            tower_layers=vision["depth"],
            tower_heads=vision["num_heads"],
            tower_mlp_width=vision["intermediate_size"],
            grid=round(vision["num_position_embeddings"] ** 0.5),
            deepstack=tuple(vision["deepstack_visual_indexes"]),
            vocab_size=text["vocab_size"],
            patch=vision["patch_size"],
            merge=vision["spatial_merge_size"],
        )


PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": CELL // 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": MIN_CELLS * CELL**2, "longest_edge": MAX_CELLS * CELL**2},
}
"""`size` holds areas in pixels, as for all models of this family: any picture is brought to an area as trained on."""


def train_tokenizer(seed: int = 0, num_dialogues: int = 20_000) -> Tokenizer:
    """Byte-level BPE over generated dialogues."""
    rng = random.Random(seed)
    texts = (chat_tokenizer.render_dialogue(training_dialogue(rng).dialogue) for _ in range(num_dialogues))
    return chat_tokenizer.train_tokenizer(texts, VOCAB_SIZE, SPECIAL_TOKENS, roles=("system", "user", "assistant"))


def write_model_files(directory: Path, sizes: Sizes, tokenizer: Tokenizer) -> None:
    """Writes all files of the model but its weights and its card."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = {"do_sample": False, "temperature": 0.0, "eos_token_id": list(STOP_IDS), "pad_token_id": END_OF_TEXT_ID}
    contents = {
        "config.json": sizes.config_json(),
        "generation_config.json": generation,
        "preprocessor_config.json": PREPROCESSOR,
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    chat_tokenizer.save_tokenizer(tokenizer, directory, SPECIAL_TOKENS, CHAT_TEMPLATE)
