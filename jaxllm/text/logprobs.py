"""Logprobs in the callers' format: per position a dict from token id to Logprob, with the token's text."""

import math
from collections.abc import Iterable, Sequence
from typing import overload

from jaxllm.outputs import Logprob
from jaxllm.scheduler_output import TokenLogprobs
from jaxllm.text.detokenizer import BROKEN
from jaxllm.text.tokenizer import Tokenizer

Position = dict[int, Logprob] | None
"""None only for the first token of a prompt."""


class FlatLogprobs(Sequence[Position]):
    """A list of dicts, stored as flat lists, so that the garbage collector has few objects to visit."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, position: Position) -> None:
        """Add a position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Position]) -> None:
        """Add several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, place: int) -> Position: ...
    @overload
    def __getitem__(self, place: slice) -> "FlatLogprobs": ...
    def __getitem__(self, place: int | slice) -> "Position | FlatLogprobs":
        if isinstance(place, slice):
            part = FlatLogprobs()
            part.extend(self[index] for index in range(*place.indices(len(self))))
            return part
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(self.start_indices[place], self.end_indices[place])
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def positions(
    tokens: TokenLogprobs, count: int, previous_ids: Sequence[int], tokenizer: Tokenizer | None, *, ranked: bool = True
) -> list[Position]:
    """One dict per row: the token itself, then up to `count` others (-1: all).

    `previous_ids` are the tokens before the first row. `ranked`: the others are the likeliest ones in order, without those that
    could not be drawn.
    """
    width = tokens.token_ids.shape[1] if count == -1 else 1 + count
    history = list(previous_ids[-4:])
    found: list[Position] = []
    rows = zip(tokens.token_ids[:, :width].tolist(), tokens.logprobs[:, :width].tolist(), tokens.ranks.tolist(), strict=True)
    for ids, logprobs, rank in rows:
        position: dict[int, Logprob] = {}
        for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            is_forbidden = ranked and place > 0 and logprob == -math.inf
            if token_id not in position and not is_forbidden:
                its_rank = rank if place == 0 else place if ranked else None
                position[token_id] = Logprob(logprob, its_rank, token_text(tokenizer, token_id, history) if tokenizer else None)
        found.append(position)
        history = [*history[-3:], ids[0]]
    return found


def token_text(tokenizer: Tokenizer, token_id: int, previous_ids: Sequence[int]) -> str:
    """The text of one token. A character of several tokens belongs to the one that completes it."""
    text = tokenizer.token_text(token_id)
    if BROKEN not in text:
        return text
    for start in range(len(previous_ids) - 1, max(-1, len(previous_ids) - 5), -1):
        before = tokenizer.decode(previous_ids[start:])
        whole = tokenizer.decode([*previous_ids[start:], token_id])
        if before.endswith(BROKEN) and not whole.endswith(BROKEN):
            return whole[len(before.rstrip(BROKEN)) :]
    return text.rstrip(BROKEN)
