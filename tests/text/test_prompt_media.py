"""Prompts with images, through `InputProcessor`, with a stand-in for a model's preparation of images."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, MediaOptions
from jaxllm.media.media import MediaUnwantedError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input_processor import InputProcessor
from jaxllm.text.prompt_media import MAX_THREADS, PromptMedia, with_processed
from jaxllm.text.tokenization import Tokenization
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.fake_engine_core import tiny_model_config
from tests.helpers.stand_in_media import StandInProcessor, picture, stand_in_media
from tests.helpers.tiny_tokenizers import EOS, write_tokenizer

MAX_LEN = 32
P = 5
WIDE = {"image": [picture(2, 3), picture(1, 2, 7)]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def stand_in() -> StandInProcessor:
    return StandInProcessor(P)


def processor_of(stand_in: StandInProcessor | None, tokenizer: Tokenizer | None = None, **options: Any) -> InputProcessor:
    media = stand_in_media(stand_in, **options)
    return InputProcessor(EngineConfig.from_options(seed=0), tiny_model_config(100), MAX_LEN, tokenizer, media=media)


def test_each_placeholder_becomes_as_many_as_its_image_has_tokens_and_n_answers_share_the_images(
    stand_in: StandInProcessor,
) -> None:
    processor = processor_of(stand_in)
    prompt = {"prompt_token_ids": [1, P, 2, P, 3], "multi_modal_data": WIDE, "multi_modal_uuids": {"image": ["a", None]}}
    request = processor.process("r", prompt, SamplingParams(n=2, max_tokens=3))  # type: ignore[arg-type]
    first, second = request.children
    assert request.prompt_token_ids == first.prompt_token_ids == [1, *[P] * 6, 2, *[P] * 2, 3]
    assert first.items is second.items
    assert [(item.position, item.num_tokens, item.grid) for item in first.items] == [(1, 6, (1, 2, 3)), (8, 2, (1, 1, 2))]
    again = processor.process("r", {**prompt, "prompt_token_ids": request.prompt_token_ids}, SamplingParams())  # type: ignore[typeddict-item]
    assert again.children[0].items == first.items, "ids may be expanded already"
    assert [media.uuid for media, _ in stand_in.prepared] == ["a", None] * 2


def test_cancelling_a_preparation_ends_it_and_so_does_closing(stand_in: StandInProcessor) -> None:
    media, begun, ended = stand_in_media(stand_in), threading.Semaphore(0), threading.Semaphore(0)

    def process(item: Media, kwargs: Any) -> Any:
        begun.release()
        try:
            while True:
                item.check()
                time.sleep(0.001)
        finally:
            ended.release()

    stand_in.process = process  # type: ignore[method-assign, assignment]

    async def leave() -> None:
        [future] = media.process([Media("image", b"1")])
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        assert await asyncio.to_thread(begun.acquire, timeout=10)
        waiting.cancel()
        assert await asyncio.to_thread(ended.acquire, timeout=10), "the work goes on"

    asyncio.run(leave())
    futures = media.process([Media("image", b"2")] * (MAX_THREADS + 1))
    assert begun.acquire(timeout=10)
    media.close()
    assert ended.acquire(timeout=10)
    for future in futures:
        with pytest.raises((CancelledError, MediaUnwantedError)):
            future.result(10)


def test_what_was_prepared_is_not_prepared_again(stand_in: StandInProcessor) -> None:
    processor = processor_of(stand_in)
    prompt: Any = {
        "prompt_token_ids": [P],
        "multi_modal_data": {"image": picture(2, 2)},
        "mm_processor_kwargs": {"max_pixels": 4},
    }
    ready = with_processed(prompt, [image.result() for image in processor.media.submit(prompt)])
    assert processor.process("r", ready, SamplingParams()).prompt_token_ids == [P] * 4
    assert [kwargs for _, kwargs in stand_in.prepared] == [{"max_pixels": 4}]


def test_a_vector_of_a_prompt_may_take_images_in_which_are_never_cut(stand_in: StandInProcessor) -> None:
    processor = processor_of(stand_in)
    prompt: Any = {"prompt_token_ids": [1, P, 2], "multi_modal_data": {"image": picture(2, 3)}}
    request = processor.process("r", prompt, PoolingParams(truncate_prompt_tokens=8))
    assert [item.position for item in request.children[0].items] == [1]
    with pytest.raises(InvalidRequestError, match="prompt has 8 tokens with those of its images, truncate_prompt_tokens is 7"):
        processor.process("r", prompt, PoolingParams(truncate_prompt_tokens=7))


def test_texts_of_many_prompts_are_tokenized_with_their_images(tokenizer: Tokenizer) -> None:
    (placeholder_id,) = tokenizer.encode(EOS, add_special_tokens=False)
    stand_in = StandInProcessor(placeholder_id)
    processor = processor_of(stand_in, tokenizer)
    broken: Any = {"prompt": EOS, "multi_modal_data": {"image": "no"}}
    without: Any = {"prompt": "hi", "multi_modal_data": {"image": picture(2, 2)}}
    prompts: list[Any] = ["hi", {"prompt": f"hi{EOS}", "multi_modal_data": {"image": picture(2, 2)}}, broken, without]
    plain, with_image, unchanged, without_ids = processor.tokenize_texts(prompts)
    assert "prompt_token_ids" not in without_ids, "it has no placeholder, which `process` reports"
    assert plain == {"prompt": "hi", "prompt_token_ids": tokenizer.encode("hi")}
    assert len(with_image["prompt_token_ids"]) == len(tokenizer.encode(f"hi{EOS}")) + 3 and with_image["prompt"] == f"hi{EOS}"  # type: ignore[index, call-overload]
    assert unchanged is broken
    ids = processor.process("r", with_image, SamplingParams()).prompt_token_ids
    assert ids == processor.process("r", prompts[1], SamplingParams()).prompt_token_ids
    assert ids.count(placeholder_id) == 4
    for limit, fits in ((len(ids), True), (len(ids) - 1, False)):
        truncation = Tokenization(truncate_prompt_tokens=limit)
        if fits:
            processor.tokenize_texts(prompts, truncation)
        else:
            with pytest.raises(InvalidRequestError, match="images are never cut"):
                processor.tokenize_texts(prompts, truncation)


@pytest.mark.parametrize(
    ("prompt", "told", "param"),
    [
        ({"multi_modal_data": {"image": picture(5, 7)}}, "prompt has 35 tokens, the model takes 32", "prompt"),
        ({"multi_modal_data": WIDE}, "1 placeholders for 2 images", "prompt"),
        ({}, "1 placeholders for 0 images", "prompt"),
        ({"multi_modal_data": {"image": [picture(1, 1)] * 4}}, r"At most 3 image\(s\) may be provided in one prompt", "multi_modal_data"),
        ({"multi_modal_data": {"smell": []}}, "has 'smell', must have image or video or audio", "multi_modal_data"),
        ({"multi_modal_data": {"video": b"1"}}, "takes no videos; leave them out", "multi_modal_data"),
        ({"multi_modal_data": [1]}, "multi_modal_data is a list, must be an object", "multi_modal_data"),
        ({"multi_modal_data": {"image": 3}}, r"multi_modal_data.image\[0\] is no image", "multi_modal_data.image[0]"),
        ({"multi_modal_data": {"image": "a.png"}}, "is a string; give its bytes", "multi_modal_data.image[0]"),
        ({"multi_modal_data": {"image": [None]}}, "is None; give an image, or the uuid", "multi_modal_data.image[0]"),
        ({"multi_modal_data": WIDE, "multi_modal_uuids": {"image": ["a"]}}, "has 1 for 2 images", "multi_modal_uuids"),
        ({"multi_modal_data": WIDE, "multi_modal_uuids": {"image": ["a", 3]}}, "has 3, must have strings", "multi_modal_uuids"),
        ({"multi_modal_datas": {}}, "did you mean 'multi_modal_data'", "prompt"),
    ],
)  # fmt: skip
def test_wrong_images_of_a_prompt_are_named(stand_in: StandInProcessor, prompt: dict[str, Any], told: str, param: str) -> None:
    processor = processor_of(stand_in, limit_mm_per_prompt={"image": 3})
    with pytest.raises(InvalidRequestError, match=told) as caught:
        processor.process("r", {"prompt_token_ids": [P], **prompt}, SamplingParams())  # type: ignore[typeddict-item, arg-type]
    assert caught.value.param == param


def test_a_model_of_text_alone_refuses_images() -> None:
    processor = processor_of(None)
    assert processor.process(
        "r", {"prompt_token_ids": [P], "multi_modal_data": {"image": []}}, SamplingParams()
    ).prompt_token_ids == [P]
    with pytest.raises(InvalidRequestError, match="this model takes text alone, and no images"):
        processor.process("r", {"prompt_token_ids": [P], "multi_modal_data": {"image": picture(1, 1)}}, SamplingParams())


def test_clients_set_how_images_are_prepared_only_where_they_are_trusted(stand_in: StandInProcessor) -> None:
    processor_of(stand_in, trust_request_mm_kwargs=True).media.check_trusted({"max_pixels": 9})
    processor_of(stand_in).media.check_trusted({})
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs of requests is refused.*--trust-request-mm-kwargs"):
        processor_of(stand_in).media.check_trusted({"max_pixels": 9})


def test_few_threads_decode_audio_at_a_time() -> None:
    """Each file may take a gigabyte while it is decoded."""
    lock, running, most = threading.Lock(), 0, 0

    class Hearing:
        kinds = ("audio",)
        transcribes = True

        def samples(self, media: Media) -> np.ndarray:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= 1
            assert isinstance(media.data, bytes)
            return np.full(3, len(media.data), np.float32)

    media = PromptMedia(Hearing(), MediaOptions())  # type: ignore[arg-type]
    futures = [media.samples(Media("audio", b"x" * size)) for size in range(4 * MAX_THREADS)]
    assert [future.result()[0] for future in futures] == list(range(4 * MAX_THREADS))
    assert 1 <= most <= MAX_THREADS
    media.close()
