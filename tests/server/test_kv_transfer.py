"""Prefill and decode engines behind a router: what it sends and reads, in the bodies that vLLM's toy proxy and llm-d's sidecar make."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.kv_transfer import KVTransfer
from jaxllm.outputs import RequestMetrics, RequestOutput
from server.app import create_app
from server.usage import Usage
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.serve_processes import wait_until
from tests.server.client import Client, events
from tests.server.conftest import options
from tests.test_kv_transfer import PULLED, TO_DECODE, TO_PREFILL, WRONG

ROUTERS = json.loads((Path(__file__).parent / "routers_bodies.json").read_text())
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": HI,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**HI, "max_tokens": 5},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5}},
}


def core_of(directory: Path, role: str | None) -> FakeEngineCore:
    """Answers "one two three". A request whose blocks are kept for a decode engine gets parameters for it on its last output."""
    given = {} if role is None else {"kv_role": role, "kv_offloading_size": 1.0}
    core = fake_core(directory, max_model_len=200, **given)
    advance = core._advance

    def told(running: Any) -> Any:
        output, transfer = advance(running), running.request.options.kv_transfer
        output.num_cached_tokens = 1
        if output.finish_reason is not None and transfer is not None and transfer.keep_for_decode:
            output.kv_transfer_params = TO_DECODE
        return output

    core._advance = told  # type: ignore[method-assign]
    return core


def client_of(core: FakeEngineCore) -> Iterator[Client]:
    with (
        AsyncLLM(core=core) as engine,
        Client(create_app(engine, options(enable_scale_out=True, enable_prompt_tokens_details=True))) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def prefill_core(served_directory: Path) -> FakeEngineCore:
    return core_of(served_directory, "prefill")


@pytest.fixture(scope="module")
def decode_core(served_directory: Path) -> FakeEngineCore:
    return core_of(served_directory, "decode")


@pytest.fixture(scope="module")
def prefill(prefill_core: FakeEngineCore) -> Iterator[Client]:
    yield from client_of(prefill_core)


@pytest.fixture(scope="module")
def decode(decode_core: FakeEngineCore) -> Iterator[Client]:
    yield from client_of(decode_core)


@pytest.fixture(scope="module")
def roleless(served_directory: Path) -> Iterator[Client]:
    yield from client_of(core_of(served_directory, None))


@pytest.mark.parametrize("name", ROUTERS)
def test_both_legs_of_a_router(
    prefill: Client, decode: Client, prefill_core: FakeEngineCore, decode_core: FakeEngineCore, name: str
) -> None:
    router = ROUTERS[name]
    path, headers = router["path"], router["headers"]
    first = prefill.post(path, router["to_prefill"], headers=headers)
    assert first.status_code == 200, first.text
    sent = prefill_core.requests[-1]
    assert sent.options.kv_transfer == KVTransfer(keep_for_decode=True) and sent.sampling_params.max_tokens == 1
    params = first.json()["kv_transfer_params"]
    assert params == TO_DECODE and first.json()["choices"][0]["finish_reason"] == "length"

    body = {**router["client"], "kv_transfer_params": params}
    second = decode.post(path, body, headers=headers)
    assert second.status_code == 200, second.text
    assert decode_core.requests[-1].options.kv_transfer == PULLED
    ids = headers["X-Request-Id"]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == ids
    assert all(ids in core.requests[-1].request_id for core in (prefill_core, decode_core))
    if body["stream"]:
        chunks = events(second)
        assert all("kv_transfer_params" not in chunk for chunk in chunks)
        text = "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for c in chunks for choice in c["choices"]
        )
        usage = chunks[-1]["usage"]
    else:
        answer, usage = second.json()["choices"][0], second.json()["usage"]
        text = answer["message"]["content"]
        assert "kv_transfer_params" not in second.json()
    assert text == "one two three"
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(16, usage["prompt_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_has_the_parameters_at_its_top(prefill: Client, path: str) -> None:
    body = {**BODIES[path], "kv_transfer_params": TO_PREFILL}
    assert prefill.post(path, body).json()["kv_transfer_params"] == TO_DECODE
    assert "kv_transfer_params" not in prefill.post(path, BODIES[path]).json()


@pytest.mark.parametrize("path", BODIES)
def test_limits_of_a_request_reach_engines_of_any_role(
    prefill: Client, roleless: Client, prefill_core: FakeEngineCore, path: str
) -> None:
    limits = {"max_load_tokens": 0, "max_offload_tokens": 32}
    assert roleless.post(path, {**BODIES[path], "kv_transfer_params": limits}).status_code == 200
    assert prefill.post(path, {**BODIES[path], "kv_transfer_params": {**TO_PREFILL, **limits}}).status_code == 200
    options = prefill_core.requests[-1].options
    assert (options.kv_transfer, options.max_load_tokens, options.max_offload_tokens) == (
        KVTransfer(keep_for_decode=True),
        0,
        32,
    )
    reply = roleless.post(path, {**BODIES[path], "kv_transfer_params": {"max_load_tokens": -1}})
    assert reply.status_code == 400 and "max_load_tokens is -1, must be 0 to" in reply.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_parameters_once_with_the_last_answer_s_end(
    prefill: Client, prefill_core: FakeEngineCore, path: str, n: int
) -> None:
    if n > 1 and path in ("/v1/responses", "/v1/messages"):
        return  # they have one answer
    body = {**BODIES[path], "kv_transfer_params": TO_PREFILL, "stream": True}
    if path == "/inference/v1/generate":
        body["sampling_params"] = {**body["sampling_params"], "n": n}
    elif n > 1:
        body["n"] = n
    reply = prefill.post(path, body)
    assert reply.status_code == 200, reply.text
    kept = [request.options.kv_transfer is not None for request in prefill_core.requests[-n:]]
    assert sorted(kept) == [False] * (n - 1) + [True]
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    having = [place for place, chunk in enumerate(chunks) if "kv_transfer_params" in json.dumps(chunk)]
    if path == "/v1/responses":
        assert chunks[-1]["response"]["kv_transfer_params"] == TO_DECODE and having == [len(chunks) - 1]
    elif path == "/v1/messages":
        assert chunks[-2]["type"] == "message_delta" and chunks[-2]["kv_transfer_params"] == TO_DECODE
        assert having == [len(chunks) - 2]
    else:
        assert chunks[-1]["kv_transfer_params"] == TO_DECODE and having == [len(chunks) - 1]
        assert chunks[-1]["choices"][0]["finish_reason"] is not None


@pytest.mark.parametrize("path", BODIES)
def test_wrong_parameters_are_refused_by_name(prefill: Client, path: str) -> None:
    for value in ("x", 7, [TO_PREFILL], True):
        _refused(prefill, path, value)
    for params, _ in WRONG[:: 1 if path == "/v1/completions" else 8]:
        assert "kv_transfer_params" in _refused(prefill, path, params)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_deep_and_long_parameters_are_refused_by_name(prefill: Client, path: str) -> None:
    deep = json.dumps({**BODIES[path], "kv_transfer_params": {}}).replace("{}", '{"a":' * 1000 + "1" + "}" * 1000)
    reply = prefill.post(path, content=deep.encode(), headers={"content-type": "application/json"})
    assert reply.status_code == 400 and "nested too deeply" in reply.json()["error"]["message"]
    assert "kv_transfer_params" in reply.text
    for long in (
        {"a": "x" * 2**20},
        {f"k{n}": 1 for n in range(1000)},
        {"do_remote_decode": True, "remote_block_ids": [[1] * 2**19]},
    ):
        _refused(prefill, path, long)


def _refused(client: Client, path: str, params: Any) -> str:
    reply = client.post(path, {**BODIES[path], "kv_transfer_params": params})
    assert reply.status_code == 400, (params, reply.text)
    error = reply.json()["error"]
    assert path == "/v1/messages" or error["param"].startswith("kv_transfer_params")
    assert len(reply.text) < 1000
    return str(error["message"])


@pytest.mark.parametrize("path", BODIES)
def test_a_server_without_the_role_refuses_its_part_and_says_what_to_do(
    roleless: Client, prefill: Client, decode: Client, path: str
) -> None:
    for client, params, role in (
        (roleless, TO_PREFILL, "prefill"),
        (roleless, TO_DECODE, "decode"),
        (prefill, TO_DECODE, "decode"),
        (decode, TO_PREFILL, "prefill"),
    ):
        assert f"start it with --kv-role {role} or both" in _refused(client, path, params)
    for harmless in ({}, None, {"do_remote_decode": False, "do_remote_prefill": False}, {"kv_load_tiers": ["x"]}):
        assert roleless.post(path, {**BODIES[path], "kv_transfer_params": harmless}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_decode_server_that_refuses_a_request_ends_its_lease(
    decode: Client, prefill: Client, decode_core: FakeEngineCore, prefill_core: FakeEngineCore, path: str
) -> None:
    ended, body = decode_core.ended_leases, {**BODIES[path], "kv_transfer_params": TO_DECODE}
    ended.clear()
    of_parameter = {"sampling_params": {"temperature": -1}} if path == "/inference/v1/generate" else {"temperature": -1}
    too_long = {"token_ids": [5] * 300, "prompt": "hi " * 300, "input": "hi " * 300}
    too_long["messages"] = [{"role": "user", "content": "hi " * 300}]
    for wrong in (of_parameter, {name: too_long[name] for name in too_long.keys() & body.keys()}, {"priority": "x"}):
        num_sent = len(decode_core.requests)
        reply = decode.post(path, {**body, **wrong})
        assert reply.status_code == 400 and len(decode_core.requests) == num_sent, reply.text
        wait_until(lambda: ended == [PULLED], f"the lease of {wrong} is kept")
        ended.clear()
    assert decode.post(path, body).status_code == 200
    assert decode.post(path, {**body, **of_parameter, "kv_transfer_params": {**TO_DECODE, "remote_port": 0}}).status_code == 400
    assert prefill.post(path, body).status_code == 400
    assert not ended and not prefill_core.ended_leases


def test_what_has_no_single_prompt_is_refused(prefill: Client, roleless: Client) -> None:
    kept = {"kv_transfer_params": TO_PREFILL}
    for path, body, text in (
        ("/v1/completions", {"prompt": ["hi", "one"]}, "belong to one prompt, but prompt has 2; send a request for each"),
        ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "n": 2}, "cannot be combined with use_beam_search"),
        ("/v1/chat/completions/batch", {"messages": [HI["messages"]] * 2}, "kv_transfer_params is not supported for several"),
        ("/v1/embeddings", {"input": "hi"}, "kv_transfer_params is not supported; use one engine for vectors"),
    ):
        refused = prefill.post(path, {**body, **kept})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params", refused.text
        assert text in refused.json()["error"]["message"]
    limits = {"kv_transfer_params": {"do_remote_decode": False}}
    assert roleless.post("/v1/completions", {"prompt": ["hi", "one"], **limits}).status_code == 200


def test_every_answer_of_a_pulled_prompt_names_its_lease(decode: Client, decode_core: FakeEngineCore) -> None:
    assert decode.complete(kv_transfer_params=TO_DECODE, n=3).status_code == 200
    assert [request.options.kv_transfer for request in decode_core.requests[-3:]] == [PULLED] * 3


def test_rendered_requests_keep_the_parameters(roleless: Client) -> None:
    for path, body in (("/v1/completions/render", {"prompt": "hi"}), ("/v1/chat/completions/render", HI)):
        rendered = roleless.post(path, {**body, "kv_transfer_params": {"do_remote_decode": False}})
        assert rendered.status_code == 200, rendered.text
        found = rendered.json()
        assert (found[0] if isinstance(found, list) else found)["kv_transfer_params"] == {"do_remote_decode": False}


def test_blocks_that_a_decode_engine_fetched_are_no_source_of_cached_tokens() -> None:
    loaded = RequestMetrics(0.0, num_cached_tokens=48, loaded_tokens={"peer": 48})
    output = RequestOutput("r", None, [1] * 50, [], True, num_cached_tokens=16, metrics=loaded)
    for count in (Usage.set_cached, Usage.add_cached):
        usage = Usage()
        count(usage, output)
        assert usage.as_dict()["prompt_tokens_details"] == {"cached_tokens": 16, "created_cache_tokens": 0}
