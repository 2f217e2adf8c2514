"""Models and vectors of ollama's API, by the client of ollama."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from server.ollama.about import Checkpoint, family_of, rounded
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer
from tests.server.canned import SAID
from tests.server.client import Client
from tests.server.conftest import options

ollama = pytest.importorskip("ollama")

CONFIG = {"torch_dtype": "bfloat16", "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096}
Ask = Callable[..., Any]


def write_model(directory: Path) -> Path:
    """A model directory without weights."""
    write_tokenizer(directory, chat_template="{{ tools }}" + CHAT_TEMPLATE, generation_config={"temperature": 0.5, "top_k": 9})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    weights = {"model.norm.weight": np.ones(8, np.float32), "model.experts_blocks": np.ones((3, 4), np.uint8)}
    save_file({**weights, "model.experts_scales": np.ones(3, np.uint8)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Calls a method of the client of ollama."""
    directory = write_model(tmp_path_factory.mktemp("ollama") / "tiny")
    given = options(served_model_name=None, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    with AsyncLLM(core=fake_core(directory, SAID, max_model_len=1000)) as engine, Client(create_app(engine, given)) as runner:

        async def call(method: str, arguments: dict[str, Any]) -> Any:
            client = ollama.AsyncClient("http://localhost", transport=httpx.ASGITransport(runner.app))
            reply = await getattr(client, method)(**arguments)
            return [piece async for piece in reply] if arguments.get("stream") else reply

        yield lambda method, **arguments: runner.run(call(method, arguments))


def test_the_client_lists_the_model_with_size_digest_and_details(ask: Ask) -> None:
    [listed], [loaded] = ask("list").models, ask("ps").models
    for found in (listed, loaded):
        assert (found.model, len(bytes.fromhex(found.digest))) == ("tiny", 32) and found.digest == listed.digest
        assert found.size > 8 * 4 + 12 + 3
        assert (found.details.format, found.details.family, found.details.parameter_size) == ("safetensors", "llama", "32")
        assert found.details.quantization_level == "BF16"
    assert listed.modified_at.year > 2000 and loaded.expires_at.year == 9999 and loaded.context_length == 1000


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_the_client_shows_what_the_model_can_do(ask: Ask, name: str) -> None:
    shown = ask("show", model=name)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == "{{ tools }}" + CHAT_TEMPLATE
    assert shown.parameters.split() == ["temperature", "0.5", "top_k", "9"]
    info = {"architecture": "llama", "parameter_count": 32}
    assert {name: shown.modelinfo[f"general.{name}"] for name in info} == info
    assert (shown.modelinfo["llama.block_count"], shown.modelinfo["llama.context_length"]) == (2, 1000)
    assert shown.modelfile == "FROM tiny\nPARAMETER temperature 0.5\nPARAMETER top_k 9"


def test_the_client_gets_vectors_of_length_one(ask: Ask) -> None:
    several = ask("embed", model="tiny", input=["one two", "x " * 900])
    assert [len(vector) for vector in several.embeddings] == [8, 8] and several.prompt_eval_count > 900
    assert np.linalg.norm(several.embeddings, axis=1) == pytest.approx(1)
    one = ask("embed", model="tiny", input="one two")
    assert list(one.embeddings[0]) == pytest.approx(list(ask("embeddings", model="tiny", prompt="one two").embedding))
    assert len(ask("embed", model="tiny", input=[]).embeddings) == 0
    with pytest.raises(ollama.ResponseError, match="length"):
        ask("embed", model="tiny", input="x " * 900, truncate=False)


def test_the_client_chats(ask: Ask) -> None:
    def weather(city: str) -> str:
        """The weather."""
        return city

    def time(zone: str) -> str:
        """The time."""
        return zone

    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [weather, time], "think": True}
    whole, pieces = ask("chat", **asked), ask("chat", **asked, stream=True)
    for messages in ([whole.message], [piece.message for piece in pieces]):
        assert "".join(message.thinking or "" for message in messages) == "I must look it up."
        assert "".join(message.content or "" for message in messages) == "Let me see."
        assert [call.function.name for message in messages for call in message.tool_calls or ()] == ["weather", "time"]
    assert ask("generate", model="tiny", prompt="hi", raw=True).response == SAID
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        ask("chat", model="other", messages=[])


def test_a_digest_changes_with_the_files_alone(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "a")
    first = Checkpoint.read(directory)
    assert Checkpoint.read(directory.rename(tmp_path / "b")) == first
    os.utime(tmp_path / "b" / "model.safetensors", (5, 5))
    assert Checkpoint.read(tmp_path / "b").digest != first.digest
    (tmp_path / "b" / "model.safetensors").write_bytes(b"no header")
    assert Checkpoint.read(tmp_path / "b").num_parameters is None


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("Qwen2ForCausalLM", "qwen2"), ("GPT2LMHeadModel", "gpt2"), ("Gemma3ForConditionalGeneration", "gemma3"), ("Qwen3Model", "qwen3")],
)  # fmt: skip
def test_families_are_called_as_in_ollama(architecture: str, family: str) -> None:
    assert family_of(architecture) == family


@pytest.mark.parametrize(
    ("count", "text"), [(8 * 10**9, "8B"), (8_030_261_248, "8.0B"), (134_515_008, "134.52M"), (1500, "1.50K"), (7, "7")]
)
def test_numbers_of_parameters_are_written_as_in_ollama(count: int, text: str) -> None:
    assert rounded(count) == text
