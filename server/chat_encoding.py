"""Encodes conversations to token ids. Only the template can produce special tokens; message text never becomes one.

A mark is inserted into special tokens that occur in messages before the template is rendered. The text between two special
tokens is encoded by itself anyway, so marked text can be encoded as plain text without changing the tokens around it.
"""

import functools
import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.media import ProcessedMedia
from jaxllm.text.chat_media import PARTS
from jaxllm.text.prompt_media import PromptMedia
from jaxllm.text.tokenizer import Tokenizer
from server.prompts import PIECE_CHARACTERS, check_text_length, too_long
from server.template_process import TemplateProcesses
from server.work import Work


class SpecialTokenTexts:
    """Finds the texts of a tokenizer's special tokens in other texts."""

    def __init__(self, tokenizer: Tokenizer):
        texts = {tokenizer.added_tokens[id] for id in tokenizer.all_special_ids if id in tokenizer.added_tokens}
        self._texts = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._beginnings = {text[:2] for text in self._texts}
        self._pattern = re.compile(_pattern(self._texts))
        self._overlap = max(map(len, self._texts), default=1) - 1

    def occurs_in(self, value: Any) -> bool:
        """Whether any string in a JSON value, or the concatenated parts of a message, contains one."""
        if isinstance(value, str):
            return any(each in value for each in self._beginnings) and self._search(value)
        if isinstance(value, Mapping):
            return any(self.occurs_in(key) or self.occurs_in(each) for key, each in value.items())
        if isinstance(value, list):
            return any(map(self.occurs_in, value)) or (_are_parts(value) and self.occurs_in(_joined(value)))
        return False

    def _search(self, text: str) -> bool:
        """In pieces, because a search lets no other thread run."""
        starts = range(0, len(text), PIECE_CHARACTERS)
        return any(self._pattern.search(text, start, start + PIECE_CHARACTERS + self._overlap) for start in starts)

    def count(self, value: Any, most: int) -> int:
        """How many there are in the strings of a JSON value, counted up to a little more than `most`."""
        if isinstance(value, str):
            is_possible = any(each in value for each in self._beginnings)
            return sum(1 for _ in itertools.islice(self._pattern.finditer(value), most + 1)) if is_possible else 0
        total = 0
        for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
            if (total := total + self.count(each, most)) > most:
                break
        return total

    def broken(self, value: Any, mark: str) -> Any:
        """The value with the mark inserted into each special token's text."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][:1] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(each, mark) for key, each in value.items()}
        if not isinstance(value, list):
            return value
        if _are_parts(value) and self.occurs_in(_joined(value)):
            # A template may join the parts without anything between them.
            return [
                part if part in PARTS.values() else {**part, "text": mark + self.broken(part["text"], mark)} for part in value
            ]
        return [self.broken(each, mark) for each in value]

    def split(self, text: str) -> list[str]:
        """Split at special tokens: yields the texts between them and the special tokens, alternately."""
        pieces, end = [], 0
        for found in self._pattern.finditer(text):
            pieces += [text[end : found.start()], found[0]]
            end = found.end()
        return [*pieces, text[end:]]


class ChatEncoder:
    """Renders with one model's templates and encodes with its tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, templates: TemplateProcesses, max_model_len: int, media: PromptMedia):
        self._tokenizer = tokenizer
        self._templates = templates
        self._max_model_len = max_model_len
        self._media = media
        self._specials = SpecialTokenTexts(tokenizer)

    def encode(
        self, job: dict[str, Any], images: Sequence[ProcessedMedia] = (), *, add_special_tokens: bool
    ) -> Work[tuple[str, list[int]]]:
        """The text and ids of a conversation; `job`: the arguments of `render_chat`. Raises ApiError or InvalidRequestError.

        The ids have a placeholder for each token of the images; only those of the template count as placeholders.
        """
        written_by_clients = {name: job[name] for name in ("messages", "tools", "documents", "kwargs")}
        mark = None
        if self._specials.occurs_in(written_by_clients):
            if (count := self._specials.count(written_by_clients, self._max_model_len)) > self._max_model_len:
                raise too_long(count, self._max_model_len, at_least=True, param="messages")  # each takes a token, or several
            mark = secrets.token_hex(16)
            job = {**job, **self._specials.broken(written_by_clients, mark)}
        yield None
        text = yield functools.partial(self._templates.render, job)
        yield from check_text_length(self._tokenizer, text, self._max_model_len, "messages")
        whole = self._media.expand_text(text, images)
        if mark is None:
            ids = self._tokenizer.encode(whole, add_special_tokens=add_special_tokens)
        else:
            text, ids = text.replace(mark, ""), self._encode_marked(whole, mark, add_special_tokens=add_special_tokens)
        try:
            return text, self._media.expand(ids, images)[0]
        except InvalidRequestError as error:  # a template may leave out images of some roles
            raise InvalidRequestError(
                f"the chat template does not show the images where they are: {error}", "messages"
            ) from None

    def _encode_marked(self, text: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
        usual = ""
        for place, piece in enumerate(self._specials.split(text)):
            if mark not in piece:
                usual += piece
                continue
            if usual:
                ids += self._tokenizer.encode(usual, add_special_tokens=False)
                usual = ""
            ids += self._tokenizer.encode_as_text(piece.replace(mark, ""), is_start=place == 0)
        return ids + (self._tokenizer.encode(usual, add_special_tokens=False) if usual else [])


def _pattern(texts: Sequence[str]) -> str:
    """Matches the first of these texts at a place. What several begin with is compared once, whatever their number."""
    if not texts:
        return r"(?!)"
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text[1:])
    branches = []
    for letter, rests in groups.items():
        longer = [rest for rest in rests if rest]
        rest = f"(?:{_pattern(longer)}){'?' * (len(longer) < len(rests))}" if longer else ""
        branches.append(re.escape(letter) + rest)
    return "|".join(branches)


def _are_parts(value: list[Any]) -> bool:
    return bool(value) and all(
        isinstance(part, Mapping) and (isinstance(part.get("text"), str) or part in PARTS.values()) for part in value
    )


def _joined(parts: list[Any]) -> str:
    """The text of a message whose template puts nothing between parts, not even for images."""
    return "".join(part.get("text", "") for part in parts)
