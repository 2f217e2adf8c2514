"""Converts a request's prompt to token ids that fit the context, without tokenizing much more than that."""

from collections.abc import Sequence

from jaxllm.async_llm import AsyncLLM
from jaxllm.text.tokenization import encode_prompts
from jaxllm.text.tokenizer import Tokenizer
from server.errors import ApiError, bad_request
from server.work import Work

PROBE_CHARACTERS = 1 << 18
PIECE_CHARACTERS = 1 << 16
"""Tokenized at once, between two checks whether the client still waits."""
CUT_TOKENS = 64
"""More than are kept, because the tokens next to a cut are not those of the whole text."""
MAX_PROMPT_TOKENS = 1 << 21
"""Maximum number of tokens of all prompts of a request together, if the context is shorter."""


def too_long(num_tokens: int, max_model_len: int, *, at_least: bool = False, param: str = "prompt") -> ApiError:
    """The error for a prompt that leaves no space for an answer."""
    return bad_request(
        f"the prompt has {'at least ' * at_least}{num_tokens} tokens; this model's maximum context length is {max_model_len} tokens, "
        "with at least 1 for the answer; shorten it",
        param,
        "context_length_exceeded",
    )


def tokenizer_of(engine: AsyncLLM, param: str = "prompt") -> Tokenizer:
    """The tokenizer. Raises ApiError, for the parameter that needs it, if there is none."""
    if (found := engine.input_processor.tokenizer) is None:
        raise bad_request("there is no tokenizer (--skip-tokenizer-init); send token ids", param)
    return found


def check_length(num_tokens: int, max_model_len: int, param: str = "prompt") -> None:
    """Raise ApiError for a prompt that leaves no space for an answer."""
    if num_tokens >= max_model_len:
        raise too_long(num_tokens, max_model_len, param=param)


def check_max_tokens(max_tokens: int | None, max_model_len: int, param: str = "max_tokens") -> None:
    """Raise ApiError for more output tokens than the context has. Fewer are cut to what the prompt leaves, as vLLM does."""
    if max_tokens is not None and max_tokens > max_model_len:
        raise bad_request(
            f"{max_tokens} output tokens are requested, but this model's maximum context length is {max_model_len} tokens; "
            "lower the limit, or leave it out for as many as fit",
            param,
        )


def check_text_length(tokenizer: Tokenizer, text: str, max_model_len: int, param: str = "prompt") -> Work[None]:
    """Raise ApiError for an overlong text, after tokenizing only as much of it as is needed."""
    if len(text) <= _unchecked_characters(max_model_len):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        # A cut can at most split one token in two.
        num_tokens += len(tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)) - 1
        if num_tokens >= max_model_len:
            raise too_long(num_tokens, max_model_len, at_least=True, param=param)
        yield None


def _unchecked_characters(max_model_len: int) -> int:
    """The length of a text that is tokenized without a check of its length."""
    return max(PROBE_CHARACTERS, 8 * max_model_len)


def cut_text(tokenizer: Tokenizer, text: str, num_tokens: int, side: str, max_model_len: int) -> Work[str]:
    """The part of a very long text that has the tokens which truncation keeps. `side`: where tokens are cut off."""
    if len(text) <= _unchecked_characters(max_model_len):
        return text
    found, length = 0, 0
    while found < num_tokens + CUT_TOKENS and length < len(text):
        end = len(text) - length
        piece = text[length : length + PIECE_CHARACTERS] if side == "right" else text[max(0, end - PIECE_CHARACTERS) : end]
        found += len(tokenizer.encode(piece, add_special_tokens=False)) - 1
        length += len(piece)
        yield None
    return text[:length] if side == "right" else text[len(text) - length :]


def check_total(num_tokens: int, max_model_len: int, param: str = "prompt") -> None:
    """Raise ApiError for prompts that together have too many tokens."""
    if num_tokens > (most := max(MAX_PROMPT_TOKENS, max_model_len)):
        raise bad_request(
            f"{param} has more than {most} tokens in all its prompts together; send fewer prompts in one request", param
        )


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a plain prompt."""
    if add_special_tokens:
        return encode_prompts(tokenizer, [text])[0]
    return tokenizer.encode(text, add_special_tokens=False)


def truncated(
    ids: Sequence[int], length: int | None, side: str | None, max_model_len: int, max_tokens: int | None = None
) -> list[int]:
    """Truncate to `length` ids (-1: what fits with `max_tokens`), from the left unless the side to cut is "right"."""
    if length is None:
        return list(ids)
    if length < -1 or length == 0:
        raise bad_request(
            f"truncate_prompt_tokens is {length}, must be at least 1, or -1 for as many as fit", "truncate_prompt_tokens"
        )
    keep = max(1, max_model_len - (max_tokens or 1)) if length == -1 else length
    if keep >= max_model_len:
        raise bad_request(
            f"truncate_prompt_tokens is {length}, must be below the model's {max_model_len}", "truncate_prompt_tokens"
        )
    return list(ids[:keep] if side == "right" else ids[-keep:])
