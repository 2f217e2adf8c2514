import asyncio
import json
from typing import Any

import pytest

from jaxllm.http_client.client import ServerClient, ServerError
from jaxllm.http_client.datasets import LoadPrompt
from jaxllm.http_client.load import ENDPOINTS, Backend, LoadRun, RequestMaker, run_load, wait_until_ready
from tests.helpers.stub_server import Stub


def load(stub: Stub, prompts: list[LoadPrompt], backend: Backend = "openai", **options: Any) -> LoadRun:
    async def run() -> LoadRun:
        maker = RequestMaker(backend, "stub", {"temperature": 0.0}, ignore_eos=True)
        async with ServerClient(stub.url) as client:
            times = [0.0] * len(prompts)
            return await asyncio.wait_for(run_load(client, maker, ENDPOINTS[backend], prompts, times, **options), 120)

    return asyncio.run(run())


def test_outcomes_come_in_the_order_of_the_prompts(stub: Stub) -> None:
    prompts = [LoadPrompt(list(range(length)), length, length) for length in (5, 2, 9)]
    outcomes = load(stub, prompts).outcomes
    assert [(o.num_prompt_tokens, o.num_output_tokens, len(o.token_times)) for o in outcomes] == [(n, n, n) for n in (5, 2, 9)]
    assert [o.text for o in outcomes] == ["word " * n for n in (5, 2, 9)]
    assert all(o.start <= o.token_times[0] <= o.end for o in outcomes)
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in stub.bodies)


def test_chat_asks_with_messages_and_does_not_count_the_opening_chunk(stub: Stub) -> None:
    (outcome,) = load(stub, [LoadPrompt("hello", 4)], "openai-chat").outcomes
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert stub.bodies[0]["max_completion_tokens"] == 4
    assert (len(outcome.token_times), outcome.num_output_tokens, outcome.num_prompt_tokens) == (4, 4, 7)


def test_no_more_requests_run_at_once_than_allowed(stub: Stub) -> None:
    load(stub, [LoadPrompt([1], 3, 1)] * 20, max_concurrency=3)
    assert len(stub.bodies) == 20 and 1 <= stub.max_together <= 3


def test_one_request_s_failure_is_its_own(stub: Stub) -> None:
    stub.break_after = lambda body: (1, "error") if body["max_tokens"] == 2 else None
    stub.fail = lambda body: (400, {"error": {"message": "no"}}) if body["max_tokens"] == 3 else None
    counted = []
    run = load(stub, [LoadPrompt([1], n, 1) for n in (1, 2, 3, 4)], done=lambda: counted.append(1))
    errors = [outcome.error for outcome in run.outcomes]
    assert errors == [None, "error in the stream: the engine died", "HTTP 400: no", None]
    assert len(counted) == 4


def test_request_ids_are_sent_if_asked_for(stub: Stub) -> None:
    load(stub, [LoadPrompt([1], 1, 1)] * 2, request_id_prefix="run-")
    assert sorted(headers["x-request-id"] for headers in stub.headers) == ["run-0", "run-1"]


def test_the_extra_body_wins() -> None:
    maker = RequestMaker("openai", "m", {"max_tokens": 1, "stream_options": None})
    body = json.loads(maker.body(LoadPrompt("x", 9)))
    assert (body["max_tokens"], body["stream_options"], body["model"]) == (1, None, "m")


def test_waiting_for_the_server_ends_at_its_first_answer_or_its_first_clear_no(stub: Stub) -> None:
    async def wait(timeout: float) -> None:
        async with ServerClient(stub.url) as client:
            body = RequestMaker("openai", "m").body(LoadPrompt([1], 1, 1))
            await wait_until_ready(client, ENDPOINTS["openai"], body, timeout, pause_seconds=0)

    stub.fail = lambda body: (503, {"error": {"message": "loading"}}) if len(stub.bodies) < 4 else None
    asyncio.run(wait(20))
    assert len(stub.bodies) == 4
    stub.fail = lambda body: (404, {"error": {"message": "no model"}})
    with pytest.raises(ServerError, match="no model"):
        asyncio.run(wait(20))
    assert len(stub.bodies) == 5
    stub.fail = lambda body: (503, {"error": {"message": "loading"}})
    with pytest.raises(ServerError, match="loading"):
        asyncio.run(wait(0))
