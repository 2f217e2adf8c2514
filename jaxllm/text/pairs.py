"""Pairs of texts as prompts of models that score them: their tokens, how long pairs are cut, and where the second text starts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import InvalidRequestError
from jaxllm.text.tokenizer import PairIds, Tokenizer


class PairCut(NamedTuple):
    """Most tokens of a pair and of its texts; None: no limit."""

    whole: int | None = None
    """With special tokens; -1: what the model takes. The longer text is cut first, until both have as many tokens."""
    first: int | None = None
    second: int | None = None
    side: str = "right"
    """Where tokens are cut off each text."""


UNCUT = PairCut()


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], cut: PairCut, *, longest: int, add_special_tokens: bool = True
) -> list[PairIds]:
    """The tokens of pairs that the tokenizer joins. longest: tokens that the model takes.

    Raises InvalidRequestError for a limit beyond it, or below the number of special tokens.
    """
    whole = longest if cut.whole == -1 else cut.whole
    if whole is not None and whole > longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {whole}, the model takes {longest}; lower it or raise --max-model-len",
            "truncate_prompt_tokens",
        )
    return [_cut(each, cut._replace(whole=whole)) for each in tokenizer.encode_pairs(pairs, add_special_tokens)]


def joined_texts(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], cut: PairCut) -> list[str]:
    """Pairs as one text each, of texts as long as `cut` says; its limit of the whole is that of any prompt."""
    return [_shortened(tokenizer, a, cut.first, cut.side) + _shortened(tokenizer, b, cut.second, cut.side) for a, b in pairs]


def second_start(prompt: Any, num_tokens: int) -> int | None:
    """Position of the first token of type 1 of a prompt with `token_type_ids`; None: all are 0. Raises InvalidRequestError."""
    types = prompt.get("token_type_ids") if isinstance(prompt, Mapping) else None
    if types is None:
        return None
    if not isinstance(types, Sequence) or len(types) != num_tokens:
        number = len(types) if isinstance(types, Sequence) else "no"
        raise InvalidRequestError(
            f"token_type_ids has {number} types, prompt_token_ids {num_tokens} tokens; give one for each", "prompt"
        )
    start = next((place for place, kind in enumerate(types) if kind != 0), num_tokens)
    if any(kind != 1 for kind in types[start:]):
        raise InvalidRequestError("token_type_ids must be 0 for a first text, then 1 for a second one", "prompt")
    return start if start < num_tokens else None


def _cut(pair: PairIds, cut: PairCut) -> PairIds:
    """A pair with fewer tokens of its texts; special tokens stay. Raises InvalidRequestError if these are too many."""
    counts = [min(pair.text_of.count(text), most if most is not None else len(pair.ids)) for text, most in enumerate(cut[1:3])]
    if cut.whole is not None:
        num_special = pair.text_of.count(None)
        if (room := cut.whole - num_special) < 0:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {cut.whole}, but a pair has {num_special} special tokens alone; raise it",
                "truncate_prompt_tokens",
            )
        if sum(counts) > room:
            shorter = counts.index(min(counts))
            counts[shorter] = min(counts[shorter], room // 2)
            counts[1 - shorter] = room - counts[shorter]
    if counts == [pair.text_of.count(text) for text in (0, 1)]:
        return pair
    kept: set[int] = set()
    for text, count in enumerate(counts):
        places = [place for place, of in enumerate(pair.text_of) if of == text]
        kept.update(places[len(places) - count :] if cut.side == "left" else places[:count])
    places = [place for place, of in enumerate(pair.text_of) if of is None or place in kept]
    return PairIds([pair.ids[p] for p in places], [pair.type_ids[p] for p in places], [pair.text_of[p] for p in places])


def _shortened(tokenizer: Tokenizer, text: str, most: int | None, side: str) -> str:
    """A text with at most so many tokens."""
    if most is None or len(ids := tokenizer.encode(text, add_special_tokens=False)) <= most:
        return text
    return tokenizer.decode(ids[len(ids) - most :] if side == "left" else ids[:most])
