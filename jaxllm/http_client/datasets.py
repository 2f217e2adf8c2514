"""The prompts of a load test: random ones of given lengths, or from a file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.files import read_json, read_text

NUM_SPECIAL_IDS = 256
"""Number of ids at the end of a vocabulary that random prompts exclude, because they are often special tokens."""
SMALLEST_VOCABULARY = 1000
"""Ids below this exist in every model; used by random prompts if the vocabulary size is unknown."""
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
MAX_ATTEMPTS = 10
_MAX_BYTES = 2**33
"""Most bytes of a file of requests; ShareGPT's has 0.7 GB."""
DEFAULT_OUTPUT_TOKENS = 256


@dataclass(frozen=True)
class LoadPrompt:
    """The prompt of one request: text, token ids or (chat only) messages."""

    prompt: str | list[int] | list[dict[str, Any]]
    num_output_tokens: int
    num_prompt_tokens: int | None = None
    """None if only the server can count them."""
    model: str | None = None
    """Model that answers it; None: the one that is measured."""


class Tokenizer(Protocol):
    """The methods of a tokenizer that datasets call; those of `transformers` have them."""

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass
class PromptWriter:
    """Makes random prompts: lists of token ids, or text of about as many tokens."""

    rng: np.random.Generator
    vocab_size: int | None = None
    """None: the tokenizer's size, else the smallest of all models."""
    tokenizer: Tokenizer | None = None
    as_text: bool = False

    def ids(self, length: int) -> list[int]:
        """Random token ids, without special tokens as far as they are known."""
        size = self.vocab_size or (len(self.tokenizer) if self.tokenizer is not None else SMALLEST_VOCABULARY)
        return self.rng.integers(0, max(1, size - NUM_SPECIAL_IDS), length).tolist()

    def prompt(self, token_ids: list[int], num_output_tokens: int) -> LoadPrompt:
        """A prompt of these tokens in the backend's form."""
        if not self.as_text:
            return LoadPrompt(token_ids, num_output_tokens, len(token_ids))
        if self.tokenizer is None:  # a word is one token in every common tokenizer
            return LoadPrompt(" ".join(WORDS[token % len(WORDS)] for token in token_ids), num_output_tokens)
        text, length = self._text_of(self.tokenizer, token_ids)
        return LoadPrompt(text, num_output_tokens, length)

    def _text_of(self, tokenizer: Tokenizer, token_ids: list[int]) -> tuple[str, int]:
        """Text that encodes to about as many tokens as `token_ids`: decoding and re-encoding merges and splits tokens."""
        wanted, tokens = len(token_ids), token_ids
        for _ in range(MAX_ATTEMPTS):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            encoded = tokenizer.encode(text, add_special_tokens=False)
            if len(encoded) == wanted:
                break
            tokens = encoded[:wanted] if len(encoded) > wanted else encoded + self.ids(wanted - len(encoded))
        return text, len(encoded)


def random_prompts(
    writer: PromptWriter, count: int, *, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0
) -> list[LoadPrompt]:
    """Lengths uniform in [length·(1-ratio), length·(1+ratio)], after `prefix_len` tokens that all prompts share."""
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"the range ratio is {range_ratio:g}, must be at least 0 and less than 1")
    inputs = spread_lengths(writer.rng, input_len, range_ratio, count)
    outputs = spread_lengths(writer.rng, output_len, range_ratio, count)
    prefix = writer.ids(prefix_len)
    return [writer.prompt(prefix + writer.ids(inputs[index]), outputs[index]) for index in range(count)]


def prefix_repetition_prompts(
    writer: PromptWriter, count: int, *, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int
) -> list[LoadPrompt]:
    """Prompts that share one of `num_prefixes` prefixes, about as many for each, in random order."""
    prefixes = [writer.ids(prefix_len) for _ in range(num_prefixes)]
    prompts = [writer.prompt(prefixes[index % num_prefixes] + writer.ids(suffix_len), output_len) for index in range(count)]
    return [prompts[place] for place in writer.rng.permutation(count)]


def mix_prompts(writer: PromptWriter, lengths: Sequence[tuple[int, int]]) -> list[LoadPrompt]:
    """Random prompts with the (prompt, output) lengths of a mix."""
    return [writer.prompt(writer.ids(num_prompt), num_output) for num_prompt, num_output in lengths]


def sharegpt_prompts(
    path: str, count: int, rng: np.random.Generator, tokenizer: Tokenizer | None, output_len: int | None
) -> list[LoadPrompt]:
    """First questions of randomly drawn conversations; output lengths are those of the first answers. Raises ConfigError."""
    if tokenizer is None and output_len is None:
        raise ConfigError("ShareGPT conversations need --tokenizer, which tells how long their answers are, or --output-len")
    conversations = read_json(path, _MAX_BYTES)
    if not isinstance(conversations, list):
        raise ConfigError(f"{path} must hold a list of conversations")
    prompts: list[LoadPrompt] = []
    for place in rng.permutation(len(conversations)):
        turns = conversations[place].get("conversations") if isinstance(conversations[place], Mapping) else None
        if not isinstance(turns, list) or len(turns) < 2 or not all(_is_turn(turn) for turn in turns[:2]):
            continue
        question, answer = turns[0]["value"], turns[1]["value"]
        num_prompt = None if tokenizer is None else len(tokenizer.encode(question, add_special_tokens=False))
        num_output = output_len or (0 if tokenizer is None else len(tokenizer.encode(answer, add_special_tokens=False)))
        if num_prompt is not None and not _is_usual(num_prompt, num_output, check_output=output_len is None):
            continue
        prompts.append(LoadPrompt(question, num_output, num_prompt))
        if len(prompts) == count:
            return prompts
    if not prompts:
        raise ConfigError(f"{path} has no conversation of usual length with a question and an answer")
    return _repeated(prompts, count)


def custom_prompts(path: str, count: int | None, output_len: int | None, *, chat: bool) -> list[LoadPrompt]:
    """Read prompts from a JSON Lines file: `prompt` (text or token ids) or `messages`, and `output_tokens` unless
    `output_len` is given.

    Raises ConfigError that names the line.
    """
    prompts: list[LoadPrompt] = []
    for number, entry in _json_lines(path):
        where = f"{path}, line {number}"
        asked: Any = entry.get("messages") if "messages" in entry else entry.get("prompt")
        is_ids = isinstance(asked, list) and bool(asked) and all(type(item) is int for item in asked)
        is_messages = isinstance(asked, list) and bool(asked) and all(isinstance(item, dict) for item in asked)
        if not (isinstance(asked, str) or is_ids or is_messages):
            raise ConfigError(f"{where} needs prompt (text or a list of token ids) or messages")
        if is_messages and not chat:
            raise ConfigError(f"{where} has messages; they need --backend openai-chat")
        if is_ids and chat:
            raise ConfigError(f"{where} has token ids; they need --backend openai")
        num_output = output_len or entry.get("output_tokens", DEFAULT_OUTPUT_TOKENS)
        if type(num_output) is not int or num_output < 1:
            raise ConfigError(f"{where}: output_tokens is {num_output!r}, must be a positive whole number")
        prompts.append(LoadPrompt(asked, num_output, len(asked) if is_ids else None))
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts if count is None else _repeated(prompts, count)


def read_mix(path: str) -> list[tuple[int, int]]:
    """The (prompt, output) lengths in a mix file. Raises ConfigError."""
    content = read_json(path, _MAX_BYTES)
    requests = content.get("requests") if isinstance(content, Mapping) else None
    if not isinstance(requests, list) or not requests:
        raise ConfigError(f'{path} must hold {{"requests": [[prompt, output], …]}}')
    for index, entry in enumerate(requests):
        if not isinstance(entry, list) or len(entry) != 2 or not all(type(length) is int and length > 0 for length in entry):
            raise ConfigError(f"{path}: request {index} is {entry!r}, must be two positive whole numbers")
    return [(num_prompt, num_output) for num_prompt, num_output in requests]


def with_models(prompts: Sequence[LoadPrompt], models: Sequence[str], assignment: str, seed: int) -> list[LoadPrompt]:
    """The prompts for several models: "round-robin", "random" ones, or by "zipf" the n-th 1/n as often as the first."""
    if assignment == "round-robin":
        places: Iterable[int] = (place % len(models) for place in range(len(prompts)))
    else:
        weights = 1 / np.arange(1, len(models) + 1) if assignment == "zipf" else np.ones(len(models))
        places = np.random.default_rng(seed).choice(len(models), len(prompts), p=weights / weights.sum())
    return [replace(prompt, model=models[place]) for prompt, place in zip(prompts, places, strict=True)]


def spread_lengths(rng: np.random.Generator, length: int, range_ratio: float, count: int) -> list[int]:
    """Lengths uniform in [length·(1-ratio), length·(1+ratio)], at least 1."""
    low, high = int(np.floor(length * (1 - range_ratio))), int(np.ceil(length * (1 + range_ratio)))
    return rng.integers(max(low, 1), high + 1, count).tolist()


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("value"), str)


def _is_usual(num_prompt: int, num_output: int, *, check_output: bool) -> bool:
    """The usual sampling limits for this dataset."""
    return 4 <= num_prompt <= 1024 and num_prompt + num_output <= 2048 and (num_output >= 4 or not check_output)


def _repeated(prompts: list[LoadPrompt], count: int) -> list[LoadPrompt]:
    return [prompts[index % len(prompts)] for index in range(count)]


def _json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}, line {number} must be a JSON object")
        yield number, entry
