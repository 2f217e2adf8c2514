"""Adapters over HTTP: chosen by `model`, loaded by options, by a directory and by routes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import AdapterError, ConfigError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, FinishReason
from server.adapters import check_adapter_options, read_module
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.waiting import wait_until
from tests.server.client import Client, events
from tests.server.conftest import options

USER = [{"role": "user", "content": "hi"}]
APIS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/chat/completions/batch": {"messages": [USER, USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/embeddings": {"input": ["hi", "ho"]},
    "/v1/pooling": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/api/chat": {"messages": USER, "stream": False},
    "/api/generate": {"prompt": "hi", "raw": True, "stream": False},
}


def adapter(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of adapters, next to one that is outside it."""
    adapter(tmp_path / "outside")
    adapter(tmp_path / "root" / "sql")
    (tmp_path / "root" / "empty").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


@pytest.fixture
def core(served_directory: Path) -> FakeEngineCore:
    return fake_core(served_directory, max_model_len=200, enable_lora=True)


@pytest.fixture
def engine(core: FakeEngineCore) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=core) as engine:
        yield engine


def load_modules(client: Client) -> None:
    """Start the application."""
    client.run(client.app.state.context.adapters.load_modules())


def adds(core: FakeEngineCore) -> list[Any]:
    return [call[1:] for call in core.calls if call[0] == "add"]


def test_every_api_takes_the_name_of_an_adapter(engine: AsyncLLM, core: FakeEngineCore, root: Path) -> None:
    given = options(lora_modules=[f"one={root}/sql", f'{{"name": "two", "path": "{root}/sql", "base_model_name": "b"}}'])
    with Client(create_app(engine, given)) as client:
        load_modules(client)
        for path, body in APIS.items():
            core.requests.clear()
            reply = client.post(path, {**body, "model": "one"})
            assert reply.status_code == 200 and reply.json()["model"] == "one", (path, reply.text)
            assert core.requests and {request.options.adapter for request in core.requests} == {"one"}, path
            assert client.post(path, {**body, "model": "m"}).json()["model"] == "m"
            assert core.requests[-1].options.adapter is None
            reply = client.post(path, {**body, "model": "three"})
            assert reply.status_code == 404 and "this server has 'm', 'one', 'two'" in reply.text, path
        for path in ("/v1/completions", "/v1/chat/completions"):
            parts = events(client.post(path, {**APIS[path], "model": "two", "stream": True, "n": 2}))
            assert {part["model"] for part in parts} == {"two"} and core.requests[-1].options.adapter == "two"
        chunks = client.post("/v1/messages", {**APIS["/v1/messages"], "model": "two", "stream": True}).text
        assert '"model":"two"' in chunks
        search = {"prompt": "hi", "model": "one", "use_beam_search": True, "n": 2, "max_tokens": 2}
        assert client.post("/v1/completions", search).json()["model"] == "one" and core.requests[-1].options.adapter == "one"
        assert client.post("/tokenize", {"prompt": "hi", "model": "one"}).status_code == 200
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("m", "m", None),
            ("one", f"{root}/sql", "m"),
            ("two", f"{root}/sql", "b"),
        ]
        assert client.get("/v1/models/two").json() == cards[2]
        assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["m", "one", "two"]
        load_modules(client)  # as an API server does that is started again
    assert len(adds(core)) == 2


def test_the_directory_has_what_no_one_loaded(engine: AsyncLLM, core: FakeEngineCore, root: Path) -> None:
    with Client(create_app(engine, options(lora_dir=str(root)))) as client:

        async def twice() -> list[int]:
            context = client.app.state.context
            assert await asyncio.gather(*(context.adapter_of("sql") for _ in range(3))) == ["sql"] * 3
            return []

        client.run(twice())
        assert client.complete(model="sql").json()["model"] == "sql" and adds(core) == [("sql", f"{root}/sql", False)]
        for name in (
            "link",
            "empty",
            "..",
            ".",
            "../outside",
            "root/sql",
            str(root / "sql"),
            "sql/",
            "a\0b",
            "x" * 300,
            "nothing",
        ):
            assert client.complete(model=name).status_code == 404, name
        (root / "torn").mkdir()
        (root / "torn" / "adapter_config.json").write_text("{}")
        core.adapter_faults["torn"] = f"adapter {root}/torn: lora_A of layers.0 is 9 x 8, must be 8 x 8"
        for _ in range(2):
            reply = client.complete(model="torn")
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"
            assert reply.json()["error"]["message"] == "adapter torn: lora_A of layers.0 is 9 x 8, must be 8 x 8"
    assert len(adds(core)) == 3


def test_adapters_of_others_come_and_go(
    engine: AsyncLLM, core: FakeEngineCore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another API server loads and drops adapters."""
    with Client(create_app(engine, options())) as client:
        client.run(engine.load_adapter("sql", str(root / "sql")))
        assert client.complete(model="sql").status_code == 200
        core.adapters.clear()
        reply = client.complete(model="sql")
        assert reply.status_code == 404 and reply.json()["error"] == {
            "message": "there is no adapter 'sql'; add it first",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        monkeypatch.setattr("server.adapters.REFRESH_SECONDS", 0.0)
        assert client.complete(model="sql").status_code == 404
        wait_until(lambda: "this server has 'm'" in client.complete(model="sql").text, "names are not fetched again")
        assert client.get("/v1/models/sql").status_code == 404


def test_an_adapter_that_is_gone_ends_its_requests_alone(engine: AsyncLLM, core: FakeEngineCore, root: Path) -> None:
    def fail() -> None:
        for request_id in [id for id, running in core.running.items() if running.request.options.adapter]:
            del core.running[request_id]
            core.outputs.append(
                EngineCoreOutput(request_id, [], FinishReason.ERROR, f"{root} is gone", error_kind=ErrorKind.ADAPTER)
            )

    core.before_step = fail
    with Client(create_app(engine, options(lora_dir=str(root)))) as client:

        async def both() -> list[int]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(client.app), base_url="http://localhost") as http:
                sent = [http.post("/v1/completions", json={"prompt": "hi", "model": model}) for model in ("sql", "m")]
                replies = await asyncio.gather(*sent)
            assert replies[0].json()["error"]["code"] == "adapter_not_usable" and str(root) not in replies[0].text
            return [reply.status_code for reply in replies]

        assert client.run(both()) == [500, 200]


def test_operators_load_and_unload(engine: AsyncLLM, core: FakeEngineCore, root: Path) -> None:
    given = options(allow_runtime_lora_updating=True, api_key=["key"], admin_api_key="boss")
    with Client(create_app(engine, given), headers={"authorization": "Bearer boss"}) as client:

        def load(**body: Any) -> tuple[int, str]:
            reply = client.post("/v1/load_lora_adapter", body)
            return reply.status_code, reply.text

        def unload(name: str) -> tuple[int, str]:
            reply = client.post("/v1/unload_lora_adapter", {"lora_name": name, "lora_int_id": 1})
            return reply.status_code, reply.text

        sql = {"lora_name": "sql", "lora_path": str(root / "sql")}
        assert load(**sql) == (200, "Success: LoRA adapter 'sql' added successfully.")
        status, text = load(**sql)
        assert (
            status == 400 and "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place" in text
        )
        assert load(**sql, load_inplace=True, is_3d_lora_weight=False)[0] == 200 and adds(core)[-1][2]
        assert client.complete(model="sql").status_code == 200
        assert unload("sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
        status, text = unload("sql")
        assert status == 404 and "The lora adapter 'sql' cannot be found." in text
        assert client.complete(model="sql").status_code == 404
        status, text = load(lora_name="x", lora_path=str(root / "empty"))
        assert status == 400 and f"{root}/empty/adapter_config.json is missing" in text and '"param":"lora_path"' in text
        for body in ({"lora_name": "x"}, {**sql, "lora_name": ""}, {**sql, "lora_name": "m"}, {**sql, "lora_nam": "y"}):
            assert load(**body)[0] == 400, body
        for key, status in (("key", 403), ("wrong", 401)):
            reply = client.post("/v1/load_lora_adapter", sql, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status
    with Client(create_app(engine, options())) as client:
        reply = client.post("/v1/load_lora_adapter", sql)
        assert reply.status_code == 404 and "is there only with --allow-runtime-lora-updating" in reply.text


def test_with_a_directory_operators_load_from_it_alone(engine: AsyncLLM, core: FakeEngineCore, root: Path) -> None:
    with Client(create_app(engine, options(allow_runtime_lora_updating=True, lora_dir=str(root)))) as client:
        for path in ("sql", f"{root}/sql", "./empty/../sql"):
            assert (
                client.post(
                    "/v1/load_lora_adapter", {"lora_name": path[:3], "lora_path": path, "load_inplace": True}
                ).status_code
                == 200
            )
            assert adds(core)[-1][1] == f"{root}/sql"
        for path in ("link", "..", "../outside", str(root.parent / "outside"), ".", "/etc", "org/name", "a\0b"):
            reply = client.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
            assert reply.status_code == 400 and "is not a directory below --lora-dir" in reply.text, path


def test_a_start_with_a_bad_adapter_fails(engine: AsyncLLM, root: Path) -> None:
    client = Client(create_app(engine, options(lora_modules=[f"x={root}/empty"])))
    with client, pytest.raises(AdapterError, match="adapter_config.json is missing"):
        load_modules(client)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"lora_modules": ["a"]}, "'a' must be NAME=PATH or a JSON object"),
        ({"lora_modules": ["=x"]}, "name is ''"),
        ({"lora_modules": ["{a"]}, "is not JSON"),
        ({"lora_modules": ['{"name": "a"}']}, "must have texts as name and path"),
        ({"lora_modules": ['{"name": "a", "path": "b", "rank": 3}']}, "has the key 'rank'"),
        ({"lora_modules": ["m=x"]}, "'m' is the name of the model"),
        ({"lora_modules": ["a=x", "a=y"]}, "two adapters have the name 'a'"),
        ({"lora_dir": "/no such"}, "lora_dir is '/no such', must be a directory"),
    ],
)
def test_options_that_cannot_be(core: FakeEngineCore, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_adapter_options(options(**given).adapters, core.config, ["m"])


@pytest.mark.parametrize("given", [{"lora_modules": ["a=x"]}, {"lora_dir": "."}, {"allow_runtime_lora_updating": True}])
def test_options_need_enable_lora(core: FakeEngineCore, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} needs --enable-lora beside it"):
        check_adapter_options(options(**given).adapters, core.config.replace(enable_lora=False), ["m"])
    assert read_module("a=b=c").path == "b=c"
