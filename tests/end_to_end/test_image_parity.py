"""Images of extreme sizes, and many of them, through whole engines and through transformers: its image processor and its model."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.helpers import images, vision_checkpoint

pytestmark = pytest.mark.torch

SMALL = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "token_buckets": (96,),
    "decode_buckets": (4,),
    "kv_cache_memory_bytes": 8 << 20,
    "mm_max_patches": 2048,
    "use_progress_bar": False,
}
EXTREME = ((32, 6400), (6400, 32), (1, 1), (200, 1), (3, 600), (640, 480), (33, 31))
"""Width and height."""
MANY = tuple((20 + 13 * number, 90 - 5 * number) for number in range(12))
NUM_LETTERS = 256
"""Tokens that answers consist of: others are placeholders."""
GREEDY = SamplingParams(
    max_tokens=24, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0, allowed_token_ids=[*range(NUM_LETTERS)]
)


class Transformers:
    """A checkpoint with the processor of images that its files name."""

    def __init__(self, directory: Path, family: str):
        torch = pytest.importorskip("torch")
        import transformers

        torch.set_grad_enabled(False)
        kind = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil
        settings = {name: value for name, value in vision_checkpoint.PREPROCESSORS[family].items() if "type" not in name}
        self.processor, self.torch = kind(**settings), torch
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.image_id = self.model.config.image_token_id

    def logprobs(self, token_ids: list[int], pictures: list[Any]) -> np.ndarray:
        """[T, V] of a prompt with a placeholder for each embedding."""
        ids = self.torch.tensor([token_ids])
        given = self.processor(pictures, return_tensors="pt")
        types = (ids == self.image_id).int()
        logits = self.model(input_ids=ids, mm_token_type_ids=types, **given).logits[0]
        return self.torch.log_softmax(logits, -1).numpy()


def test_prompts_with_images_of_every_size(tmp_path: Path) -> None:
    """The logprobs of prompts and of what follows, which no token of the reference is better than. Windows of Qwen2.5-VL's encoder:
    tests/models/test_pictures.py."""
    family, size = "qwen3_vl", 2
    directory = vision_checkpoint.write(tmp_path / "model", family, tied=False)
    reference = Transformers(directory, family)
    prompts = []
    for sizes in (*([each] for each in EXTREME), MANY):
        shown = [images.picture(*each, seed=number) for number, each in enumerate(sizes)]
        ids = [7, 8, 9]
        for number in range(len(shown)):
            ids += [reference.image_id, *range(40 + number, 43 + number)]
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": shown}})
    llm = LLM(str(directory), tensor_parallel_size=size, **SMALL)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        given = [*output.prompt_token_ids, *answer.token_ids]
        wanted = reference.logprobs(given, prompt["multi_modal_data"]["image"])
        of_prompt = [found[token].logprob for token, found in zip(given[1:], output.prompt_logprobs[1:], strict=False)]
        of_answer = [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
        expected = wanted[np.arange(len(given) - 1), given[1:]]
        np.testing.assert_allclose([*of_prompt, *of_answer], expected, rtol=0, atol=1e-4)
        best = wanted[len(output.prompt_token_ids) - 1 : -1, :NUM_LETTERS].max(axis=1)
        np.testing.assert_allclose(expected[-len(answer.token_ids) :], best, rtol=0, atol=1e-4)
