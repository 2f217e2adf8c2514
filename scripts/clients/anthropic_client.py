"""The anthropic package: messages, streams, tools, counting, images, errors."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["URL"], api_key=os.environ["KEY"], max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQAAAABbAUdZAAAADElEQVR4nGNgGNwAAACgAAGwBmIYAAAAAElFTkSuQmCC"
TOOL = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}

ASKED = {"model": MODEL, "max_tokens": 20, "messages": QUESTION, "system": "You add numbers.", "extra_body": {"temperature": 0}}
"""The newest versions have no temperature parameter, but send it."""

whole = client.messages.create(**ASKED)
assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens"), whole
with client.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
called = client.messages.create(**{**ASKED, "max_tokens": 500}, tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
assert called.stop_reason == "tool_use" and isinstance(called.content[-1].input["a"], bool), called
assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 5
source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
shown = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]}]
try:
    assert client.messages.create(model=MODEL, max_tokens=4, messages=shown).usage.output_tokens
except anthropic.BadRequestError as error:  # of a model of text
    assert "takes text alone" in error.body["error"]["message"], error.body
try:
    client.messages.create(model=MODEL, max_tokens=0, messages=QUESTION)
except anthropic.BadRequestError as error:
    assert error.body["error"]["type"] == "invalid_request_error"
else:
    raise AssertionError("max_tokens 0 was accepted")
print(f"anthropic {anthropic.__version__}: messages, stream, tools, count_tokens, images, errors")
