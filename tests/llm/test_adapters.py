"""LoRARequests: adapters are loaded with their first use, and requests name them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.errors import AdapterError, AdapterNotFoundError, ConfigError, InvalidRequestError
from jaxllm.llm_engine import LLMEngine
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core

SHORT = SamplingParams(max_tokens=2)


@pytest.fixture
def core(model_directory: Path) -> FakeEngineCore:
    return fake_core(model_directory, enable_lora=True)


@pytest.fixture
def llm(core: FakeEngineCore) -> LLM:
    return LLM.from_config(core.config, core=core)


@pytest.fixture
def sql(tmp_path: Path) -> LoRARequest:
    return LoRARequest("sql", 1, adapter(tmp_path / "sql"))


def adapter(path: Path) -> str:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return str(path)


def adds(core: FakeEngineCore) -> list[Any]:
    return [call[1:] for call in core.calls if call[0] == "add"]


def test_an_adapter_is_loaded_once_and_every_call_can_name_it(llm: LLM, core: FakeEngineCore, sql: LoRARequest) -> None:
    llm.generate(["a", "b"], SHORT, use_tqdm=False, lora_request=[sql, None])
    assert [request.options.adapter for request in core.requests] == ["sql", None]
    core.requests.clear()
    llm.generate("a", SamplingParams(max_tokens=2, n=2), use_tqdm=False, lora_request=sql)
    llm.chat(
        [{"role": "user", "content": "a"}], SHORT, chat_template="{{ messages[0].content }}", use_tqdm=False, lora_request=sql
    )
    list(llm.generate_iter("a", SHORT, lora_request=sql))
    llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2), lora_request=sql)
    llm.embed("a", use_tqdm=False, lora_request=sql)
    llm.score("a", "b", use_tqdm=False, lora_request=sql)
    assert len(core.requests) >= 9 and {request.options.adapter for request in core.requests} == {"sql"}
    assert adds(core) == [("sql", sql.lora_path, False)]
    engine = llm.llm_engine
    engine.add_request("x", "a", SHORT, lora_request=sql)
    assert core.requests[-1].options.adapter == "sql"


def test_calls_with_names_of_vllm(llm: LLM, core: FakeEngineCore, sql: LoRARequest, tmp_path: Path) -> None:
    other = LoRARequest("other", 2, adapter(tmp_path / "other"))
    assert llm.add_lora(sql) and not llm.add_lora(sql) and llm.llm_engine.add_lora(other)
    assert llm.list_loras() == {1, 2} and [info.name for info in llm.list_adapters()] == ["sql", "other"]
    assert llm.pin_lora(1) and core.adapters["sql"].is_pinned
    assert llm.remove_lora(2) and not llm.remove_lora(2) and not llm.remove_lora("other") and llm.list_loras() == {1}
    llm.load_adapter("third", other.lora_path)
    assert llm.list_loras() == {1} and "third" in core.adapters
    again = LoRARequest("sql", 1, adapter(tmp_path / "again"), load_inplace=True)
    assert llm.add_lora(again) and core.adapters["sql"].path == again.lora_path
    assert llm.remove_lora("sql")
    llm.generate("a", SHORT, use_tqdm=False, lora_request=sql)
    assert core.adapters["sql"].path == sql.lora_path


def test_bad_requests_name_the_fault_and_run_nothing(llm: LLM, core: FakeEngineCore, sql: LoRARequest, tmp_path: Path) -> None:
    def refused(lora_request: Any, match: str, kind: type[Exception] = InvalidRequestError) -> None:
        with pytest.raises(kind, match=match):
            llm.generate("a", SHORT, use_tqdm=False, lora_request=lora_request)

    refused(object(), "lora_request is a object, must be a LoRARequest")
    refused([sql, sql], "lora_request has 2 entries for 1 prompts")
    refused(LoRARequest("x", 9, str(tmp_path / "no such")), "neither a directory nor a hub id", AdapterError)
    refused(LoRARequest("x", 9, str(tmp_path)), "adapter_config.json is missing", AdapterError)
    (tmp_path / "file").touch()
    refused(LoRARequest("x", 9, str(tmp_path / "file")), "is a file; give the directory", AdapterError)
    llm.add_lora(sql)
    refused(
        LoRARequest("sql", 1, adapter(tmp_path / "b")),
        "is loaded from .*sql, not from .*b; remove it first, or set load_inplace",
    )
    refused(LoRARequest("b", 1, str(tmp_path / "b")), "lora_int_id 1 is of adapter 'sql'")
    with pytest.raises(InvalidRequestError, match="no adapter has lora_int_id 7"):
        llm.pin_lora(7)
    assert not core.requests
    core.adapters.clear()
    refused(sql, "there is no adapter 'sql'", AdapterNotFoundError)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("", 1, "/a"), "lora_name is ''"),
        (("a\nb", 1, "/a"), "printable text"),
        (("a", 0, "/a"), "lora_int_id is 0"),
        (("a", 1, ""), "lora_path is ''"),
    ],
)
def test_fields_of_a_lora_request(fields: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        LoRARequest(*fields)


def test_without_enable_lora_there_is_a_way_out(model_directory: Path, sql: LoRARequest) -> None:
    core = fake_core(model_directory)
    engine = LLMEngine(core=core)
    for call in (lambda: engine.add_lora(sql), lambda: engine.add_request("x", "a", SHORT, lora_request=sql)):
        with pytest.raises(InvalidRequestError, match=r"start it with enable_lora=True \(--enable-lora\)"):
            call()
    assert engine.list_loras() == set() and not core.requests


def test_many_tasks_load_an_adapter_once(core: FakeEngineCore, sql: LoRARequest) -> None:
    async def main() -> None:
        with AsyncLLM(core=core) as llm:

            async def answer(number: int) -> str:
                return [output async for output in llm.generate("a", SHORT, str(number), sql)][-1].outputs[0].text

            await answer(0)
            assert await asyncio.gather(*(answer(number) for number in range(1, 4))) == ["one two"] * 3
            assert (await llm.beam_search("a", BeamSearchParams(beam_width=1, max_tokens=1), "b", sql)).finished
            assert {request.options.adapter for request in core.requests} == {"sql"} and len(adds(core)) == 1
            assert await llm.list_loras() == {1} and await llm.remove_lora(1) and await llm.list_loras() == set()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_lora_rank": 513}, "max_lora_rank is 513, must be 1 to 512"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras is 2, must be at least max_loras, 4"),
        ({"lora_dtype": "int8"}, "lora_dtype is 'int8'"),
        ({"lora_target_modules": []}, "lora_target_modules is"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig.from_options(enable_lora=True, **options)
    assert [EngineConfig.from_options(max_lora_rank=rank).lora.padded_rank for rank in (1, 8, 9, 320, 321)] == [
        8,
        8,
        16,
        320,
        512,
    ]


def test_options_without_enable_lora_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    from jaxllm.llm_engine import check_model

    check_model(EngineConfig.from_options(max_loras=3))
    assert "max_loras=3 changes nothing without enable_lora" in caplog.text
