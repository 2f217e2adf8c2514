"""Logprobs in the formats of OpenAI's two APIs. JSON has no infinity: -inf becomes -9999."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.outputs import Logprob
from jaxllm.text.tokenizer import Tokenizer

LEAST = -9999.0

Position = Mapping[int, Logprob] | None


def finite(logprob: float) -> float:
    """A logprob that JSON can represent."""
    return logprob if logprob > LEAST else LEAST  # NaN too


class LogprobWriter:
    """Converts the engine's logprobs to reply objects. `as_ids`: tokens are written as 'token_id:N'."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        skips = tokenizer is not None and skip_special_tokens
        self._hidden = tokenizer.all_special_ids if skips and tokenizer is not None else frozenset()
        """Tokens that are not part of the text."""
        self._as_ids = as_ids

    def token(self, token_id: int, text: str | None) -> str:
        """The text form of a token."""
        return f"token_id:{token_id}" if self._as_ids or text is None else text

    def token_bytes(self, token_id: int, text: str | None) -> list[int] | None:
        """The bytes of a token."""
        if self._tokenizer is not None and self._tokenizer.is_byte_level:
            return list(self._tokenizer.token_bytes(token_id))
        return None if text is None else list(text.encode("utf-8", "replace"))

    def chat(self, token_ids: Sequence[int], positions: Sequence[Position], num_top: int) -> list[dict[str, Any]]:
        """`choices[].logprobs.content` of chat completions: each token with its num_top most likely alternatives (-1: all)."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            own = position.get(token_id) if position else None
            top = [self._chat_entry(id, entry) for id, entry in _top(position, num_top)]
            content.append({**self._chat_entry(token_id, own or Logprob(LEAST)), "top_logprobs": top})
        return content

    def _chat_entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token
        return {
            "token": self.token(token_id, text),
            "logprob": finite(entry.logprob),
            "bytes": self.token_bytes(token_id, text),
        }

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[Position], num_top: int, first_offset: int
    ) -> tuple[dict[str, Any], int]:
        """`choices[].logprobs` of completions, and the text offset at their end."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        offset = first_offset
        hidden = self._hidden
        for token_id, position in zip(token_ids, positions, strict=True):
            own = None if position is None else position.get(token_id)
            text = own.decoded_token if own is not None else self._text(token_id)
            tokens.append(self.token(token_id, text))
            offsets.append(offset)
            if token_id not in hidden:
                offset += len(text or "")
            token_logprobs.append(None if own is None else finite(own.logprob))
            if position is None:
                top_logprobs.append(None)
            else:
                shown = [*([(token_id, own)] if own else []), *_top(position, num_top)]
                top_logprobs.append({self.token(id, entry.decoded_token): finite(entry.logprob) for id, entry in shown})
        found = {"text_offset": offsets, "token_logprobs": token_logprobs, "tokens": tokens, "top_logprobs": top_logprobs}
        return found, offset

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def prompt(self, positions: Sequence[Position]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of vLLM: per prompt token a map from ids to logprob, rank and text; null for the first token."""
        return [
            None
            if position is None
            else {
                str(id): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": self.token(id, entry.decoded_token),
                }
                for id, entry in position.items()
            }
            for position in positions
        ]


def _top(position: Position, num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens of a position, in order; the sampled one only if it is among them."""
    if not position or num_top == 0:
        return []
    items = sorted(position.items(), key=lambda item: -item[1].logprob)
    return items if num_top == -1 else items[:num_top]
