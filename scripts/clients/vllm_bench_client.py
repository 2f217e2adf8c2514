"""The requests of vLLM's `bench serve`, field by field, and what it reads of the answers: text, chat, embeddings, pooling, rerank."""

import asyncio
import json
import os
from typing import Any

import aiohttp

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
HEADERS = {"Authorization": f"Bearer {os.environ['KEY']}", "Content-Type": "application/json"}
NUM_TOKENS = 12
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
COMPLETION = {"repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None, **STREAM}
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "What is 27 + 15?"}]}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "import ", **COMPLETION}),
    ("/v1/completions", {"prompt": [100, 200, 300], **COMPLETION}),
    ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": NUM_TOKENS, **STREAM}),
]
CUT = {"truncate_prompt_tokens": -1}
VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "one", **CUT}),
    ("/v1/embeddings", {"input": ["one", "two"], **CUT}),
    ("/v1/embeddings", {"messages": QUESTION, **CUT}),
    ("/pooling", {"input": "one", **CUT}),
    ("/v1/rerank", {"query": "one", "documents": ["two", "three"], **CUT}),
]


async def stream(session: aiohttp.ClientSession, number: int, path: str, body: dict[str, Any]) -> None:
    text, tokens, buffer = "", None, b""
    headers = {**HEADERS, "x-request-id": f"bench-{number}"}
    async with session.post(URL + path, json={"model": MODEL, **body}, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for piece in reply.content.iter_any():
            buffer += piece
    assert buffer.endswith(b"data: [DONE]\n\n")
    for event in buffer.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if not data or data == "[DONE]" or data.startswith(":"):
            continue
        chunk = json.loads(data)
        if choices := chunk.get("choices"):
            text += (choices[0]["delta"].get("content") if "chat" in path else choices[0].get("text")) or ""
        elif usage := chunk.get("usage"):
            assert usage["prompt_tokens"] > 1
            tokens = usage["completion_tokens"]
    assert text and tokens == NUM_TOKENS, (text, tokens)


async def pool(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    async with session.post(URL + path, json={"model": MODEL, **body}, headers=HEADERS) as reply:
        assert reply.status == 200, await reply.text()
        answer = await reply.json()
        assert answer["usage"]["prompt_tokens"] > 0 and (answer.get("data") or answer.get("results")), answer


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(URL + "/v1/models", headers=HEADERS) as reply:
            assert (await reply.json())["data"][0]["id"] == MODEL
        await asyncio.gather(*(stream(session, number, *asked) for number, asked in enumerate(STREAMS * 6)))
        await asyncio.gather(*(pool(session, *asked) for asked in VECTORS))


asyncio.run(main())
print("vLLM bench serve's requests: completions, chat, embeddings, pooling, rerank")
