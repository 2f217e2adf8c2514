"""The requests that vLLM's `bench serve` sends (openai and openai-chat backends), field by field, and what it reads from the stream."""

import asyncio
import json
import os

import aiohttp

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
HEADERS = {"Authorization": f"Bearer {os.environ['KEY']}", "Content-Type": "application/json"}
COMPLETION = {
    "model": MODEL,
    "prompt": "import ",
    "repetition_penalty": 1.0,
    "max_tokens": 12,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 27 + 15?"}]}],
    "max_completion_tokens": 12,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}


async def run(session: aiohttp.ClientSession, path: str, body: dict) -> None:
    text, tokens = "", None
    async with session.post(URL + path, json=body, headers=HEADERS) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]" or data.startswith(":"):
                continue
            chunk = json.loads(data)
            if choices := chunk.get("choices"):
                text += choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
    assert text and tokens == 12, (text, tokens)


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            *(run(session, path, body) for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)) * 8)
        )


asyncio.run(main())
print("vLLM bench serve's requests: completions, chat")
