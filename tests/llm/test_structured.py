"""Structured outputs in the API server: compiled before anything is queued, for every answer, without holding up others."""

import asyncio

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer

SLOW = {"json": {"allOf": [{"type": "string", "pattern": f"^.*a{i}.*b"} for i in range(40)]}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def ends_at_once(request: EngineCoreRequest) -> list[int]:
    return [request.eos_token_ids[0]]


def test_each_answer_has_the_grammar_and_nothing_else_of_the_form(directory):
    core = fake_core(directory, ends_at_once)
    llm = LLM.from_config(core.config, core=core)
    form = {"regex": "ab", "start_after_token_ids": [7]}
    llm.generate(["one"], SamplingParams(n=3, structured_outputs=form), use_tqdm=False)
    assert len(core.requests) == 3
    for request in core.requests:
        assert request.grammar.text == "start: /ab/" and request.grammar.start_after_token_ids == (7,)
        assert request.sampling_params.structured_outputs is None
    llm.shutdown()


def test_a_wrong_form_among_several_requests_lets_none_be_queued(directory):
    core = fake_core(directory, ends_at_once)
    llm = LLM.from_config(core.config, core=core)
    params = [SamplingParams(), SamplingParams(structured_outputs={"regex": "("})]
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate(["one", "two"], params, use_tqdm=False)
    assert not core.requests
    llm.shutdown()


def test_forms_that_are_slow_to_compile_hold_up_nobody(directory):
    async def scenario() -> None:
        core = fake_core(directory, ends_at_once)
        with AsyncLLM(core.config, core=core) as engine:
            slow = SamplingParams(structured_outputs=SLOW)
            waiting = [asyncio.create_task(engine.prepare("a", slow, str(i))) for i in range(40)]
            await asyncio.sleep(0)
            request = await engine.prepare("b", SamplingParams(), "plain")
            assert request.children and not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())
