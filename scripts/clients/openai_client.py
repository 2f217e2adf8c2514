"""The openai package: completions, chat, streams, tools, structured outputs, responses, embeddings, images, errors; sync and async."""

import asyncio
import json
import os

import openai
from pydantic import BaseModel

URL, MODEL, KEY = os.environ["URL"] + "/v1", os.environ["MODEL"], os.environ["KEY"]
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]
IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQAAAABbAUdZAAAADElEQVR4nGNgGNwAAACgAAGwBmIYAAAAAElFTkSuQmCC"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Sum(BaseModel):
    """The parsed value."""

    right: bool
    digits: list[bool]


def check_sync() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    assert MODEL in [model.id for model in client.models.list()]
    completion = client.completions.create(model=MODEL, prompt="import ", max_tokens=5, temperature=0, logprobs=2, echo=True)
    assert completion.choices[0].text.startswith("import ") and completion.usage.completion_tokens == 5
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].message.content and whole.choices[0].logprobs.content[0].top_logprobs
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and len({c.id for c in chunks}) == 1
    several = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, n=3, temperature=1, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def check_tools_and_structure() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        message = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[ADD],
            tool_choice=choice,
            max_tokens=500,
            temperature=0,
            parallel_tool_calls=False,
        ).choices[0]
        assert message.finish_reason == "tool_calls" or choice != "required", message
        call = message.message.tool_calls[0]
        assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[ADD],
        tool_choice="required",
        max_tokens=500,
        temperature=0,
        parallel_tool_calls=False,
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.name == "add" and set(json.loads(streamed.function.arguments)) == {"a", "b"}
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    parsed = parse(model=MODEL, messages=QUESTION, response_format=Sum, max_tokens=2000, temperature=0.7, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def check_responses() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    first = client.responses.create(model=MODEL, input="What is 27 + 15?", max_output_tokens=20, temperature=0)
    assert first.status in ("completed", "incomplete") and first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model=MODEL, input="And 1 more?", previous_response_id=first.id, max_output_tokens=5)
    assert second.previous_response_id == first.id
    inputs = list(client.responses.input_items.list(second.id, limit=1, order="asc"))  # page by page
    assert [item.content[0].text for item in inputs] == ["What is 27 + 15?", first.output_text, "And 1 more?"], inputs
    with client.responses.stream(model=MODEL, input="What is 27 + 15?", max_output_tokens=20, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and final.output_text == first.output_text, kinds
    parsed = client.responses.parse(model=MODEL, input="Is it right?", text_format=Sum, max_output_tokens=2000, temperature=0.7)
    assert isinstance(parsed.output_parsed, Sum)


def check_embeddings() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    packed = client.embeddings.create(model=MODEL, input=["one", "two"])
    plain = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert len(packed.data) == 2
    assert all(abs(a - b) < 1e-6 for a, b in zip(packed.data[1].embedding, plain.data[1].embedding, strict=True))


def check_images() -> None:
    """A model that sees images takes one, another refuses it."""
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    sees = "image" in (client.models.retrieve(MODEL).model_extra or {}).get("input_modalities", ())
    of_chat = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "What is it?"}]
    of_responses = [
        {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    asked = {"model": MODEL, "temperature": 0}
    for ask in (
        lambda: client.chat.completions.create(**asked, messages=[{"role": "user", "content": of_chat}], max_tokens=4),
        lambda: client.responses.create(**asked, input=[{"role": "user", "content": of_responses}], max_output_tokens=4),
    ):
        try:
            answer = ask()
        except openai.BadRequestError as error:
            assert not sees and "takes text alone" in error.body["message"], error.body
        else:
            assert sees and answer.usage.total_tokens > 4


def check_errors() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    for fields, kind in (({"model": "nobody"}, openai.NotFoundError), ({"temperature": -9}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **fields})
        except kind as error:
            assert error.request_id and error.body["message"]
        else:
            raise AssertionError(f"{fields} was accepted")


async def check_async() -> None:
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)

    async def one(number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=10, temperature=0, stream=True, user=str(number)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert len(set(await asyncio.gather(*(one(number) for number in range(16))))) == 1


check_sync()
check_tools_and_structure()
check_responses()
check_embeddings()
check_images()
check_errors()
asyncio.run(check_async())
print(f"openai {openai.__version__}: sync, async, streams, tools, parse, responses, embeddings, images, errors")
