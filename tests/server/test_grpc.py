"""The gRPC service over a fake engine core, through real channels."""

import asyncio
import dataclasses
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.adapters import AdapterInfo
from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import ConfigError, EngineError, OverloadedError
from jaxllm.sampling_params import IN_REQUESTS
from server.context import ServerContext
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.serve_processes import serving
from tests.server.conftest import options

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")
pytest.importorskip("grpc_reflection")

from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: E402

from server.grpc import jaxllm_pb2 as pb  # noqa: E402
from server.grpc.jaxllm_pb2_grpc import InferenceStub  # noqa: E402
from server.grpc.serve import GrpcServer  # noqa: E402
from server.grpc.service import Inference  # noqa: E402
from server.grpc.start import check_grpc  # noqa: E402

ROOT = Path(__file__).parents[2]
KEY = (("authorization", "Bearer k"),)
MAX_BYTES = 20_000


class Wire:
    """A running service and a channel to it, in a separate event loop."""

    def __init__(self, engine: AsyncLLM):
        self._runner = asyncio.Runner()
        chosen = options(host="127.0.0.1", api_key=["k", "other"], max_request_body_bytes=MAX_BYTES, max_n=4, queue_timeout=60)
        self.context = ServerContext(engine, chosen)
        self.run(self._start())

    async def _start(self) -> None:
        self.server = GrpcServer(self.context)
        await self.server.start(0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.stub = InferenceStub(self.channel)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(coroutine, 120))

    def ask(self, method: str, request: Any) -> Any:
        """The response to a request, which is made in the loop."""
        return self.run(_plain(getattr(self.stub, method), request, KEY))

    def close(self) -> None:
        self.run(self.channel.close())
        self.run(self.server.stop(0))
        self._runner.close()

    def generate(self, metadata: Any = KEY, **fields: Any) -> list[Any]:
        """Every response to a request."""

        async def collect() -> list[Any]:
            return [response async for response in self.stub.Generate(pb.GenerateRequest(**fields), metadata=metadata)]

        return self.run(collect())


@pytest.fixture(scope="module")
def wire(engine: AsyncLLM) -> Iterator[Wire]:
    wire = Wire(engine)
    yield wire
    wire.close()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def text_of(responses: list[Any]) -> str:
    return "".join(answer.text for response in responses for answer in response.outputs)


def test_a_text_is_answered_piece_by_piece(wire: Wire) -> None:
    responses = wire.generate(text="hi", request_id="mine")
    assert text_of(responses) == "one two three"
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.finished for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].outputs[0].finish_reason == "stop"
    assert len(responses[0].prompt_token_ids) == 3
    assert not any(response.prompt_token_ids for response in responses[1:])


def test_a_key_has_its_number_of_calls(wire: Wire, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.context.clients, "_most", 1)
    own = wire.context.clients.label_of(b"k", None)
    with wire.context.clients.counted(own):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            wire.generate(text="hi")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.trailing_metadata()["retry-after"] == "1"
        wire.generate(text="hi", metadata=(("authorization", "Bearer other"),))
        assert core.requests[-1].options.client not in ("", own)
    wire.generate(text="hi")
    assert core.requests[-1].options.client == own and not wire.context.clients._num_running


def test_a_request_whose_responses_nobody_reads_is_aborted(
    wire: Wire, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_script", lambda request: [70] * 1000)
    monkeypatch.setattr(core, "before_step", lambda: time.sleep(0.005))
    chosen = wire.context.options
    limits = dataclasses.replace(chosen.limits, unread_stream_timeout=0.05)
    monkeypatch.setattr(wire.context, "options", dataclasses.replace(chosen, limits=limits))

    class Call:
        def peer(self) -> str:
            return "ipv4:10.0.0.1:5"

        def invocation_metadata(self) -> Any:
            return KEY

    async def run() -> None:
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=190, ignore_eos=True))
        responses = Inference(wire.context).Generate(request, Call())
        await anext(responses)
        core.aborted.clear()
        await until(lambda: core.aborted)
        assert [response async for response in responses][-1].outputs[0].finish_reason == "abort"

    wire.run(run())


def test_token_ids_are_a_prompt_too_and_final_only_answers_once(wire: Wire, core: FakeEngineCore) -> None:
    [response] = wire.generate(token_ids=pb.TokenIds(ids=[5, 6]), final_only=True, model="m")
    assert core.requests[-1].prompt_token_ids == [5, 6]
    assert text_of([response]) == "one two three"


def test_the_model_may_be_an_adapter(wire: Wire, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.context.adapters, "_is_enabled", True)
    monkeypatch.setitem(core.adapters, "sql", AdapterInfo("sql", "/sql", 8, 1024, False, "host"))
    wire.generate(text="hi", model="sql")
    assert core.requests[-1].options.adapter == "sql"
    info = wire.ask("GetModelInfo", pb.GetModelInfoRequest())
    assert info.served_names == ["m", "sql"]


def test_parameters_reach_the_engine(wire: Wire, core: FakeEngineCore) -> None:
    sampling = pb.SamplingParams(
        temperature=0.5,
        top_k=3,
        max_tokens=2,
        stop=["x"],
        logit_bias={5: 1.5},
        logprobs=1,
        seed=-7,
        min_p=0.25,
        top_n_sigma=2,
        num_speculative_tokens=0,
    )
    responses = wire.generate(text="hi", sampling=sampling, cache_salt="s")
    request = core.requests[-1]
    params = request.sampling_params
    assert request.options.queue_timeout_seconds == 60
    assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0.5, 3, 2, ["x"])
    assert (params.logit_bias, params.logprobs, params.seed, params.min_p, params.top_n_sigma) == ({5: 1.5}, 1, -7, 0.25, 2)
    assert params.num_speculative_tokens == 0
    assert request.options.cache_salt == "s"
    places = [place for response in responses for place in response.outputs[0].logprobs]
    assert [len(place.entries) for place in places] == [2, 2]
    assert (places[0].entries[0].text, places[0].entries[0].logprob, places[0].entries[0].rank) == ("one", -0.5, 2)
    assert responses[-1].outputs[0].finish_reason == "length"


def test_max_tokens_is_cut_to_what_the_prompt_leaves(wire: Wire, core: FakeEngineCore) -> None:
    wire.generate(token_ids=pb.TokenIds(ids=[5] * 150), sampling=pb.SamplingParams(max_tokens=200))
    assert core.requests[-1].sampling_params.max_tokens == 50


def test_several_answers_have_their_index(wire: Wire) -> None:
    responses = wire.generate(text="hi", sampling=pb.SamplingParams(n=3))
    texts = ["", "", ""]
    for response in responses:
        for answer in response.outputs:
            texts[answer.index] += answer.text
    assert texts == ["one two three"] * 3


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({}, "INVALID_ARGUMENT", "prompt is empty"),
        ({"text": "hi", "sampling": pb.SamplingParams(temperature=float("nan"))}, "INVALID_ARGUMENT", "temperature"),
        ({"text": "hi", "sampling": pb.SamplingParams(temperature=-9)}, "INVALID_ARGUMENT", "temperature is -9.0, must be"),
        ({"text": "hi", "sampling": pb.SamplingParams(n=5)}, "INVALID_ARGUMENT", "n is 5, must be at most 4"),
        ({"text": "hi", "sampling": pb.SamplingParams(max_tokens=0)}, "INVALID_ARGUMENT", "max_tokens"),
        ({"text": "hi", "sampling": pb.SamplingParams(max_tokens=201)}, "INVALID_ARGUMENT", "201 output tokens"),
        ({"text": "hi", "sampling": pb.SamplingParams(stop=["a"] * 65)}, "INVALID_ARGUMENT", "stop has 65 texts"),
        ({"text": "hi", "sampling": pb.SamplingParams(thinking_token_budget=5)}, "INVALID_ARGUMENT", "end its thinking"),
        ({"text": "hi", "cache_salt": "a/b"}, "INVALID_ARGUMENT", "cache_salt"),
        ({"text": "hi", "request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id"),
        ({"token_ids": pb.TokenIds(ids=[99999])}, "INVALID_ARGUMENT", "99999"),
        ({"text": "x" * 3000}, "INVALID_ARGUMENT", "maximum context length"),
        ({"text": "x" * (MAX_BYTES + 1)}, "RESOURCE_EXHAUSTED", "larger than max"),
        ({"text": "hi", "model": "other"}, "NOT_FOUND", "'other' does not exist"),
        ({"text": "hi", "metadata": ()}, "UNAUTHENTICATED", "Bearer"),
        ({"text": "hi", "metadata": (("authorization", "Bearer wrong"),)}, "UNAUTHENTICATED", "Bearer"),
        ({"text": "hi", "metadata": (("authorization", "k"),)}, "UNAUTHENTICATED", "Bearer"),
    ],
)
def test_what_is_wrong_has_its_status(wire: Wire, fields: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        wire.generate(**fields)
    assert caught.value.code().name == code
    assert text in caught.value.details()
    assert text_of(wire.generate(text="hi")) == "one two three"


def test_bytes_that_are_no_message_are_an_invalid_argument(wire: Wire) -> None:
    async def send() -> None:
        async for _ in wire.channel.unary_stream("/jaxllm.v1.Inference/Generate")(b"\xff\xff", metadata=KEY):
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        wire.run(send())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_engine_that_fails_tells_no_secrets(wire: Wire, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EngineError("secret")

    with monkeypatch.context() as patch, pytest.raises(grpc.aio.AioRpcError) as caught:
        patch.setattr(core, "before_step", fail)
        wire.generate(text="hi")
    assert caught.value.code() is grpc.StatusCode.INTERNAL and "secret" not in caught.value.details()
    core.running.clear()
    assert text_of(wire.generate(text="hi")) == "one two three"


def test_a_full_engine_says_when_to_come_again(wire: Wire, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any) -> None:
        raise OverloadedError("too much waits", 7)

    with monkeypatch.context() as patch, pytest.raises(grpc.aio.AioRpcError) as caught:
        patch.setattr(core, "add_request", refuse)
        wire.generate(text="hi")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["retry-after"] == "7"


def test_a_cancelled_call_ends_its_request(wire: Wire, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def run() -> None:
        call = wire.stub.Generate(pb.GenerateRequest(text="hi"), metadata=KEY)
        gate.release()
        await call.read()
        call.cancel()
        await until(lambda: not wire.context.num_running)
        gate.release()
        await until(lambda: not core.running)

    wire.run(run())


def test_a_deadline_ends_its_request(wire: Wire, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def run() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.stub.Generate(pb.GenerateRequest(text="hi"), metadata=KEY, timeout=0.1).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not wire.context.num_running)
        gate.release()
        await until(lambda: not core.running)

    wire.run(run())


def test_abort_ends_requests_of_the_same_key_alone(wire: Wire, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def run() -> None:
        call = aiter(wire.stub.Generate(pb.GenerateRequest(text="hi", request_id="mine"), metadata=KEY))
        gate.release()
        await anext(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.stub.Generate(pb.GenerateRequest(text="hi", request_id="mine"), metadata=KEY).read()
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        request = pb.AbortRequest(request_ids=["mine", "mine", "unknown"])
        other = await wire.stub.Abort(request, metadata=(("authorization", "Bearer other"),))
        assert other.num_aborted == 0
        abort = asyncio.ensure_future(_plain(wire.stub.Abort, request, KEY))
        while not abort.done():
            gate.release()
            await wire.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=KEY)
        assert abort.result().num_aborted == 1
        last = [response async for response in call][-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert not core.running

    wire.run(run())


def test_model_and_server_tell_of_themselves(wire: Wire) -> None:
    model = wire.ask("GetModelInfo", pb.GetModelInfoRequest())
    assert (list(model.served_names), model.max_model_len, list(model.eos_token_ids)) == (["m"], 200, [1])
    server = wire.ask("GetServerInfo", pb.GetServerInfoRequest())
    assert (server.ready, server.num_running) == (True, 0)
    for method, request in ((wire.stub.GetModelInfo, pb.GetModelInfoRequest()), (wire.stub.Abort, pb.AbortRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            wire.run(_plain(method, request))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _plain(method: Any, request: Any, metadata: Any = ()) -> Any:
    return await method(request, metadata=metadata)


def test_health_needs_no_key_and_reflection_does(wire: Wire) -> None:
    async def run() -> None:
        health = health_pb2_grpc.HealthStub(wire.channel)
        for service in ("", "jaxllm.v1.Inference"):
            status = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(wire.channel).ServerReflectionInfo
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in reflect(iter(asked))]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        [listed] = [answer async for answer in reflect(iter(asked), metadata=KEY)]
        assert "jaxllm.v1.Inference" in [service.name for service in listed.list_services_response.service]

    wire.run(run())


def test_a_server_that_takes_no_requests_says_why(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    from server.errors import ApiError

    monkeypatch.setattr(wire.context, "refusal", ApiError(503, "the server is going to stop"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        wire.generate(text="hi")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is going to stop")


def test_the_code_in_the_repository_is_that_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *out, "server/grpc/jaxllm.proto"], cwd=ROOT, check=True
    )
    made = (tmp_path / "server/grpc/jaxllm_pb2.py").read_text()
    if _protobuf_version(made) != _protobuf_version((ROOT / "server/grpc/jaxllm_pb2.py").read_text()):
        pytest.skip("made by another version of grpcio-tools")
    for name in ("jaxllm_pb2.py", "jaxllm_pb2.pyi"):
        assert (tmp_path / "server/grpc" / name).read_text() == (ROOT / "server/grpc" / name).read_text()


def _protobuf_version(code: str) -> str:
    return next(line for line in code.splitlines() if "Protobuf Python Version" in line)


def test_the_proto_lists_the_sampling_parameters_of_requests() -> None:
    over_http_alone = {"stream_interval", "repetition_detection", "extra_args"}
    of_each_endpoint = {"max_tokens", "logprobs"}
    listed = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert listed == (IN_REQUESTS.keys() - over_http_alone) | of_each_endpoint


def test_what_keeps_it_from_starting_is_told_before_a_model_is_loaded(wire: Wire) -> None:
    given = {"host": "127.0.0.1", "port": 8000}
    check_grpc(options(**given).network)
    check_grpc(options(grpc_port=0, **given).network)
    for more, text in (
        ({"grpc_port": wire.server.port}, "cannot listen on 127.0.0.1"),
        ({"grpc_port": 8000}, "the port of HTTP"),
        ({"grpc_port": 0, "api_server_count": 2}, "must share one"),
        ({"grpc_port": 0, "ssl_certfile": "/nowhere.pem"}, "TLS file"),
        ({"grpc_port": 0, "ssl_certfile": "/nowhere.pem", "ssl_cert_reqs": 1}, "ssl_cert_reqs is 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_grpc(options(**given, **more).network)


@pytest.mark.slow
def test_a_server_that_stops_lets_calls_end_and_takes_no_more(served_directory: Path, tmp_path: Path) -> None:
    chosen = {"served_model_name": ["m"], "web": False, "shutdown_timeout": 0.5, "port": 0, "grpc_port": 0}
    with serving(served_directory, tmp_path, **chosen) as server:
        server.wait_ready()
        port = re.findall(r"gRPC at 127\.0\.0\.1:(\d+)", server.log())[0]

        async def run() -> None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = InferenceStub(channel)
                long = pb.SamplingParams(max_tokens=15_000, ignore_eos=True)
                call = aiter(stub.Generate(pb.GenerateRequest(text="hi", sampling=long)))
                assert not (await anext(call)).finished
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while True:
                        await stub.Generate(pb.GenerateRequest(text="hi")).read()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                last = [response async for response in call][-1]
                assert last.finished and last.outputs[0].finish_reason == "abort"

        asyncio.run(asyncio.wait_for(run(), 120))
        assert server.end() == 0


@pytest.mark.parametrize("is_page", [True, False])
def test_what_a_page_can_send_reaches_no_method(wire: Wire, core: FakeEngineCore, is_page: bool) -> None:
    fields = {":method": "POST", ":scheme": "http", ":path": "/jaxllm.v1.Inference/Generate", ":authority": "localhost"}
    fields |= {"content-type": "text/plain", "authorization": "Bearer k"}
    fields |= {} if is_page else {"te": "trailers"}  # which scripts cannot set
    message = pb.GenerateRequest(text="hi").SerializeToString()

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    def literal(text: str) -> bytes:
        return bytes((len(text),)) + text.encode()

    async def call() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.server.port)
        head = b"".join(b"\0" + literal(name) + literal(value) for name, value in fields.items())
        body = b"\0" + len(message).to_bytes(4, "big") + message
        frames = [frame(4, 0, 0), frame(1, 4, 1, head), frame(0, 1, 1, body)]  # SETTINGS, HEADERS, DATA
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames))
        kinds = b""
        while not set(kinds) & {0, 3, 7}:  # DATA, RST_STREAM, GOAWAY
            size, kind = int.from_bytes((found := await reader.readexactly(9))[:3], "big"), found[3]
            await reader.readexactly(size)
            kinds += bytes((kind,))
        writer.close()
        return kinds

    before = len(core.requests)
    assert (0 in wire.run(call())) != is_page
    assert len(core.requests) - before == (0 if is_page else 1)
