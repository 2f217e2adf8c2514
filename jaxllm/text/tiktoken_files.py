"""Reads tiktoken.model, in which checkpoints of Kimi have their tokenizer: tokens by rank, from which merges of bytes follow.

Sources: the library tiktoken for the format and the order of merges, Kimi-K2's release for its special tokens.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import read_bounded
from jaxllm.gguf_files.splits import pre_tokenizer
from jaxllm.text.byte_letters import LETTERS

FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"
"""The tokenizer_class of the checkpoints whose way to split texts and special tokens are known."""
MAX_BYTES = 16 * 2**20
"""Most bytes of a file; Kimi's have 3 MB."""
MAX_TOKEN_BYTES = 512
NUM_SPECIAL_TOKENS = 256
"""Ids behind those of the file, of which tokenizer_config.json names some."""


def read_tiktoken(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a file. config: the object of tokenizer_config.json. Raises ModelLoadError."""
    if (given := config.get("tokenizer_class")) != CLASS:
        raise ModelLoadError(
            f"{file} is of the tokenizer_class {shortened(repr(given))} (tokenizer_config.json), supported: {CLASS}; pass --tokenizer "
            "with a directory that has a tokenizer.json"
        )
    try:
        ranks = _ranks(read_bounded(file, MAX_BYTES, ModelLoadError))
        return _backend(ranks, _special_tokens(config, len(ranks)))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not a tokenizer: {shortened(str(error))}; download it again") from error


def _backend(ranks: Mapping[bytes, int], special: list[AddedToken]) -> tokenizers.Tokenizer:
    """Raises ValueError."""
    backend = byte_pairs(ranks)
    backend.pre_tokenizer = pre_tokenizer("kimi-k2")
    backend.add_tokens(special)
    for id, token in enumerate(special, len(ranks)):
        if (found := backend.token_to_id(token.content)) != id:
            raise ValueError(f"added_tokens_decoder gives {token.content!r} the id {id}, but it is the token {found}")
    return backend


def byte_pairs(ranks: Mapping[bytes, int], first: Iterable[str] = ()) -> tokenizers.Tokenizer:
    """A tokenizer that merges bytes to tokens of these ranks, which are their ids behind those of other tokens, `first`."""
    letters = {token: "".join(LETTERS[byte] for byte in token) for token in ranks}
    vocabulary = {text: id for id, text in enumerate([*first, *letters.values()])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(ranks, letters), ignore_merges=True))
    backend.decoder = decoders.ByteLevel()
    return backend


def _ranks(content: bytes) -> dict[bytes, int]:
    """Rank by token, of lines with a token in base64 and its rank. Raises ValueError."""
    return ranks_of(map(_token_of_line, filter(None, content.splitlines())))


def _token_of_line(line: bytes) -> tuple[bytes, int]:
    text, _, rank = line.partition(b" ")
    try:
        return base64.b64decode(text, validate=True), int(rank)
    except binascii.Error as error:
        raise ValueError(f"the line {line!r} has no token in base64 ({error})") from error


def ranks_of(tokens: Iterable[tuple[bytes, int]]) -> dict[bytes, int]:
    """Rank by token, of tokens in the order of their ranks with these. Raises ValueError."""
    ranks: dict[bytes, int] = {}
    for token, rank in tokens:
        if rank != len(ranks) or token in ranks or not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ValueError(
                f"the token {token[:MAX_TOKEN_BYTES]!r} of rank {rank} must have the rank {len(ranks)}, be another one than those before "
                f"it, and have 1 to {MAX_TOKEN_BYTES} bytes"
            )
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"it has no tokens for {len(missing)} single bytes, the first of which is {missing[0]:#x}")
    return ranks


def _merges(ranks: Mapping[bytes, int], letters: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, those of low rank first, as byte-level vocabularies spell them."""
    merges = []
    for token in ranks:  # in the order of their ranks
        ends = (end for end in range(1, len(token)) if token[:end] in ranks and token[end:] in ranks)
        found = sorted((ranks[token[:end]], ranks[token[end:]], end) for end in ends)
        merges += [(letters[token[:end]], letters[token[end:]]) for _, _, end in found]
    return merges


def _special_tokens(config: Mapping[str, Any], first: int) -> list[AddedToken]:
    """The tokens with ids from `first` on. Raises ValueError."""
    named = {int(id): token for id, token in (config.get("added_tokens_decoder") or {}).items()}
    last = first + NUM_SPECIAL_TOKENS
    if outside := [id for id in named if not first <= id < last]:
        raise ValueError(f"added_tokens_decoder has the id {outside[0]}, must be from {first} to {last - 1}")
    tokens = []
    for id in range(first, last):
        token = named.get(id, {"content": f"<|reserved_token_{id}|>", "special": True})
        tokens.append(AddedToken(token["content"], special=bool(token.get("special")), normalized=False))
    return tokens
