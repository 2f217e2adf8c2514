"""The body of /v1/completions."""

from typing import Annotated

from server.protocol.common import Items, SamplingFields, in_words

Ids = Items[int]
Texts = Items[str]
Lists = Items[Ids]


class CompletionRequest(SamplingFields):
    """OpenAI's fields and those that vLLM adds."""

    prompt: Annotated[str | Ids | Texts | Lists, in_words("a text, a list of token ids, or a list of texts or of such lists")]
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
