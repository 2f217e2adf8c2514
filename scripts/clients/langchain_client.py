"""langchain-openai: invoke, stream, tools, structured output, embeddings."""

import os
from importlib.metadata import version

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

OPTIONS = {"model": os.environ["MODEL"], "base_url": os.environ["URL"] + "/v1", "api_key": os.environ["KEY"], "max_retries": 0}


class Verdict(BaseModel):
    """Whether it is right."""

    right: bool


@tool
def decide(right: bool) -> str:
    """Decides."""
    return str(right)


model = ChatOpenAI(max_tokens=200, temperature=0, **OPTIONS)
answer = model.invoke("What is 27 + 15?")
assert "".join(chunk.content for chunk in model.stream("What is 27 + 15?")) == answer.content and answer.content
called = model.bind_tools([decide], tool_choice="decide", strict=True).invoke("Decide.")
assert called.tool_calls[0]["name"] == "decide" and isinstance(called.tool_calls[0]["args"]["right"], bool)
assert isinstance(model.with_structured_output(Verdict, method="json_schema").invoke("Is it right?"), Verdict)
vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **OPTIONS).embed_documents(["one", "two"])
assert len(vectors) == 2
print(f"langchain-openai {version('langchain-openai')}: invoke, stream, tools, structured output, embeddings")
