"""Vectors for scripts and asyncio programs, and how prompts and parameters become requests for them."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError, InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.model_parts import Classifier
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_config import PoolingConfig
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import EngineCoreRequest, FinishReason
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.vllm_compat.flags import as_options
from tests.helpers.fake_engine_core import WIDTH, FakeEngineCore
from tests.helpers.scripted_core import fake_core


def core_of(
    directory: Path, *, generates: bool = True, pooling: PoolingConfig | None = None, labels: tuple[str, ...] = ()
) -> FakeEngineCore:
    """labels: of a classifier; empty: it is none."""
    core = fake_core(directory, max_model_len=32)
    core.model_config = dataclasses.replace(
        core.model_config,
        generates=generates and not labels,
        pooling=pooling or PoolingConfig(),
        classifier=Classifier(labels, "score", "softmax") if labels else None,
    )
    return core


def llm_of(directory: Path, **options: Any) -> LLM:
    core = core_of(directory, **options)
    return LLM.from_config(core.config, core=core)


def request_of(llm: LLM, prompt: Any, params: PoolingParams) -> EngineCoreRequest:
    return llm.llm_engine.input_processor.process("r", prompt, params).children[0]


def test_embeddings_come_in_the_order_of_the_prompts(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    outputs = llm.embed([[5], [6, 6], "one"], use_tqdm=False)
    assert outputs[0].outputs.embedding == np.eye(WIDTH)[5].tolist() and outputs[0].outputs.hidden_size == WIDTH
    assert outputs[1].outputs.embedding == np.eye(WIDTH)[6].tolist() and outputs[1].prompt_token_ids == [6, 6]
    assert outputs[2].prompt_token_ids == llm.get_tokenizer().encode("one")


def test_each_prompt_may_have_parameters_of_its_own(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    params = [PoolingParams(use_activation=False), PoolingParams(use_activation=True)]
    vectors = [output.outputs.data for output in llm.encode([[6, 6], [6, 6]], params, use_tqdm=False)]
    assert [vector[6] for vector in vectors] == [2, 1]
    (output,) = llm.encode([6, 7], pooling_task="token_embed", use_tqdm=False)
    np.testing.assert_array_equal(output.outputs.data, np.eye(WIDTH)[[6, 7]])
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.encode([6, 7], params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="task embed, but token_embed"):
        llm.encode([6], PoolingParams(task="embed"), pooling_task="token_embed")
    with pytest.raises(InvalidRequestError, match="must be PoolingParams"):
        llm.encode([6], SamplingParams())  # type: ignore[arg-type]


def test_scores_compare_one_with_many_or_in_step(model_directory: Path) -> None:
    llm = llm_of(model_directory)

    def scores(first: Any, second: Any) -> list[float]:
        return [round(output.outputs.score, 6) for output in llm.score(first, second, use_tqdm=False)]

    assert scores([[1]], [[1], [2], [1, 2]]) == [1, 0, round(0.5**0.5, 6)]
    assert scores([[1], [2]], [[2], [2]]) == [0, 1]
    assert scores("one", "one") == [1]
    for first, second, message in (
        ([[1], [2]], [[1]], "2 texts and data_2 1"),
        ([], "one", "data_1 is empty"),
        (3, "one", "int"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.score(first, second)  # type: ignore[arg-type]


def test_what_a_request_leaves_open_is_the_models_affair(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    params = request_of(llm, [5], PoolingParams()).pooling_params
    assert params == PoolingParams(task="embed", use_activation=True, skip_reading_prefix_cache=False)
    llm = llm_of(model_directory, pooling=PoolingConfig("mean", normalize=False))
    params = request_of(llm, [5], PoolingParams()).pooling_params
    assert params == PoolingParams(task="embed", use_activation=False, skip_reading_prefix_cache=True)


def test_time_limits_reach_the_engine_core(model_directory: Path) -> None:
    processor = llm_of(model_directory).llm_engine.input_processor
    request = processor.process(
        "r", [5], PoolingParams(), RequestOptions(queue_timeout_seconds=3.0, timeout_seconds=4.0)
    ).children[0]
    assert (request.options.queue_timeout_seconds, request.options.timeout_seconds) == (3.0, 4.0)


def test_hidden_states_of_all_tokens_cannot_come_from_the_cache(model_directory: Path) -> None:
    params = request_of(llm_of(model_directory), [5], PoolingParams(task="token_embed", skip_reading_prefix_cache=False))
    assert params.pooling_params is not None and params.pooling_params.skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("lengths", "asked", "message"),
    [(None, 4, "not trained"), ((), 4, None), ((), 9, "vectors of 1 to 8"), ((2, 4), 4, None), ((2, 4), 3, "vectors of 2, 4")],
)
def test_shorter_vectors_are_those_that_the_model_was_trained_for(
    model_directory: Path, lengths: Any, asked: int, message: str | None
) -> None:
    llm = llm_of(model_directory, pooling=PoolingConfig(matryoshka_dimensions=lengths))
    params = PoolingParams(dimensions=asked)
    if message is None:
        assert len(llm.embed([5], pooling_params=params, use_tqdm=False)[0].outputs.embedding) == asked
        return
    with pytest.raises(InvalidRequestError, match=message) as error:
        llm.embed([5], pooling_params=params)
    assert error.value.param == "dimensions"


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [(None, "right", range(30)), (-1, "right", range(30)), (4, "right", range(4)), (4, "left", range(26, 30))],
)
def test_ids_are_cut_at_the_side_that_is_asked_for(model_directory: Path, limit: int | None, side: Any, kept: Any) -> None:
    params = PoolingParams(truncate_prompt_tokens=limit, truncation_side=side)
    assert request_of(llm_of(model_directory), list(range(30)), params).prompt_token_ids == list(kept)


def test_special_tokens_of_a_text_survive_the_cut(model_directory: Path) -> None:
    llm = llm_of(model_directory)
    text = "one two three four five six"
    bos, *plain = llm.get_tokenizer().encode(text)
    for side, kept in (("left", plain[-2:]), ("right", plain[:2])):
        for prompt in (text, {"prompt": text}, *llm.llm_engine.input_processor.tokenize_texts([text])):
            params = PoolingParams(truncate_prompt_tokens=3, truncation_side=side)  # type: ignore[arg-type]
            assert request_of(llm, prompt, params).prompt_token_ids == [bos, *kept]


@pytest.mark.parametrize(("limit", "param"), [(33, "truncate_prompt_tokens"), (None, "prompt")])
def test_prompts_and_limits_beyond_the_model_are_refused(model_directory: Path, limit: int | None, param: str) -> None:
    with pytest.raises(InvalidRequestError, match="the model takes 32") as error:
        llm_of(model_directory).embed([5] * 33, pooling_params=PoolingParams(truncate_prompt_tokens=limit))
    assert error.value.param == param


def test_an_embedding_model_generates_nothing(model_directory: Path) -> None:
    llm = llm_of(model_directory, generates=False)
    with pytest.raises(InvalidRequestError, match="runs as an embedding model") as error:
        llm.generate("one")
    assert error.value.param == "model"
    assert len(llm.embed("one", use_tqdm=False)) == 1


def test_a_classifier_makes_classes_and_scores_pairs(model_directory: Path) -> None:
    llm = llm_of(model_directory, labels=("good",))
    (output,) = llm.classify([[3, 3]], use_tqdm=False)
    assert len(output.outputs.probs) == output.outputs.num_classes == WIDTH  # as many as the fake core's vectors have
    tokenizer = llm.get_tokenizer()
    found = llm.score("one ", ["two", "three four"], use_tqdm=False)
    assert [each.prompt_token_ids for each in found] == [tokenizer.encode("one two"), tokenizer.encode("one three four")]
    params = request_of(llm, [5], PoolingParams()).pooling_params
    assert params == PoolingParams(task="classify", use_activation=True, skip_reading_prefix_cache=False)
    for call, message in (
        (lambda: llm.embed("one"), "is a classifier and makes no embeddings"),
        (lambda: llm.generate("one"), "runs as a classifier and generates no text"),
        (lambda: llm.chat([{"role": "user", "content": "one"}]), "runs as a classifier and generates no text"),
        (lambda: llm.classify("one", pooling_params=PoolingParams(dimensions=2)), "a number for each class"),
        (lambda: llm.encode("one", PoolingParams(dimensions=2)), "a number for each class"),
        (lambda: llm.score([[1]], [[2]]), "texts that are scored must be strings"),
        (lambda: llm_of(model_directory, labels=("good", "bad")).score("one", "two"), "has 2 classes"),
        (lambda: llm_of(model_directory).classify("one"), "has no classification head"),
        (lambda: llm.classify({"prompt_token_ids": [1, 2], "token_type_ids": [0, 1]}), "one type of tokens"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError, match=message):
            call()  # type: ignore[no-untyped-call]


def failing(core: FakeEngineCore) -> FakeEngineCore:
    """Its steps end every request with an error."""
    advance = core._advance

    def fail(running: Any) -> EngineCoreOutput:
        return EngineCoreOutput(advance(running).request_id, [], FinishReason.ERROR, "not finite")

    core._advance = fail  # type: ignore[method-assign]
    return core


def test_a_request_that_fails_raises(model_directory: Path) -> None:
    core = failing(core_of(model_directory))
    with pytest.raises(EngineError, match="the request failed: not finite"):
        LLM.from_config(core.config, core=core).embed("one", use_tqdm=False)

    async def pool() -> None:
        with AsyncLLM(core=failing(core_of(model_directory))) as engine, pytest.raises(EngineError, match="not finite"):
            await engine.pool("one", PoolingParams(), "r")

    asyncio.run(pool())


def test_asyncio_programs_pool_many_at_once(model_directory: Path) -> None:
    async def work() -> None:
        core = core_of(model_directory)
        with AsyncLLM(core=core) as engine:
            ends: list[BaseException | None] = []
            engine.request_ended = lambda request, metrics, error: ends.append(error)
            outputs = await asyncio.gather(*(engine.pool([place], PoolingParams(), str(place)) for place in range(2, 7)))
            assert [int(output.outputs.data.argmax()) for output in outputs] == [2, 3, 4, 5, 6]
            assert all(output.finish_reason == "stop" and output.finished for output in outputs)
            with pytest.raises(InvalidRequestError):
                await engine.pool("", PoolingParams(), "r")
            metrics = {metric.name: metric for metric in await engine.get_metrics()}
            assert metrics["jaxllm:prompt_tokens"].value == 5  # type: ignore[union-attr]
            assert len(ends) == 5 and all(error is None for error in ends)

    asyncio.run(work())


@pytest.mark.parametrize("option", [{"task": "embed"}, {"convert": "embed"}, {"runner": "pooling", "convert": "none"}])
def test_scripts_may_say_in_several_ways_that_they_want_vectors(option: dict[str, Any]) -> None:
    assert as_options(option) == {"runner": "pooling"}
