"""Images in all forms of all APIs, with the real preparation of images over a fake engine core."""

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import MediaFetchError
from jaxllm.media import Media
from jaxllm.media.addresses import MediaReader
from jaxllm.media.fetch import MediaFetcher
from jaxllm.request import EngineCoreRequest
from server.app import create_app
from server.batch.lines import BatchLine
from server.batch.output_file import BatchOutput
from server.batch.run import run_batch
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.seeing_core import CHAT_TEMPLATE, data_url, file_of, seeing_core, write_seeing
from tests.server.client import Client, events
from tests.server.conftest import options

RED, BLUE = file_of(), file_of(96, 32, "blue")
URL = data_url(RED)
TEXT = {"type": "text", "text": "what is it?"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def core(directory: Path) -> FakeEngineCore:
    return seeing_core(directory, limit_mm_per_prompt={"image": 3})


@pytest.fixture(scope="module")
def seeing(core: FakeEngineCore) -> Iterator[Client]:
    given = options(enable_prompt_tokens_details=True, enable_scale_out=True)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, given)) as client:
        yield client


@pytest.fixture(scope="module")
def reading(served_directory: Path) -> Iterator[Client]:
    """A client of a model that takes text alone."""
    with AsyncLLM(core=fake_core(served_directory)) as engine, Client(create_app(engine, options())) as client:
        yield client


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def prompt_of(core: FakeEngineCore, request: EngineCoreRequest | None = None) -> str:
    """The prompt of the last request, with a letter for each token of an image."""
    from jaxllm.text.tokenizer import load_tokenizer

    request = request or core.requests[-1]
    text = load_tokenizer(Path(core.config.model.model)).decode(request.prompt_token_ids, skip_special_tokens=False)
    return text.replace("<|vision_start|>", "[").replace("<|vision_end|>", "]").replace("<|image_pad|>", "i")


def sizes(core: FakeEngineCore) -> list[tuple[int, int, int]]:
    """The number of tokens, rows and columns of each image of the last request."""
    return [(item.num_tokens, *item.grid[1:]) for item in core.requests[-1].items]  # type: ignore[misc]


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}, "uuid": "mine"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"image_url": {"url": URL}},
        {"image_url": URL},
    ],
)
def test_every_form_of_chat_completions(seeing: Client, core: FakeEngineCore, part: dict[str, Any]) -> None:
    reply = seeing.chat(messages=user(part, TEXT))
    assert reply.status_code == 200, reply.text
    assert prompt_of(core).startswith("<s><|user|>[ii]what is it?</s>") and sizes(core) == [(2, 1, 2)]
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == len(core.requests[-1].prompt_token_ids)
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 2}


def test_images_stand_where_their_parts_are_in_messages_of_every_role(seeing: Client, core: FakeEngineCore) -> None:
    other = {"type": "image_url", "image_url": {"url": data_url(BLUE)}}
    messages = [
        {"role": "system", "content": [TEXT, IMAGE]},
        {"role": "assistant", "content": [other, TEXT]},
        {"role": "tool", "tool_call_id": "a", "content": [IMAGE]},
    ]
    assert seeing.chat(messages=messages).status_code == 200
    assert "what is it?[ii]</s>" in prompt_of(core) and "[iii]what is it?</s>" in prompt_of(core)
    assert sizes(core) == [(2, 1, 2), (3, 1, 3), (2, 1, 2)]
    first, _, third = core.requests[-1].items
    assert first.content_hash == third.content_hash


def test_streams_several_answers_and_usage(seeing: Client, core: FakeEngineCore) -> None:
    chunks = events(seeing.chat(messages=user(IMAGE), n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 2}
    assert [len(request.items) for request in core.requests[-2:]] == [1, 1]
    assert seeing.chat(messages=user(IMAGE), use_beam_search=True, n=2, max_tokens=2).status_code == 200
    assert len(core.requests[-1].items) == 1
    assert seeing.chat().json()["usage"]["prompt_tokens_details"].get("multimodal_tokens") is None


def test_an_image_is_named_by_a_uuid_which_is_its_clients_own(directory: Path) -> None:
    core = seeing_core(directory)
    with AsyncLLM(core=core) as engine:
        app = create_app(engine, options(api_key=["one", "two"]))
        with (
            Client(app, {"authorization": "Bearer one"}) as first,
            Client(app, {"authorization": "Bearer two"}) as second,
        ):
            named = {"type": "image_url", "image_url": None, "uuid": "u"}
            assert first.chat(messages=user(named)).status_code == 400
            assert first.chat(messages=user({**named, "image_url": URL})).status_code == 200
            assert first.chat(messages=user(named)).status_code == 200 and sizes(core) == [(2, 1, 2)]
            refused = second.chat(messages=user(named))
            assert refused.status_code == 400, "it would see the other client's image"
            assert second.chat(messages=user({**named, "image_url": data_url(BLUE)})).status_code == 200
            assert sizes(core) == [(3, 1, 3)]


def test_placeholders_that_clients_write_are_text(seeing: Client, core: FakeEngineCore) -> None:
    said = {"type": "text", "text": "see <|vision_start|><|image_pad|><|vision_end|> <|image_"}
    assert seeing.chat(messages=user(said, IMAGE, {"type": "text", "text": "pad|>"})).status_code == 200
    assert sizes(core) == [(2, 1, 2)]
    image_id = core.model_config.vision.image_token_id  # type: ignore[union-attr]
    assert core.requests[-1].prompt_token_ids.count(image_id) == 2
    assert seeing.chat(messages=user(said, {"type": "text", "text": "pad|>"})).status_code == 200
    assert image_id not in core.requests[-1].prompt_token_ids


def test_templates_of_plain_strings_have_images_before_the_text(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    core = seeing_core(write_seeing(tmp_path, chat_template=template))
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        assert client.chat(messages=user(TEXT, IMAGE, IMAGE)).status_code == 200
        assert prompt_of(core) == "<s><|user|>[ii]\n[ii]\nwhat is it?</s>"


def test_images_that_the_template_leaves_out_are_named(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'image' and message['role'] == 'user'")
    core = seeing_core(
        write_seeing(tmp_path, chat_template=template.replace("{{ part['text'] }}", "{{ part.get('text', '') }}"))
    )
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        error = client.chat(messages=[{"role": "system", "content": [IMAGE]}, *user(IMAGE)]).json()["error"]
        assert error["param"] == "messages" and "the chat template does not show the images" in error["message"]
        assert "1 image placeholder(s)" in error["message"] and "2 image(s)" in error["message"]
        assert client.chat(messages=user(IMAGE)).status_code == 200


def test_tokenize_counts_the_tokens_of_images(seeing: Client, core: FakeEngineCore) -> None:
    counted = seeing.post("/tokenize", {"messages": user(IMAGE, TEXT)}).json()
    assert seeing.chat(messages=user(IMAGE, TEXT)).json()["usage"]["prompt_tokens"] == counted["count"]
    assert counted["tokens"] == core.requests[-1].prompt_token_ids


def test_responses_take_images_in_messages_and_outputs_of_calls(seeing: Client, core: FakeEngineCore) -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "low"}
    items = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "seen"}, image]},
    ]
    reply = seeing.post("/v1/responses", {"input": items, "instructions": "be brief"})
    assert reply.status_code == 200, reply.text
    assert "<|user|>[ii]hi</s>" in prompt_of(core) and "<|tool|>seen[ii]</s>" in prompt_of(core)
    again = {"input": "and now?", "previous_response_id": reply.json()["id"]}
    assert seeing.post("/v1/responses", again).status_code == 200 and len(sizes(core)) == 2
    counted = seeing.post("/v1/responses/input_tokens", {"input": items[:1]})
    assert counted.json()["input_tokens"] > 0


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()},
        {"type": "url", "url": URL},
    ],
)
def test_messages_take_images_in_turns_and_in_results_of_tools(
    seeing: Client, core: FakeEngineCore, source: dict[str, Any]
) -> None:
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image, {"type": "text", "text": "seen"}], "is_error": True}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "well?"}, image]},
    ]
    reply = seeing.post("/v1/messages", {"max_tokens": 5, "messages": messages})
    assert reply.status_code == 200, reply.text
    prompt = prompt_of(core)
    assert "<|user|>[ii]hi</s>" in prompt and "<|tool|>Error: [ii]seen</s>" in prompt and "<|user|>well?[ii]</s>" in prompt
    counted = seeing.post("/v1/messages/count_tokens", {"messages": messages}).json()
    assert counted["input_tokens"] == len(core.requests[-1].prompt_token_ids) == reply.json()["usage"]["input_tokens"]


def test_ollama_takes_images_of_messages_and_prompts(seeing: Client, core: FakeEngineCore) -> None:
    data = base64.b64encode(RED).decode()
    chat = {"messages": [{"role": "user", "content": "hi", "images": [data, URL]}], "stream": False}
    assert seeing.post("/api/chat", chat).status_code == 200 and "<|user|>[ii][ii]hi</s>" in prompt_of(core)
    asked = {"prompt": "hi", "images": [data], "stream": False}
    assert seeing.post("/api/generate", asked).status_code == 200 and "<|user|>[ii]hi</s>" in prompt_of(core)
    refused = seeing.post("/api/generate", {**asked, "raw": True})
    assert refused.status_code == 400 and "raw" in refused.json()["error"]
    assert "vision" in seeing.post("/api/show", {"model": "m"}).json()["capabilities"]


def test_models_say_what_they_see(seeing: Client, reading: Client) -> None:
    assert seeing.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]
    assert reading.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_batches_of_conversations_have_images(seeing: Client, core: FakeEngineCore) -> None:
    reply = seeing.post("/v1/chat/completions/batch", {"messages": [user(IMAGE), user(TEXT)]})
    assert reply.status_code == 200 and [len(request.items) for request in core.requests[-2:]] == [1, 0]


def test_lines_of_batch_files_have_images(seeing: Client, tmp_path: Path) -> None:
    bodies = {"image": {"messages": user(IMAGE)}, "torn": {"messages": user({"type": "image_url", "image_url": URL[:60]})}}
    lines = [BatchLine(place, name, "/v1/chat/completions", body) for place, (name, body) in enumerate(bodies.items(), 1)]
    output = BatchOutput(tmp_path / "answers.jsonl")
    seeing.run(run_batch(seeing.app, lines, output, max_in_flight=2, is_alive=lambda: True))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 400]


def test_settings_of_a_request_are_taken_only_if_the_server_trusts_them(seeing: Client, directory: Path) -> None:
    given = {"messages": user(IMAGE), "mm_processor_kwargs": {"min_pixels": 128 * 64}}
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = seeing.post(path, given)
        assert refused.status_code == 400 and "--trust-request-mm-kwargs" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "mm_processor_kwargs"
    assert "--media-io-kwargs" in seeing.chat(media_io_kwargs={"image": {}}).text
    core = seeing_core(directory, trust_request_mm_kwargs=True)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        assert client.chat(**given).status_code == 200 and sizes(core) == [(8, 2, 4)]
        assert client.chat(messages=user(IMAGE), mm_processor_kwargs={"zoom": 2}).status_code == 400


def png(width: int, height: int) -> bytes:
    """A file whose header says so many pixels."""
    stream = io.BytesIO()
    Image.new("1", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def changed_size(width: int, height: int) -> bytes:
    """A PNG whose header alone was changed; it is checked before its checksum is."""
    file = bytearray(RED)
    file[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    import zlib

    file[29:33] = zlib.crc32(bytes(file[12:29])).to_bytes(4, "big")
    return bytes(file)


BAD_FILES = {
    "a bomb": png(10_000, 10_000),
    "a larger bomb": changed_size(60_000, 60_000),
    "truncated": file_of(300, 300, format="JPEG")[:600],
    "text": b"GIF, but not really",
    "a drawing": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a document": b"%PDF-1.7",
    "without pixels": changed_size(0, 7),
    "a line": png(2000, 2),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused_by_the_name_of_their_part(seeing: Client, kind: str) -> None:
    refused = seeing.chat(messages=user(TEXT, {"type": "image_url", "image_url": {"url": data_url(BAD_FILES[kind])}}))
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "messages[0].content[1]", error
    assert "messages[0].content[1]" in error["message"] and "Traceback" not in error["message"]
    assert seeing.chat(messages=user(IMAGE)).status_code == 200


@pytest.mark.parametrize(
    ("parts", "param", "told"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}],
            "messages[0].content[0]",
            "not valid base64",
        ),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}], "messages[0].content[0]", "without base64"),
        (
            [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/a"}}],
            "messages[0].content[0]",
            "--allowed-media-domains",
        ),
        ([{"type": "image_url", "image_url": {"url": "file:///a"}}], "messages[0].content[0]", "--allowed-local-media-path"),
        ([{"type": "image_url", "image_url": {"url": ""}}], "messages[0].content[0]", "no address"),
        ([{"type": "image_url"}], "messages[0].content[0]", "has no image"),
        ([{"type": "input_image", "file_id": "f"}], "messages[0].content[0]", "file_id"),
        ([{"type": "image_url", "image_url": {"uri": URL}}], "messages", "content"),
        ([IMAGE] * 4, "messages[0].content[0]", "At most 3 image(s) may be provided in one prompt"),
        ([{"type": "video_url", "video_url": {"url": URL}}], "messages[0].content[0]", "has 1 frame(s), must have at least 2"),
        ([{"type": "video_embeds", "video_embeds": "x"}], "messages", "'video_embeds'"),
        (
            [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}],
            "messages[0].content[0]",
            "takes no clips of audio",
        ),
        ([{"type": "image_embeds", "image_embeds": "x"}], "messages", "'image_embeds'"),
        ([{"audio_url": {"url": "x"}}], "messages[0].content[0]", "takes no clips of audio"),
        ([{"type": "image", "image": URL}], "messages", "'image'"),
        ([{}], "messages", "of type ''"),
    ],
)
def test_bad_parts_are_refused_and_the_next_request_works(
    seeing: Client, parts: list[dict[str, Any]], param: str, told: str
) -> None:
    refused = seeing.chat(messages=user(*parts))
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == param and told in error["message"], error
    assert seeing.chat(messages=user(IMAGE)).status_code == 200


def test_a_thousand_images_are_refused_before_any_is_read(seeing: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MediaReader, "read", lambda *_: pytest.fail("they are read"))
    refused = seeing.chat(messages=user(*[{"type": "image_url", "image_url": {"url": data_url(BLUE)}}] * 400))
    assert refused.status_code == 400 and "At most 3 image(s)" in refused.text
    refused = seeing.chat(messages=user(*[IMAGE] * 1000))
    assert refused.status_code == 400


def test_a_model_of_text_says_so(reading: Client) -> None:
    refused = reading.chat(messages=user(TEXT, IMAGE))
    assert refused.status_code == 400 and "this model takes text alone" in refused.json()["error"]["message"]
    assert reading.post("/api/chat", {"messages": [{"role": "user", "images": ["AA=="]}]}).status_code == 400
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    assert reading.post("/v1/responses", {"input": items}).json()["error"]["param"] == "input"
    assert reading.chat().status_code == 200


def test_prompts_of_completions_have_no_images(seeing: Client) -> None:
    refused = seeing.complete(multi_modal_data={"image": URL})
    assert refused.status_code == 400 and "/v1/chat/completions" in refused.json()["error"]["message"]
    refused = seeing.complete(prompt="<|vision_start|><|image_pad|><|vision_end|>")
    assert refused.status_code == 400 and "1 image placeholder(s)" in refused.json()["error"]["message"]
    assert seeing.complete(prompt="hi").status_code == 200


def test_what_would_cut_images_is_refused(seeing: Client) -> None:
    refused = seeing.chat(messages=user(IMAGE), truncate_prompt_tokens=5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"
    assert seeing.chat(messages=user(IMAGE), truncate_prompt_tokens=400).status_code == 200
    long = user(IMAGE, {"type": "text", "text": "word " * 400})
    assert seeing.chat(messages=long).json()["error"]["code"] == "context_length_exceeded"
    refused = seeing.post("/v1/chat/completions/render", {"messages": user(IMAGE)})
    assert refused.status_code == 400 and "cannot be rendered" in refused.json()["error"]["message"]


def test_tokens_of_images_count_for_the_context(directory: Path) -> None:
    core = seeing_core(directory, max_model_len=60)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        large = {"type": "image_url", "image_url": {"url": data_url(file_of(320, 320))}}
        refused = client.chat(messages=user(large))
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert client.chat(messages=user(IMAGE)).status_code == 200


class Site:
    """Answers of fetches, instead of the network."""

    def __init__(self, *answers: bytes | Exception):
        self.answers = list(answers)
        self.asked: list[Sequence[str]] = []

    async def fetch(self, urls: Sequence[str], names: Sequence[str], kinds: Sequence[str]) -> list[bytes]:
        self.asked.append(urls)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return [found] * len(urls)


def test_urls_are_fetched_for_all_apis_and_their_failures_have_statuses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, url = "messages[0].content[0]", "https://images.example/a.png"
    refused, failed = MediaFetchError(f"{name} refused", name, 422), MediaFetchError(f"{name} is slow", name, 502)
    site = Site(RED, BLUE, RED, refused, failed, RED)
    monkeypatch.setattr(MediaFetcher, "fetch", lambda self, *given: site.fetch(*given))
    core = seeing_core(directory, allowed_media_domains=["images.example"])
    part = {"type": "image_url", "image_url": {"url": url}}
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        assert client.chat(messages=user(part, IMAGE)).status_code == 200 and len(core.requests[-1].items) == 2
        image = {"type": "image", "source": {"type": "url", "url": url}}
        asked = {"max_tokens": 5, "messages": user(image)}
        assert client.post("/v1/messages", asked).status_code == 200 and sizes(core) == [(3, 1, 3)]
        items = user({"type": "input_image", "image_url": url})
        assert client.post("/v1/responses", {"input": items}).status_code == 200
        for status, retries in ((422, "false"), (502, "true")):
            reply = client.chat(messages=user(part))
            assert (reply.status_code, reply.headers["x-should-retry"]) == (status, retries)
            assert reply.json()["error"]["param"] == name and reply.json()["error"]["code"] == "media_not_fetched"
        assert client.chat(messages=user(part)).status_code == 200
    assert site.asked == [[url]] * 6


def test_hostile_servers_cost_their_own_request_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while path == b"/endless" and not writer.is_closing():
                writer.write(bytes(65536))
                await writer.drain()
            await asyncio.sleep(60 if path == b"/slow" else 0)
            writer.write(RED)
        writer.close()

    made: list[MediaFetcher] = []

    def fetcher(domains: list[str], **options: Any) -> MediaFetcher:
        addresses = {"images.example": ["127.0.0.1"], "inside.example": ["127.0.0.2"]}
        made.append(
            MediaFetcher(
                domains,
                look_up=lambda host, port: addresses[host],
                is_public=lambda address: str(address) == "127.0.0.1",
                **options,
            )
        )
        return made[-1]

    monkeypatch.setattr("jaxllm.media.fetch.MediaFetcher", fetcher)
    core = seeing_core(directory, allowed_media_domains=["*"], mm_fetch_timeout=0.1, mm_max_image_bytes=1 << 20)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        server = client.run(asyncio.start_server(serve, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]

        def ask(host: str, path: str) -> tuple[int, str]:
            url = f"http://{host}:{port}/{path}"
            with monkeypatch.context() as patch:
                if path != "slow":  # the others are right or wrong however long they take
                    patch.setattr(made[0], "_seconds", 60.0)
                reply = client.chat(messages=user({"type": "image_url", "image_url": {"url": url}}))
            return reply.status_code, reply.text

        for host, path, status, told in (
            ("images.example", "slow", 502, "longer than 0.1 seconds"),
            ("images.example", "endless", 422, "more than 1048576 bytes"),
            ("inside.example", "a.png", 400, "private or special address"),
            ("127.1", "a.png", 400, "neither a name nor an IP address"),
            ("169.254.169.254", "latest/meta-data", 400, "private or special address"),
        ):
            found = ask(host, path)
            assert found[0] == status and told in found[1] and host not in found[1], found
            assert ask("images.example", "a.png")[0] == 200 and sizes(core) == [(2, 1, 2)]
        server.close()


def test_files_of_the_server_are_read_below_the_allowed_directory(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    core = seeing_core(directory, allowed_local_media_path=str(tmp_path))
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
        assert client.chat(messages=user(part)).status_code == 200 and sizes(core) == [(2, 1, 2)]


def test_images_are_decoded_outside_of_the_event_loop(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = seeing_core(directory)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        processor = engine.input_processor.media._processor
        assert processor is not None
        process, threads = processor.process, []

        def watched(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return process(*arguments)

        monkeypatch.setattr(processor, "process", watched)
        assert client.chat(messages=user(IMAGE)).status_code == 200
        assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {"input": user({"type": "input_image", "image_url": URL}, {"type": "input_image", "image_url": "x"})},
            "input",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "system": "be brief",
                "messages": user(*[{"type": "image", "source": {"type": "url", "url": url}} for url in (URL, "x")]),
            },
            "messages",
        ),
        ("/api/chat", {"messages": [{"role": "user", "images": [URL, "!"]}]}, None),
    ],
)
def test_bad_images_of_other_apis_are_counted(seeing: Client, path: str, body: dict[str, Any], param: str | None) -> None:
    refused = seeing.post(path, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    if isinstance(error, dict):
        assert error.get("param", param) == param
        error = error["message"]
    assert error.startswith("image 2 ")


def test_what_is_fetched_for_a_client_at_a_time_is_bounded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def fetch(self: MediaFetcher, urls: Sequence[str], names: Sequence[str], kinds: Sequence[str]) -> list[bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return [RED] * len(urls)

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    core = seeing_core(directory, allowed_media_domains=["*"], mm_max_image_bytes=1 << 20)
    body = {"messages": user({"type": "image_url", "image_url": {"url": "https://images.example/a.png"}})}
    with AsyncLLM(core=core) as engine:
        client = Client(create_app(engine, options(max_request_body_bytes=1 << 19)))  # of which two images are one half of all

        async def run() -> list[int]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(client.app), base_url="http://localhost") as http:
                replies = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(6)))
            return [reply.status_code for reply in replies]

        with client:
            assert client.run(run()) == [200] * 6 and most == 2


def test_conversations_with_images_become_vectors(directory: Path) -> None:
    core = seeing_core(directory)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        reply = client.post("/v1/embeddings", {"messages": user(IMAGE, TEXT)})
        assert reply.status_code == 200, reply.text
        assert sizes(core) == [(2, 1, 2)] and "[ii]what is it?" in prompt_of(core)
        assert reply.json()["usage"]["prompt_tokens"] == len(core.requests[-1].prompt_token_ids)
        assert client.post("/v1/embeddings", {"input": "hi"}).status_code == 200


def test_preparation_ends_with_more_tokens_than_a_prompt_has(directory: Path) -> None:
    core = seeing_core(directory, max_model_len=120)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        several = [{"type": "image_url", "image_url": {"url": data_url(file_of(128 + place, 128))}} for place in range(100)]
        refused = client.chat(messages=user(*several))
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert "the prompt has at least 128 tokens" in refused.text
        assert engine.input_processor.media.counts.num_items["image"] < 20
        assert client.chat(messages=user(IMAGE)).status_code == 200


def test_images_of_one_client_do_not_hold_up_anothers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = seeing_core(directory, max_model_len=5000)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options(api_key=["one", "two"]))) as client:
        media = engine.input_processor.media
        processor = media._processor
        assert processor is not None
        process, submit, is_free, prepared, submitted = processor.process, media.process, threading.Event(), [], []

        def slow(media: Any, *arguments: Any) -> Any:
            is_free.wait()
            prepared.append(media.data)
            return process(media, *arguments)

        def watched(items: Any, *arguments: Any) -> Any:
            futures = submit(items, *arguments)
            submitted.extend(item.data for item in items if isinstance(item, Media))
            return futures

        monkeypatch.setattr(processor, "process", slow)
        monkeypatch.setattr(media, "process", watched)

        async def run() -> list[int]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(client.app), base_url="http://localhost") as http:

                async def ask(key: str, *files: bytes) -> int:
                    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
                    headers = {"Authorization": f"Bearer {key}"}
                    reply = await http.post("/v1/chat/completions", json={"messages": user(*parts)}, headers=headers)
                    return reply.status_code

                many = asyncio.ensure_future(ask("one", *(file_of(64 + place) for place in range(30))))
                while not submitted:
                    await asyncio.sleep(0.001)
                other = asyncio.ensure_future(ask("two", BLUE))
                while BLUE not in submitted:
                    await asyncio.sleep(0.001)
                is_free.set()
                return [await many, await other]

        with client:
            assert client.run(run()) == [200, 200]
        assert len(prepared) == 31 and prepared.index(BLUE) < 12
