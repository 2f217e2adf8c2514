"""A fake engine core of a model that sees images, with the real preparation of images before it."""

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from jaxllm.model_parts.vision import Vision
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer

IMAGE_TEXTS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
"""A token stands for 32 x 32 pixels."""


def write_seeing(directory: Path, *, chat_template: str = CHAT_TEMPLATE) -> Path:
    """A directory of such a model, without weights."""
    write_tokenizer(directory, chat_template=chat_template)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(IMAGE_TEXTS))
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    return directory


def seeing_core(directory: Path, script: Any = "one two three", **options: Any) -> FakeEngineCore:
    """A core for a directory that `write_seeing` has written."""
    core = fake_core(directory, script, **{"max_model_len": 500, **options})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    image_id, video_id = (tokenizer.token_to_id(text) for text in ("<|image_pad|>", "<|video_pad|>"))
    width = core.model_config.hidden_size
    vision = Vision("qwen3_vl", image_id, 16, 2, 32, 2, 2, 64, width, temporal_patch_size=2, video_token_id=video_id)
    core.model_config = dataclasses.replace(core.model_config, vision=vision)
    return core


def file_of(width: int = 64, height: int = 32, color: str = "red", format: str = "PNG") -> bytes:
    """The file of a picture of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", (width, height), color).save(stream, format)
    return stream.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
