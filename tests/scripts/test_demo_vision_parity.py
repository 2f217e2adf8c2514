"""The training model of the demo that sees against transformers, on what was saved: names, config, pictures, positions, logits."""

import random

import numpy as np
import pytest

from scripts.demo_data.packing import TOKEN_MASK
from scripts.demo_data.vision import model_files, rows, scenes
from scripts.demo_data.vision.dialogues import PICTURE
from scripts.demo_data.vision.model import init_weights, save_weights
from tests.helpers.demo_vision import NARROW, all_logits

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def tokenizer():
    return model_files.train_tokenizer(num_dialogues=3000)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """Narrow weights, every one of them random, and the directory that they were saved to."""
    directory = tmp_path_factory.mktemp("model")
    model_files.write_model_files(directory, NARROW, tokenizer)
    draw = np.random.default_rng(0).normal
    weights = {name: value + draw(0, 0.1, value.shape).astype(np.float32) for name, value in init_weights(NARROW, 0).items()}
    save_weights(weights, NARROW, directory / "model.safetensors", dtype="float32")
    return directory, weights


def _prompt(tokenizer, rng: random.Random) -> rows.Document:
    """Text, a picture, text, a picture of another size, text."""
    shown = (scenes.Text(96, 192, "AB", "red", "AB"), scenes.Bars(224, 128, ("red", "blue"), (0.3, 0.6)))
    pictures = tuple(scene.draw(rng) for scene in shown)
    return rows.Documents(tokenizer).of_prompt(f"First {PICTURE} then {PICTURE} which of them?", pictures)


def test_logits_equal_those_of_transformers(checkpoint, tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory, weights = checkpoint
    document = _prompt(tokenizer, random.Random(0))
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    pictures = Qwen2VLImageProcessorPil.from_pretrained(directory)(list(document.pictures), return_tensors="np")
    ids = (document.tokens & TOKEN_MASK).astype(np.int64)
    assert (ids == model.config.image_token_id).sum() == pictures["image_grid_thw"].prod(axis=1).sum() // 4
    with torch.no_grad():
        expected = (
            model(
                input_ids=torch.tensor(ids[None]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                mm_token_type_ids=torch.tensor((ids == model.config.image_token_id)[None].astype(np.int32)),
                pixel_values=torch.tensor(pictures["pixel_values"]),
                image_grid_thw=torch.tensor(pictures["image_grid_thw"]),
            )
            .logits[0]
            .numpy()
        )
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(all_logits(weights, document), expected, atol=1e-4)
