"""The body of /v1/completions."""

from typing import Annotated

from pydantic import Field

from server.protocol.common import SamplingFields

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Lists = Annotated[list[Ids], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """OpenAI's fields and those that vLLM adds."""

    prompt: str | Ids | Texts | Lists
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
