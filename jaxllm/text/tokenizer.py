"""Loads a tokenizer: from tokenizer.json, tekken.json or tiktoken.model, else through `transformers`, which is slow to import."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders

from jaxllm.errors import InvalidRequestError, ModelLoadError, shortened
from jaxllm.gguf_files.unpack import NO_TOKENIZER
from jaxllm.rust_failures import failures_as
from jaxllm.text.byte_letters import BYTES
from jaxllm.text.tekken_files import FILE as TEKKEN
from jaxllm.text.tekken_files import read_tekken, special_tokens
from jaxllm.text.tiktoken_files import FILE as TIKTOKEN
from jaxllm.text.tiktoken_files import read_tiktoken
from jaxllm.text.tokenizer_files import NAMED_SPECIAL_TOKENS, chat_templates, read_backend, read_tokenizer_config

LONG = 1024
"""Characters, or token ids, whose conversion takes long enough to let other threads run meanwhile."""
_PROBE = "a\U0010fffd"
"""A text with a character that few vocabularies have."""


class PairIds(NamedTuple):
    """The tokens of a pair of texts."""

    ids: list[int]
    type_ids: list[int]
    """0 for the first text and its special tokens, perhaps 1 for the second."""
    text_of: list[int | None]
    """0 for tokens of the first text, 1 for those of the second, None for special tokens."""


class Tokenizer:
    """Text to token ids and back. Method names are those of `transformers`, so that scripts can use either."""

    is_fast = True

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, *, name: str = ""):
        backend.no_truncation()
        backend.no_padding()
        config = config or {}
        self.name_or_path = name
        self.config = dict(config)
        """tokenizer_config.json, with the special tokens and chat templates of other files."""
        self._backend = backend
        self.special_tokens_map: dict[str, str] = {
            key: text for key in NAMED_SPECIAL_TOKENS if (text := _token_text(config.get(key))) is not None
        }
        self.chat_templates: dict[str, str] = chat_templates(config.get("chat_template"))
        """Jinja templates by name; the usual one is called "default"."""
        self._add_missing_tokens(config)
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}

    def _add_missing_tokens(self, config: Mapping[str, Any]) -> None:
        """Add special tokens that only tokenizer_config.json defines to the vocabulary, in the order of their ids."""
        tokens = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        new = [token for _, token in tokens if self.convert_token_to_id(token["content"]) is None]
        for special, run in itertools.groupby(
            new, key=lambda token: bool(token.get("special"))
        ):  # each call costs as many as there are
            added = [
                AddedToken(
                    token["content"],
                    special=special,
                    **{key: bool(token[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in token},
                )
                for token in run
            ]
            (self._backend.add_special_tokens if special else self._backend.add_tokens)(added)
        missing = [text for text in self.special_tokens_map.values() if self.convert_token_to_id(text) is None]
        if missing:
            self._backend.add_special_tokens(missing)

    def to_json(self) -> str | None:
        """The text of a tokenizer.json with all tokens; None for a tokenizer that has no such form."""
        return self._backend.to_str()

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises InvalidRequestError for a text that the tokenizer's patterns cannot split in time."""
        with failures_as(_refused):
            return _encoded(self._backend, text, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of several texts, in several threads."""
        with failures_as(_refused):
            return [one.ids for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], add_special_tokens: bool = True) -> list["PairIds"]:
        """The token ids of pairs of texts, with the special tokens that the tokenizer puts around and between the two."""
        with failures_as(_refused):
            found = self._backend.encode_batch(list(pairs), add_special_tokens=add_special_tokens)
        return [PairIds(one.ids, one.type_ids, one.sequence_ids) for one in found]

    @property
    def gives_types(self) -> bool:
        """Whether models that the tokenizer is for take the types of tokens."""
        names = self.config.get("model_input_names")
        return not isinstance(names, list) or "token_type_ids" in names

    def encode_as_text(self, text: str, *, is_start: bool) -> list[int]:
        """The ids of a text, with special tokens in it as ordinary text. `is_start`: it does not follow a special token."""
        backend = self._text_backend
        with failures_as(_refused):
            if is_start or self._begins_alike:
                return _encoded(backend, text, add_special_tokens=False)
            anchor = "\n"
            return _encoded(backend, anchor + text, add_special_tokens=False)[len(self.encode(anchor, False)) :]

    @cached_property
    def _text_backend(self) -> tokenizers.Tokenizer:
        with failures_as(_refused):
            backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _begins_alike(self) -> bool:
        """Whether a text gives the same ids at the start and after a special token."""
        special = next((self.added_tokens[id] for id in sorted(self.all_special_ids)), "")
        return self.encode(special + "a", False)[1 if special else 0 :] == self.encode("a", False)

    def convert_token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token, the added ones too, with its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, the added ones too."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    # Ids to text

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids outside the vocabulary have none."""
        ids = [ids] if isinstance(ids, int) else ids
        with failures_as(_refused):
            if len(ids) < LONG:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]  # lets other threads run

    def convert_id_to_token(self, id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None."""
        return self._backend.id_to_token(id)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's own spelling of tokens."""
        return [self.convert_id_to_token(id) for id in ids]

    @property
    def is_byte_level(self) -> bool:
        """Whether each token is a fixed run of bytes, independent of its neighbours (`token_bytes` works)."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer; empty for an id outside the vocabulary."""
        found = self._token_bytes.get(id)
        if found is None:
            token = self.convert_id_to_token(id) or ""
            try:
                found = bytes(BYTES[letter] for letter in token)
            except KeyError:  # an added token, spelled as text
                found = token.encode()
            self._token_bytes[id] = found
        return found

    @cached_property
    def fallback_bytes(self) -> dict[int, bytes]:
        """The tokens that stand for single bytes of characters which the vocabulary lacks (<0xE4>); none in most vocabularies."""
        letter = self.convert_token_to_id("<0x61>")
        if letter is None or self.decode([letter]) != "a":  # where it is text as it stands
            return {}
        ids = ((byte, self.convert_token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        return {id: bytes([byte]) for byte, id in ids if id is not None}

    def token_text(self, id: int) -> str:
        """The text of a token in the middle of a text. It has U+FFFD where the token holds only a part of a character."""
        found = self._token_texts.get(id)
        if found is None:
            anchor, anchor_text = self.anchor
            text = self.decode([*anchor, id])
            found = text[len(anchor_text) :] if text.startswith(anchor_text) else self.decode([id])
            self._token_texts[id] = found
        return found

    @cached_property
    def anchor(self) -> tuple[list[int], str]:
        """A token after which others show their leading space, which many decoders drop at the start of a text; and its text."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids)

    # Special tokens

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self.convert_token_to_id(text)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Tokens in addition to the trained vocabulary, special ones and others, by id."""
        return {id: token.content for id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return frozenset(id for id, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        **options: Any,
    ) -> str | list[int]:
        """Render a conversation with the model's chat template. Options: see `jaxllm.text.chat_template.render_chat`."""
        from jaxllm.text.chat_template import render_chat

        text = render_chat(self, conversation, tools=tools, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _encoded(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text. A long one as a batch of one, which lets other threads run meanwhile; `encode` holds the interpreter."""
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _refused(reason: str) -> InvalidRequestError:
    # Most often "retry-limit-in-match over": a regular expression of the tokenizer has too many ways to match the text.
    return InvalidRequestError(f"the tokenizer cannot split this text: {shortened(reason)}; give another text", "prompt")


class SlowTokenizer(Tokenizer):
    """A tokenizer of `transformers` that exists only in Python."""

    is_fast = False

    def __init__(self, slow: Any, *, name: str = ""):
        self.name_or_path = name
        self.config = {key: value for key, value in slow.init_kwargs.items() if isinstance(value, str | int | float)}
        self._slow = slow
        self.special_tokens_map = {key: str(text) for key in NAMED_SPECIAL_TOKENS if (text := getattr(slow, key, None))}
        self.chat_templates = chat_templates(getattr(slow, "chat_template", None))
        self._token_texts = {}
        self._token_bytes = {}

    def to_json(self) -> str | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._slow.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], add_special_tokens: bool = True) -> list[PairIds]:
        raise InvalidRequestError(
            f"pairs of texts need a tokenizer.json, which {self.name_or_path} has not; send token ids", "prompt"
        )

    def encode_as_text(self, text: str, *, is_start: bool) -> list[int]:
        return self._slow.encode(text, add_special_tokens=False, split_special_tokens=True)

    def convert_token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return self._slow.get_vocab()

    @cached_property
    def vocab_size(self) -> int:
        return len(self._slow)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        return self._slow.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def convert_id_to_token(self, id: int) -> str | None:
        return self._slow.convert_ids_to_tokens(id) if 0 <= id < self.vocab_size else None

    @property
    def is_byte_level(self) -> bool:
        return False

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        return {id: str(token) for id, token in self._slow.added_tokens_decoder.items()}

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        return frozenset(self._slow.all_special_ids)


def load_tokenizer(directory: Path, *, name: str | None = None) -> Tokenizer:
    """The tokenizer in a directory. Raises ModelLoadError."""
    name = name or str(directory)
    file = directory / "tokenizer.json"
    if not file.is_file():
        if (tekken := directory / TEKKEN).is_file():
            backend = read_tekken(tekken)
            return Tokenizer(backend, {**special_tokens(backend), **read_tokenizer_config(directory)}, name=name)
        if (ranks := directory / TIKTOKEN).is_file():
            config = read_tokenizer_config(directory)
            return Tokenizer(read_tiktoken(ranks, config), config, name=name)
        return _load_with_transformers(name, directory)
    backend, config = read_backend(file), read_tokenizer_config(directory)
    with failures_as(lambda reason: ModelLoadError(f"{file} is not a tokenizer: {reason}; download it again")):
        tokenizer = Tokenizer(backend, config, name=name)
        backend.encode(_PROBE)
        return tokenizer


def _load_with_transformers(name: str, directory: Path) -> Tokenizer:
    missing, remedy = f"tokenizer missing: {directory} has no tokenizer.json", "pass --tokenizer or --skip-tokenizer-init"
    if (reason := directory / NO_TOKENIZER).is_file():
        raise ModelLoadError(f"tokenizer missing: {reason.read_text(encoding='utf-8')}")
    known = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((directory / file).is_file() for file in known):
        raise ModelLoadError(f"{missing} nor any other tokenizer file; {remedy}")
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"{missing}, and transformers cannot build one from the rest: {error}; {remedy}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(loaded, name=name)
    config = {key: str(text) for key in NAMED_SPECIAL_TOKENS if (text := getattr(loaded, key, None))}
    return Tokenizer(backend, {**read_tokenizer_config(directory), **config, "chat_template": loaded.chat_template}, name=name)


def _token_text(token: Any) -> str | None:
    """A special token in tokenizer_config.json is a text, or an object with `content`."""
    return token.get("content") if isinstance(token, Mapping) else token
