"""The lines of --enable-log-requests."""

import logging

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError
from jaxllm.outputs import RequestMetrics
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input_processor import ParentRequest
from server.app import create_app
from server.logs import RequestLog
from tests.server.client import Client
from tests.server.conftest import options


def test_a_request_has_a_line_when_it_begins_and_one_when_it_ends(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    try:
        with Client(create_app(engine, options(enable_log_requests=True))) as client, caplog.at_level(logging.INFO, "jaxllm"):
            client.post("/v1/completions", json={"prompt": [5] * 7, "max_tokens": 3}, headers={"X-Request-Id": "mine"})
    finally:
        engine.request_ended = None
    (begin, end) = [line for line in caplog.messages if "prompt tokens" in line]
    assert "7 prompt tokens, max_tokens=3" in begin and "ended, 7 prompt tokens (computed 7, device 0), 3 output tokens" in end


def test_the_line_at_the_end_tells_where_the_prompt_came_from(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=5)
    child = EngineCoreRequest(request_id="c", prompt_token_ids=[1] * 100, sampling_params=params)
    request = ParentRequest("r", "i", None, child.prompt_token_ids, params, [child], arrival_time=100.0)
    log = RequestLog(options(enable_log_requests=True).logging)
    with caplog.at_level(logging.INFO, "jaxllm"):
        log.ended(request, RequestMetrics(0.0, num_cached_tokens=80, loaded_tokens={"host": 48, "disk": 16}), None)
        log.ended(request, RequestMetrics(0.0, num_generation_tokens=3, num_cached_tokens=0), GeneratorExit())
        log.ended(request, None, EngineError("it broke"))
    assert caplog.messages == [
        "r: ended, 100 prompt tokens (computed 20, device 16, host 48, disk 16), 0 output tokens",
        "r: ended, 100 prompt tokens (computed 100, device 0), 3 output tokens: the client disconnected",
        "r: ended without a token: EngineError",
    ]
