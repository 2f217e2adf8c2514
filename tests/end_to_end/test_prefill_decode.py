"""`jaxllm serve demo --prefill 1 --decode 1`: real engines behind one URL answer as one engine does."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.goldens import golden
from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

TEXT = "Once upon a time there was a little cat who liked to play in the garden with her friend the dog. "
FLAGS = (
    "--prefill",
    "1",
    "--decode",
    "1",
    "--prefill-threshold",
    "32",
    "--kv-offloading-size",
    "0.1",
    "--kv-pull-timeout",
    "20",
    "--max-model-len",
    "512",
)
SMALL = ("--max-num-seqs", "4", "--decode-buckets", "4", "--warmup", "lazy", "--enable-prompt-tokens-details")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("demo", tmp_path_factory.mktemp("server"), command=("serve", *FLAGS, *SMALL)) as server:
        wait_until(lambda: _states(server) == ["serving", "serving"], "the server did not start")
        yield server


def _states(server: ServerProcess) -> list[str]:
    try:
        with server.client() as client:
            return [replica["state"] for replica in client.get("/health").json().get("replicas", ())]
    except httpx.TransportError:
        return []


def complete(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 12, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def loaded_bytes(client: httpx.Client) -> float:
    """Bytes that the decode engine has loaded from host memory, into which it fetches blocks."""
    lines = [
        line for line in client.get("/metrics").text.splitlines() if line.startswith("jaxllm:kv_offload_load_bytes_total{")
    ]
    return sum(float(line.split()[-1]) for line in lines if 'engine="1"' in line)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 9, "n": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f]{6,9}"}},
    ],
    ids=["greedy", "seeded", "three answers", "grammar"],
)
def test_the_answer_is_that_of_one_engine(server: ServerProcess, fields: dict[str, Any]) -> None:
    prompt = f"{sorted(fields)} {TEXT * 5}"
    with server.client() as client:
        before = loaded_bytes(client)
        answer = complete(client, prompt, **fields)
        wait_until(lambda: loaded_bytes(client) > before, "the decode engine fetched nothing")
        alone = complete(client, prompt, **fields, prompt_logprobs=0)  # of such a request one engine computes all
        assert texts_of(answer) == texts_of(alone)
        body = {"prompt": f"again {prompt}", "max_tokens": 12, "stream": True, **fields}
        lines = [line for line in client.post("/v1/completions", json=body).text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
        streamed = ["".join(each["text"] for each in choices if each["index"] == index) for index in range(fields.get("n", 1))]
        assert streamed == texts_of(complete(client, body["prompt"], **fields, prompt_logprobs=0))


@pytest.mark.parametrize("num_tokens", [48, 49, 63, 64])
def test_prompts_of_whole_and_partial_blocks(server: ServerProcess, num_tokens: int) -> None:
    prompt = [100 + num_tokens + place % 50 for place in range(num_tokens)]
    with server.client() as client:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/completions", json=fields).json()
        assert texts_of(answer) == texts_of(client.post("/v1/completions", json={**fields, "prompt_logprobs": 0}).json())


def test_a_prefill_engine_that_is_killed_costs_no_answer(server: ServerProcess) -> None:
    with server.client() as client:
        pids = {pid: (Path(f"/proc/{pid}") / "environ").read_bytes() for pid in server.children("jaxllm.engine.process")}
        tokens = {next(each for each in found.split(b"\0") if each.startswith(b"JAXLLM_KV_TOKEN=")) for found in pids.values()}
        assert len(pids) == 2 and len(tokens) == 1
        os.kill(min(pids), signal.SIGKILL)  # rank 0 was started first
        fields: dict[str, Any] = {"temperature": 0}
        answer = complete(client, f"killed {TEXT * 5}", **fields)
        assert texts_of(answer) == texts_of(complete(client, f"killed {TEXT * 5}", **fields, prompt_logprobs=0))
        wait_until(lambda: _states(server) == ["serving", "serving"], "it was not started again")
        before = loaded_bytes(client)
        complete(client, f"after that {TEXT * 5}", **fields)
        wait_until(lambda: loaded_bytes(client) > before, "the decode engine fetched nothing from the new one")


def test_states_by_row_come_with_the_blocks_of_a_prompt(tmp_path: Path) -> None:
    """A model with linear attention, whose prompts no engine can begin in the middle."""
    flags = (*FLAGS[:4], "--prefill-threshold", "64", "--kv-offloading-size", "0.02", "--skip-tokenizer-init", *SMALL)
    with serving(golden("qwen3_next").directory, tmp_path, command=("serve", *flags)) as server:
        wait_until(lambda: _states(server) == ["serving", "serving"], "the server did not start")
        with server.client() as client:
            for num_tokens in (97, 112, 113):
                fields: dict[str, Any] = {
                    "prompt": [(num_tokens + place * place) % 60 for place in range(num_tokens)],
                    "max_tokens": 12,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                before = loaded_bytes(client)
                answer = client.post("/v1/completions", json=fields).json()
                wait_until(lambda before=before: loaded_bytes(client) > before, "the decode engine fetched nothing")
                alone = client.post("/v1/completions", json={**fields, "prompt_logprobs": 0}).json()
                assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
