"""litellm as a client of an OpenAI-compatible server."""

import asyncio
import os
from importlib.metadata import version

import litellm

OPTIONS = {"model": "openai/" + os.environ["MODEL"], "api_base": os.environ["URL"] + "/v1", "api_key": os.environ["KEY"]}
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]

whole = litellm.completion(messages=QUESTION, max_tokens=20, temperature=0, **OPTIONS)
streamed = litellm.completion(messages=QUESTION, max_tokens=20, temperature=0, stream=True, **OPTIONS)
text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
assert text == whole.choices[0].message.content and text
answers = asyncio.run(litellm.acompletion(messages=QUESTION, max_tokens=5, n=2, temperature=1, **OPTIONS))
assert len(answers.choices) == 2
embedded = litellm.embedding(input=["one"], encoding_format="float", **OPTIONS)
assert len(embedded.data[0]["embedding"]) > 8
print(f"litellm {version('litellm')}: completion, stream, async, embedding")
