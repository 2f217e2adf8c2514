"""The body of /v1/completions."""

from server.protocol.common import Items, SamplingFields

Ids = Items[int]
Texts = Items[str]
Lists = Items[Ids]


class CompletionRequest(SamplingFields):
    """OpenAI's fields and those that vLLM adds."""

    prompt: str | Ids | Texts | Lists
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
