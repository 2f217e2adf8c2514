"""`jaxllm serve demo --prefill 1 --decode 2`: real engines behind one URL answer as one engine does."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.helpers.serve_processes import ServerProcess, serving
from tests.helpers.tiers import need_tiers
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

TEXT = "Once upon a time there was a little cat who liked to play in the garden with her friend the dog. "
FLAGS = (
    "--prefill",
    "1",
    "--decode",
    "2",
    "--prefill-threshold",
    "32",
    "--kv-offloading-size",
    "0.2",
    "--kv-pull-timeout",
    "20",
    "--max-model-len",
    "512",
    "--retry-on-engine-death",
)
PREFILLS, DECODES = (0,), (1, 2)
"""Ranks of the engines."""
SMALL = ("--max-num-seqs", "4", "--decode-buckets", "4", "--token-buckets", "64", "--warmup", "lazy")
SMALL += ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1}')
CHUNKS = ("--max-num-batched-tokens", "64")
"""Blocks of a prompt are fetched while later ones are computed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    need_tiers()
    with serving("demo", tmp_path_factory.mktemp("server"), command=("serve", *FLAGS, *SMALL, *CHUNKS)) as server:
        wait_until(lambda: _states(server) == ["serving"] * 3, "the server did not start")
        yield server
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        server.end()
        server.assert_nothing_left(children)


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


def metric(client: httpx.Client, name: str, rank: int) -> float:
    """A metric of an engine, over all of its other labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"jaxllm:{name}{{")]
    return sum(float(line.split()[-1]) for line in lines if f'engine="{rank}"' in line)


def until(client: httpx.Client, name: str, rank: int, holds: Callable[[float], bool]) -> None:
    """Wait until a metric is as it must be."""
    deadline = time.monotonic() + 120
    while not holds(value := metric(client, name, rank)):
        assert time.monotonic() < deadline, f"{name} of engine {rank} stays {value:g}"
        time.sleep(0.05)


@contextmanager
def kept_busy(ask: Callable[[str, int], list[str]], name: str) -> Iterator[dict[int, list[str]]]:
    """Keep 16 requests under way, each of another number. At the end wait for all answers, which are then in what it gives, by number.
    A fixed count of requests may be over before a metric shows one of them."""
    answers: dict[int, list[str]] = {}
    numbers, ended = count(), Event()

    def go_on() -> None:
        while not ended.is_set():
            number = next(numbers)
            answers[number] = ask(name, number)

    with ThreadPoolExecutor(16) as pool:
        workers = [pool.submit(go_on) for _ in range(16)]
        try:
            yield answers
        finally:
            ended.set()
        for worker in workers:
            worker.result()


def until_idle(client: httpx.Client) -> None:
    """Wait until no engine has requests, blocks in use, or prompts that it keeps."""
    for rank in (*PREFILLS, *DECODES):
        for gauge in ("kv_leases", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
            until(client, gauge, rank, (0.0).__eq__)


def loaded_bytes(client: httpx.Client, ranks: tuple[int, ...] = DECODES) -> float:
    """Bytes that decode engines have loaded from host memory, into which they fetch blocks."""
    return sum(metric(client, "kv_offload_load_bytes_total", rank) for rank in ranks)


def shared_memory(server: ServerProcess) -> set[str]:
    """The memory of prefill engines that processes have mapped, by inode."""
    maps = [(Path("/proc") / str(pid) / "maps").read_text() for pid in server.children("jaxllm.engine.process")]
    return {line.split()[4] for each in maps for line in each.splitlines() if "/memfd:jaxllm" in line}


FIRST = "time_to_first_token_seconds_count"
ANSWERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 9, "n": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f]{6,9}"}},
    {"temperature": 1.0, "seed": 4, "stop": list("aeiou "), "presence_penalty": 1.0},
)


def test_the_answer_is_that_of_one_engine(server: ServerProcess) -> None:
    """Whole and as a stream, and of prompts that end in and behind a block."""
    with server.client() as client:
        for fields in ANSWERS:
            prompt = f"{sorted(fields)} {TEXT * 5}"
            before, num_first = loaded_bytes(client), metric(client, FIRST, 0)
            answer = complete(client, prompt, **fields)
            if "stop" not in fields:  # that one ends with the first token
                wait_until(lambda before=before: loaded_bytes(client) > before, "the decode engine fetched nothing")
            until(client, FIRST, 0, (num_first + 1).__eq__)  # decode engines draw those of further answers
            alone = complete(client, prompt, **fields, prompt_logprobs=0)  # of such a request one engine computes all
            assert texts_of(answer) == texts_of(alone)
            body = {"prompt": f"again {prompt}", "max_tokens": 12, "stream": True, **fields}
            lines = [
                line for line in client.post("/v1/completions", json=body).text.split("\n\n") if line.startswith("data: {")
            ]
            choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
            streamed = ["".join(each["text"] for each in choices if each["index"] == i) for i in range(fields.get("n", 1))]
            assert streamed == texts_of(complete(client, body["prompt"], **fields, prompt_logprobs=0))
        for num_tokens in (48, 49, 63, 64):
            token_ids = [100 + num_tokens + place % 50 for place in range(num_tokens)]
            whole = {"prompt": token_ids, "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/completions", json=whole).json()
            assert texts_of(answer) == texts_of(client.post("/v1/completions", json={**whole, "prompt_logprobs": 0}).json())


EDGES: tuple[tuple[int, dict[str, Any]], ...] = (
    *((512, {"max_tokens": count}) for count in (1, 8)),
    *((511, {"max_tokens": count}) for count in (1, 8, None)),
    (510, {"max_tokens": 2}),
    (513, {"max_tokens": 1}),
    (200, {"max_tokens": 1}),
    (201, {"max_tokens": 1, "n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2}),
    (202, {"max_tokens": 0, "echo": True}),
    (203, {"echo": True}),
    (204, {"echo": True, "logprobs": 1}),
    (205, {"prompt_logprobs": 1}),
    (206, {"n": 2, "temperature": 1.0, "seed": 6, "logprobs": 2}),
)
"""Numbers of prompt tokens (--max-model-len is 512), and fields."""
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL["function"]["parameters"]}}  # type: ignore[index]


def without_scores_of_prompt(choices: list[dict[str, Any]]) -> Any:
    """Choices without what makes one engine compute all, and without what depends on the sizes of steps."""
    return rounded([{name: value for name, value in choice.items() if name != "prompt_logprobs"} for choice in choices])


def rounded(value: Any) -> Any:
    """Numbers within a value, to three digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def test_prompts_and_fields_at_their_limits_are_those_of_one_engine(server: ServerProcess) -> None:
    with server.client() as client:
        for number, (num_tokens, fields) in enumerate(EDGES):
            token_ids = [100 + number + place % 50 for place in range(num_tokens)]
            body = {"prompt": token_ids, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
            before = loaded_bytes(client)
            answer = client.post("/v1/completions", json=body)
            if num_tokens == 206:
                wait_until(lambda before=before: loaded_bytes(client) > before, "the decode engine fetched nothing")
            alone = client.post("/v1/completions", json={"prompt_logprobs": 0, **body})
            assert answer.status_code == alone.status_code == (400 if num_tokens > 511 else 200), (
                num_tokens,
                fields,
                answer.text,
            )
            if answer.status_code == 400:
                assert answer.json()["error"] == alone.json()["error"]
                continue
            found, wanted = (without_scores_of_prompt(each.json()["choices"]) for each in (answer, alone))
            assert found == wanted, (num_tokens, fields)
            for name in ("prompt_tokens", "completion_tokens"):
                assert answer.json()["usage"][name] == alone.json()["usage"][name]


def said(reply: httpx.Response) -> tuple[str, str]:
    """The arguments of the only tool call of a chat's answer or stream, or else its text; and why it ended."""
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for line in lines or [reply.text] for choice in json.loads(line)["choices"]]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    arguments = [call["function"].get("arguments") or "" for part in parts for call in part.get("tool_calls") or ()]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(arguments) or "".join(part.get("content") or "" for part in parts), reason


def test_chats_with_tools_and_schemas_are_those_of_one_engine(server: ServerProcess) -> None:
    """Whole and as streams."""
    with server.client() as client:
        for fields in ({"tools": [TOOL], "tool_choice": "required"}, {"response_format": SCHEMA}):
            for stream in (False, True):
                messages = [{"role": "user", "content": f"{stream} {sorted(fields)} {TEXT * 2}"}]
                body = {"messages": messages, "max_tokens": 60, "temperature": 0.9, "seed": 3, **fields}
                before = loaded_bytes(client)
                answer = said(client.post("/v1/chat/completions", json={**body, "stream": stream}))
                wait_until(lambda before=before: loaded_bytes(client) > before, "the decode engine fetched nothing")
                assert json.loads(answer[0])["a"] in (1, 2) and answer[1] == (
                    "stop" if "response_format" in fields else "tool_calls"
                )
                assert answer == said(client.post("/v1/chat/completions", json={**body, "prompt_logprobs": 0}))


def test_clients_that_leave_while_their_prompt_is_computed_or_their_answer_leave_nothing(server: ServerProcess) -> None:
    with server.client() as client:
        for number in range(4):
            body = {"prompt": f"left {number} {TEXT * 8}", "max_tokens": 200, "ignore_eos": True}
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.01 * (1 + number)))
            with client.stream(
                "POST", "/v1/completions", json={**body, "prompt": f"again {body['prompt']}", "stream": True}
            ) as stream:
                next(stream.iter_lines())
        until_idle(client)


def test_engines_of_each_role_that_are_killed_under_load_cost_no_answer(server: ServerProcess) -> None:
    """All engines take part, before and after. Nothing is left of what was under way: no block, no lease, no memory."""
    engines = server.children("jaxllm.engine.process")
    environments = [(Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0") for pid in engines]
    tokens = {next(each for each in found if each.startswith(b"JAXLLM_KV_TOKEN=")) for found in environments}
    assert len(engines) == 3 and len(tokens) == 1
    with ExitStack() as stack:
        client, pool = stack.enter_context(server.client()), stack.enter_context(ThreadPoolExecutor(16))
        client.timeout = 300.0  # three engines compile at the same time

        def ask(name: str, number: int) -> list[str]:
            return texts_of(complete(client, f"{name} {number}: {TEXT * 6}", temperature=0, max_tokens=16))

        def passes_on(name: str) -> None:
            """Have the prefill engine store blocks, and every decode engine fetch some."""
            counted = {0: "kv_offload_store_bytes", 1: "kv_pull_bytes", 2: "kv_pull_bytes"}
            before = {rank: metric(client, f"{each}_total", rank) for rank, each in counted.items()}
            list(pool.map(partial(ask, name), range(8)))
            for rank, each in counted.items():
                until(client, f"{each}_total", rank, before[rank].__lt__)

        passes_on("before")
        with kept_busy(ask, "killed") as answers:
            for rank, pid in ((0, min(engines)), (2, max(engines))):  # engines are started in the order of their ranks
                until(client, "num_requests_running", rank, (1.0).__le__)
                until(client, "kv_leases", rank, (0.0 if rank in DECODES else 1.0).__le__)
                os.kill(pid, signal.SIGKILL)
        for number in (0, 5, 10, 15):
            alone = {"temperature": 0, "max_tokens": 16, "prompt_logprobs": 0}
            assert answers[number] == texts_of(complete(client, f"killed {number}: {TEXT * 6}", **alone))
        wait_until(lambda: _states(server) == ["serving"] * 3, "they were not started again")
        passes_on("after")
        until_idle(client)
    wait_until(lambda: len(shared_memory(server)) == len(PREFILLS), "memory of an engine that was killed is mapped")
