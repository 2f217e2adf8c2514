"""instructor: an answer of a type, by JSON schema and by tools."""

import os
from importlib.metadata import version

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Verdict(BaseModel):
    """Whether it is right. Nothing else: a small model would not come to an end of it."""

    model_config = ConfigDict(extra="forbid")
    right: bool


client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key=os.environ["KEY"], max_retries=0)
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    wrapped = instructor.from_openai(client, mode=mode)
    answer = wrapped.chat.completions.create(
        model=os.environ["MODEL"],
        response_model=Verdict,
        messages=[{"role": "user", "content": "Right?"}],
        max_tokens=500,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(answer, Verdict)
print(f"instructor {version('instructor')}: json schema, tools")
