"""How texts become token ids: special tokens and truncation, as `tokenization_kwargs` of `LLM` say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer

_PARAM = "tokenization_kwargs"


@dataclass(frozen=True)
class Tokenization:
    """Values of `tokenization_kwargs`. Construction raises InvalidRequestError."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Most tokens of a text; -1: what the model takes, with room for one more; None: a longer text is an error."""
    truncation_side: str = "left"
    """Where tokens are cut off."""

    @classmethod
    def of(cls, kwargs: Mapping[str, Any] | None, *, add_special_tokens: bool = True) -> "Tokenization":
        """Read `tokenization_kwargs`. `truncation=True` with `max_length` is another form of `truncate_prompt_tokens`."""
        given = {"add_special_tokens": add_special_tokens, **(kwargs or {})}
        truncation, max_length = given.pop("truncation", None), given.pop("max_length", None)
        if truncation in (True, "longest_first"):
            given.setdefault("truncate_prompt_tokens", -1 if max_length is None else max_length)
        elif truncation not in (None, False, "do_not_truncate") or max_length is not None:
            raise InvalidRequestError(f"{_PARAM}: max_length takes effect with truncation=True alone; give both", _PARAM)
        names = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
        if unknown := sorted(given.keys() - set(names)):
            known = ", ".join((*names, "truncation", "max_length"))
            raise InvalidRequestError(f"{_PARAM} has {unknown[0]!r}, may have {known}", _PARAM)
        return cls(**given)

    def __post_init__(self) -> None:
        limit = self.truncate_prompt_tokens
        if not isinstance(self.add_special_tokens, bool):
            raise InvalidRequestError(f"add_special_tokens is {self.add_special_tokens!r}, must be true or false", _PARAM)
        if limit is not None and (type(limit) is not int or (limit < 1 and limit != -1)):
            text = f"truncate_prompt_tokens is {limit!r}, must be an integer of at least 1, or -1 for what the model takes"
            raise InvalidRequestError(text, _PARAM)
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequestError(f"truncation_side is {self.truncation_side!r}, must be left or right", _PARAM)

    def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], max_model_len: int, *, truncates: bool = True
    ) -> list[list[int]]:
        """The ids of each text, truncated unless told otherwise. Raises InvalidRequestError."""
        if self.add_special_tokens:
            all_ids = encode_prompts(tokenizer, texts)
        else:
            all_ids = tokenizer.encode_batch(texts, add_special_tokens=False)
        limit = self._limit(max_model_len)
        if limit is None or not truncates:
            return all_ids
        return [ids[-limit:] if self.truncation_side == "left" else ids[:limit] for ids in all_ids]

    def check_uncut(self, num_tokens: int, max_model_len: int) -> None:
        """Raise InvalidRequestError for a prompt with images that would be truncated."""
        if (limit := self._limit(max_model_len)) is not None and num_tokens > limit:
            raise cut_images(num_tokens, limit)

    def _limit(self, max_model_len: int) -> int | None:
        return max_model_len - 1 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


def cut_images(num_tokens: int, limit: int) -> InvalidRequestError:
    """The error for a prompt whose images truncation would cut."""
    return InvalidRequestError(
        f"prompt has {num_tokens} tokens with those of its images, truncate_prompt_tokens is {limit}; images are never cut: send fewer "
        "or smaller ones, or a shorter text",
        "truncate_prompt_tokens",
    )


PLAIN = Tokenization()


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of plain prompts, with the special tokens that the tokenizer adds; a BOS in the text is not doubled."""
    bos = tokenizer.bos_token_id
    try:
        all_ids = tokenizer.encode_batch(texts)
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequestError(
            "prompt has half a surrogate pair (bytes that are not UTF-8), which is no text", "prompt"
        ) from None
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in all_ids]
