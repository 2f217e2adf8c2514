"""`jaxllm serve` with a model that sees images: every API gives the answer of `LLM`, and bad images cost their own request alone."""

import base64
import concurrent.futures
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from tests.helpers import peft_files, pictures, vision_checkpoint
from tests.helpers.images import encoded
from tests.helpers.seeing_core import data_url
from tests.helpers.serve_processes import ROOT, ServerProcess, serving
from tests.helpers.waiting import wait_until
from tests.server.client import events
from tests.server.test_images import BAD_FILES

pytestmark = pytest.mark.slow

SMALL = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "decode_buckets": (4,),
    "block_size": 16,
    "kv_cache_memory_bytes": 4 << 20,
    "mm_max_patches": 1024,
    "max_logprobs": 5,
    "warmup": "lazy",  # idle engine processes would compile what nothing here needs
}
FILE = encoded(Image.fromarray(pictures.picture(5, 90, 130)))
IMAGE = {"type": "image_url", "image_url": {"url": data_url(FILE)}}
TEXT = "what is it?"
MESSAGES = [{"role": "user", "content": [IMAGE, {"type": "text", "text": TEXT}]}]
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoint.write(tmp_path_factory.mktemp("seeing") / "model", tied=False)


def flags(**options: Any) -> list[str]:
    """Options of the command line."""
    found = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif isinstance(value, tuple):
            found += [flag, ",".join(map(str, value))]
        else:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def started(server: ServerProcess) -> ServerProcess:
    wait_until(
        lambda: "curl --unix-socket" in server.log() or server.process.poll() is not None, "the server does not start", 300
    )
    assert server.process.poll() is None, server.log()
    return server


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An engine that has an adapter."""
    place = tmp_path_factory.mktemp("server")
    peft_files.write(place / "style", directory, targets=["q_proj", "down_proj"], strength=0.3)
    more = {
        "lora_modules": f"style={place / 'style'}",
        "enable_lora": True,
        "max_loras": 1,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "enable_dev_endpoints": True,
        "enable_prompt_tokens_details": True,
        "limit_mm_per_prompt": {"image": 8},
        "served_model_name": "seer",
        "allowed_media_domains": "*",
    }
    with serving(directory, place, command=("serve", *flags(**SMALL, **more))) as found:
        yield started(found)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as found:
        yield found


@pytest.fixture(scope="module")
def expected(directory: Path) -> str:
    """Text that a script gets."""
    llm = LLM(str(directory), use_progress_bar=False, **SMALL)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    parts = [{"type": "image_pil", "image_pil": Image.open(io.BytesIO(FILE))}, {"type": "text", "text": TEXT}]
    (chat,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    (plain,) = llm.generate(
        {
            "prompt": f"<|im_start|>user{vision_checkpoint.QWEN_PICTURE}{TEXT}<|im_end|><|im_start|>assistant",
            "multi_modal_data": {"image": np.asarray(Image.open(io.BytesIO(FILE)))},
        },
        params,
        use_tqdm=False,
    )
    assert plain.outputs[0].token_ids == chat.outputs[0].token_ids
    llm.shutdown()
    text = chat.outputs[0].text
    assert len(set(chat.outputs[0].token_ids)) > 4
    return text


def chat(client: httpx.Client, messages: Any = MESSAGES, **more: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "seer", "messages": messages, **GREEDY, **more})


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def answer_of_chats(client: httpx.Client) -> str:
    return text_of(chat(client))


def answer_of_streams(client: httpx.Client) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(chat(client, stream=True)))


def answer_of_responses(client: httpx.Client) -> str:
    parts = [{"type": "input_image", "image_url": data_url(FILE)}, {"type": "input_text", "text": TEXT}]
    body = {"model": "seer", "input": [{"role": "user", "content": parts}], "max_output_tokens": 12, **GREEDY}
    body.pop("max_tokens")
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["output"][-1]["content"][0]["text"])


def answer_of_messages(client: httpx.Client) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    body = {"model": "seer", "messages": [{"role": "user", "content": parts}], **GREEDY}
    reply = client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["content"][0]["text"])


def answer_of_ollama(client: httpx.Client) -> str:
    message = {"role": "user", "content": TEXT, "images": [base64.b64encode(FILE).decode()]}
    body = {"model": "seer", "messages": [message], "stream": False, "options": {"temperature": 0, "num_predict": 12}}
    reply = client.post("/api/chat", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["message"]["content"])


def answer_of_batches(client: httpx.Client) -> str:
    reply = client.post("/v1/chat/completions/batch", json={"model": "seer", "messages": [MESSAGES], **GREEDY})
    return text_of(reply)


@pytest.mark.parametrize(
    "answer", [answer_of_chats, answer_of_streams, answer_of_responses, answer_of_messages, answer_of_ollama, answer_of_batches]
)
def test_every_api_gives_the_answer_of_a_script(
    client: httpx.Client, expected: str, answer: Callable[[httpx.Client], str]
) -> None:
    assert answer(client) == expected


def test_the_command_line_gives_it_too(
    directory: Path, tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(FILE)
    small = flags(**SMALL)
    told = ["--image", str(tmp_path / "a.png"), "--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
    for arguments in (
        ["generate", "-q", "--model", str(directory), "--chat", *told, *small, TEXT],
        ["chat", "-q", "--model", str(directory), *told, *small, "--quick", TEXT],
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().out.strip() == expected.strip()


def test_several_answers_logprobs_and_grammars(client: httpx.Client, expected: str) -> None:
    reply = chat(client, logprobs=True, top_logprobs=2, n=2, temperature=0.01, seed=1)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert len(choices) == 2 and all(len(choice["logprobs"]["content"]) == 12 for choice in choices)
    assert reply.json()["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 12}
    other = data_url(encoded(Image.fromarray(pictures.picture(6, 90, 130))))
    shown = chat(
        client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": other}}, MESSAGES[0]["content"][1]]}]
    )
    assert text_of(shown) != expected, "the answer depends on the image"
    chosen = chat(client, structured_outputs={"choice": ["a cat", "a dog"]}, ignore_eos=False, max_tokens=20)
    assert text_of(chosen) in ("a cat", "a dog")
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["x"]}}, "required": ["at"]}}
    called = chat(
        client, tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=100, ignore_eos=False
    )
    assert called.status_code == 200, called.text
    (call,) = called.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look" and call["function"]["arguments"].lstrip().startswith("{")


def counter(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^jaxllm:{name}{{.*}} (\S+)$", text, re.M))


def test_an_image_seen_before_is_in_the_prefix_cache(client: httpx.Client, expected: str) -> None:
    messages = [{"role": "system", "content": "x" * 64}, *MESSAGES]
    first = chat(client, messages)
    hits = counter(client, "prefix_cache_hits_total")
    again = chat(client, messages)
    assert text_of(again) == text_of(first)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64 and counter(client, "prefix_cache_hits_total") - hits == cached


def test_an_adapter_sees_the_same_image(client: httpx.Client, expected: str) -> None:
    assert text_of(chat(client, model="style")) != expected
    assert text_of(chat(client)) == expected


def test_clients_that_leave_while_their_image_is_encoded(client: httpx.Client, server: ServerProcess, expected: str) -> None:
    def leave(seed: int) -> None:
        large = data_url(encoded(Image.fromarray(pictures.picture(100 + seed, 480, 480))))
        with server.client() as own:
            own.timeout = httpx.Timeout(0.02 + 0.02 * seed)
            try:
                chat(own, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": large}}]}], max_tokens=200)
            except httpx.TimeoutException:
                return

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(8)))
    wait_until(
        lambda: not counter(client, "num_requests_running") + counter(client, "num_requests_waiting"), "requests are left"
    )
    assert text_of(chat(client)) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_images_are_encoded_again_after_sleep(client: httpx.Client, expected: str, level: int) -> None:
    """With weights that are copied back, and with weights that are read again."""
    assert text_of(chat(client)) == expected
    encoded_before = counter(client, "mm_encoder_patches_total")
    assert client.post(f"/sleep?level={level}").status_code == 200
    assert client.post("/wake_up").status_code == 200
    assert text_of(chat(client)) == expected
    assert counter(client, "mm_encoder_patches_total") > encoded_before, "the slab was lost"


def test_conversations_with_images_become_vectors(client: httpx.Client) -> None:
    def vector(file: bytes) -> np.ndarray:
        parts = [image_of(file), {"type": "text", "text": TEXT}]
        reply = client.post("/v1/embeddings", json={"model": "seer", "messages": [{"role": "user", "content": parts}]})
        assert reply.status_code == 200, reply.text
        return np.array(reply.json()["data"][0]["embedding"])

    other = encoded(Image.fromarray(pictures.picture(6, 90, 130)))
    found = vector(FILE)
    np.testing.assert_allclose(found, vector(FILE), atol=1e-5)
    assert np.abs(found - vector(other)).max() > 1e-3


def refused(client: httpx.Client, parts: list[dict[str, Any]], status: int = 400) -> str:
    reply = chat(client, [{"role": "user", "content": parts}])
    assert reply.status_code == status, reply.text[:500]
    message = str(reply.json()["error"]["message"])
    assert "Traceback" not in message and len(message) < 600
    return message


def image_of(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def test_bad_images_cost_their_own_request_alone(client: httpx.Client, server: ServerProcess, expected: str) -> None:
    files = {
        **BAD_FILES,
        "ratio": encoded(Image.new("L", (2000, 2))),
    }
    for kind, file in files.items():
        assert "messages[0].content[0]" in refused(client, [image_of(file)]), kind
        assert text_of(chat(client)) == expected, kind
    urls = {
        "data:image/png;base64,!!": "base64",
        "http://127.0.0.1:1/a.png": "private or special address",
        "http://localhost:1/a.png": "private or special address",
        "http://[::1]/a.png": "private or special address",
        "http://169.254.169.254/latest": "private or special address",
        "file:///etc/passwd": "--allowed-local-media-path",
        "ftp://example.com/a.png": "",
    }
    for url, told in urls.items():
        assert told in refused(client, [{"type": "image_url", "image_url": {"url": url}}]), url
    small = image_of(encoded(Image.new("1", (32, 32))))
    assert "At most 8 image(s)" in refused(client, [small] * 400)
    assert "1001 entries" in refused(client, [small] * 1000)
    assert text_of(chat(client)) == expected
    assert not re.search("Traceback|Warning|DecompressionBomb", server.log()), server.log()


def test_images_of_odd_kinds_work(client: httpx.Client, expected: str) -> None:
    pixels = pictures.picture(5, 90, 130)
    deep = Image.fromarray(np.arange(90 * 130, dtype=np.uint16).reshape(90, 130) * 5)
    frames = [Image.fromarray(pictures.picture(seed, 90, 130)) for seed in (5, 6)]
    animated = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert text_of(chat(client, [{"role": "user", "content": [image_of(animated), MESSAGES[0]["content"][1]]}])) == expected
    for file in (
        encoded(deep),
        encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
        encoded(Image.new("RGB", (1, 1))),
        encoded(Image.new("RGB", (6000, 32))),
        encoded(Image.new("RGB", (32, 6300))),
        encoded(Image.fromarray(pixels).convert("P"), "GIF"),
    ):
        reply = chat(client, [{"role": "user", "content": [image_of(file)]}])
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 12, reply.text


def test_placeholders_without_images_are_refused(client: httpx.Client, expected: str) -> None:
    reply = client.post("/v1/completions", json={"model": "seer", "prompt": vision_checkpoint.QWEN_PICTURE, "max_tokens": 1})
    assert reply.status_code == 400 and "1 image placeholder(s)" in reply.text and str(ROOT) not in reply.text
    assert text_of(chat(client)) == expected
