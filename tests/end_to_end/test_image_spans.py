"""Models whose tokens of an image see each other give the same tokens however the scheduler cuts prompts, and those of transformers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.media.payload import pack
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.runner.paged_context import PagedContext
from tests.helpers import engines, pictures, vision_checkpoint
from tests.helpers.picture_requests import golden_requests, mixed_request

SOFT, START, END = 267, 266, 268
"""Ids of the placeholder, and of what stands around images."""
TOKENS, BLOCK = 9, 16
"""Tokens of an image; of a block."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoint.write(tmp_path_factory.mktemp("gemma3") / "model", "gemma3", gain=3.0, seed=2)


@pytest.fixture(scope="module")
def programs() -> engines.SharedPrograms:
    return engines.SharedPrograms()


@pytest.fixture
def make_core(directory: Path, programs: engines.SharedPrograms) -> Iterator[Any]:
    small = {"token_buckets": (16, 112), "dtype": "float32", "model": str(directory)}
    with programs.engines({**engines.SMALL, **small}) as make:
        yield make


def image(seed: int) -> PromptItem:
    """Random pixels."""
    patches = np.random.default_rng(seed).integers(0, 256, (4 * TOKENS, 3 * 14 * 14), dtype=np.uint8)
    return PromptItem("image", f"{seed}".encode(), 0, TOKENS, pack((1, 6, 6), patches))


request = partial(mixed_request, (START, SOFT, END))


def mixed() -> list[EngineCoreRequest]:
    """Images with text between and without; one at the start, one at the end; the first images again; text alone."""
    return [
        request("two", 5, image(1), 4, image(2), 3),
        request("first", image(3), 2),
        request("last", 12, image(4), image(1)),
        request("again", 5, image(1), 4, image(2), 9),
        request("text", 9),
    ]


def answers(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in engines.run(core, requests).items()}


def furthest(core: EngineCore) -> float:
    """The largest difference to the logprobs of the golden's prompts."""
    vision = core.model_config.vision
    assert vision is not None
    requests = golden_requests("gemma3", vision, prompt_logprobs=0)
    answers, results = engines.run(core, requests).values(), pictures.golden("gemma3").results
    pairs = [(answer.prompt_logprobs, result.prompt_logprobs) for answer, result in zip(answers, results, strict=True)]
    return max(float(np.abs(found.logprobs[:, 0] - expected).max()) for found, expected in pairs if found is not None)


@pytest.mark.slow
def test_logprobs_of_prompts_are_those_of_transformers(make_core, tmp_path) -> None:
    """In chunks, on two devices."""
    core = make_core(model=str(pictures.write("gemma3", tmp_path / "model")), tensor_parallel_size=2, max_num_batched_tokens=16)
    assert furthest(core) < 1e-4


@pytest.mark.slow
def test_causal_attention_would_not_give_them(make_core, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(PagedContext, "later", property(lambda context: None, lambda context, later: None))
    core = make_core(model=str(pictures.write("gemma3", tmp_path / "model")))
    assert furthest(core) > 0.1


@pytest.mark.slow
def test_chunks_give_the_tokens_of_whole_prompts(make_core) -> None:
    core = make_core()
    whole = answers(core, mixed())
    assert {len(tokens) for tokens in whole.values()} == {8}
    other = request("other pixels", 5, image(1), 4, image(5), 3)
    assert answers(core, [other])["other pixels"] != whole["two"]
    for size in (TOKENS, 13, 16, 30):
        engines.reschedule(core, max_num_batched_tokens=size)
        for requests in (mixed(), mixed()[::-1]):  # in order, and with what the other order left in the cache
            assert answers(core, requests) == whole


@pytest.mark.slow
@pytest.mark.parametrize("size", [TOKENS, 14, 112])
def test_a_cached_prefix_may_end_inside_an_image(make_core, size) -> None:
    core = make_core()
    # The first block ends inside the first image, the second inside the second.
    prompts = [(BLOCK - 5, image(1), 1), (BLOCK - 5, image(1), 2, image(2), 3), (BLOCK - 5, image(1), 2, image(2), 6)]
    expected = [answers(core, [request("alone", *prompt)])["alone"] for prompt in prompts]
    engines.reschedule(core, max_num_batched_tokens=size)
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        (answer,) = engines.run(core, [request(f"{number}", *prompt)]).values()
        assert answer.num_cached_tokens == number * BLOCK
        assert answer.tokens == tokens


@pytest.mark.slow
def test_random_prompts_in_random_chunks(make_core) -> None:
    core, rng = make_core(), np.random.default_rng(7)
    for trial in range(6):
        requests = []
        for number in range(5):
            parts: list[int | PromptItem] = [int(rng.integers(1, 20))]
            for _ in range(rng.integers(0, 4)):
                parts += [image(int(rng.integers(3))), int(rng.integers(1, 6))]
            requests.append(request(f"{trial} {number}", *parts, max_tokens=4))
        engines.reschedule(core, max_num_batched_tokens=112)
        alone = {name: tokens for each in requests for name, tokens in answers(core, [each]).items()}
        options = {
            "max_num_batched_tokens": int(rng.integers(TOKENS, 40)),
            "long_prefill_token_threshold": int(rng.integers(0, 12)),
        }
        engines.reschedule(core, num_blocks=int(rng.integers(12, 28)), **options)
        assert answers(core, requests) == alone, options


@pytest.mark.slow
def test_an_engine_with_drafts_and_shared_layers_says_the_same(make_core) -> None:
    """With Triton's kernels: `spans` of tests/scripts/test_gpu_checks.py."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    expected = answers(make_core(), mixed())
    found = answers(make_core(max_num_batched_tokens=16, share_layers=True, speculative_config=drafts), mixed())
    assert found == expected
