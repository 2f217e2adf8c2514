"""Makes the tokenizer that a GGUF file describes: byte-pair encoding of bytes (gpt2) or of characters, whose merges a file has
(gemma4) or that follow from scores (llama: sentencepiece), WordPiece (bert), unigram (t5).

Source: llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.gguf_files.families import CONTROL
from jaxllm.gguf_files.reading import GgufFile
from jaxllm.gguf_files.splits import BEGINNING, CHARACTERS, COMPOSED, SPLITS, WHOLE_WORDS, pre_tokenizer
from jaxllm.rust_failures import failures_as

KINDS = ("gpt2", "gemma4", "llama", "bert", "t5")
"""Names in files of the supported kinds of tokenizers."""
_USER_DEFINED = 4
"""The type of tokens that are whole in every text, without being special."""
_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""Keys of special tokens as files spell them."""
_SWITCHES = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "bert": {"bos_token": 101, "unk_token": 100, "sep_token": 102, "pad_token": 0, "mask_token": 103},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
}
"""Ids of special tokens that a file does not give, by kind."""
MAX_TOKEN_LENGTH = 1024
"""Characters of a token: the longest known have 256, and finding merges costs the square of the length."""
_MAX_CHARACTERS = 8 * 2**20
"""Most characters of a vocabulary whose merges are found by trying: those with 256k tokens have 2 million."""
_MAX_MERGES = 2**21
_REMEDY = "pass --tokenizer with the original model's"


def tokenizer_files(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json, and the object of tokenizer_config.json. Raises ModelLoadError."""
    _check_types(file)
    kind, tokens = file.metadata.get("tokenizer.ggml.model"), _value(file, "tokens", [])
    if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN_LENGTH:
        raise ModelLoadError(
            f"{file.file} has a token of {longest} characters, at most {MAX_TOKEN_LENGTH} are possible; {_REMEDY}"
        )
    given = {name: _value(file, f"{theirs}_token_id") for name, theirs in _NAMES.items()}
    ids = {**_DEFAULT_IDS.get(kind or "", {}), **{name: id for name, id in given.items() if id is not None}}
    config: dict[str, Any] = {name: tokens[id] for name, id in ids.items() if 0 <= id < len(tokens)}
    config["chat_template"] = _chat_templates(file)
    if whole := file.metadata.get("tokenizer.huggingface.json"):
        return whole, config
    if kind not in KINDS:
        raise ModelLoadError(
            f"{file.file} has a tokenizer of the kind {shortened(repr(kind))}, supported: {', '.join(KINDS)}; {_REMEDY}"
        )

    def refused(reason: object) -> ModelLoadError:
        told = shortened(str(reason))
        return ModelLoadError(f"{file.file} has a tokenizer of the kind {kind!r} that cannot be made: {told}; {_REMEDY}")

    try:
        with failures_as(refused):
            return _backend(file, kind, tokens, config).to_str(), config
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise refused(error) from error


def _backend(file: GgufFile, kind: str, tokens: Sequence[str], config: Mapping[str, Any]) -> Tokenizer:
    unknown, split = config.get("unk_token"), _value(file, "pre", "default")
    if kind == "gemma4" or (kind == "gpt2" and split in CHARACTERS):
        vocabulary = _ids(tokens)
        backend = _characters(vocabulary, _given_merges(file, vocabulary), unknown, has_prefix=False)
    elif kind == "gpt2":
        backend = _bytes(file, tokens, split)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens, unknown)
    elif kind == "bert":
        backend = _word_piece(file, tokens, unknown)
    else:
        backend = _unigram(file, tokens, unknown)
    backend.add_tokens(  # all at once: each call takes as long as there are tokens
        [
            AddedToken(token, normalized=False, special=type == CONTROL)
            for token, type in zip(tokens, _value(file, "token_type", []), strict=False)
            if type == CONTROL or (type == _USER_DEFINED and token.strip(" "))
        ]
    )
    has_bos = _value(file, "add_bos_token", kind in ("llama", "bert", "gemma4") or (kind == "gpt2" and split in BEGINNING))
    first = config.get("bos_token") if has_bos else None
    if kind == "bert":
        last = config.get("sep_token") if _value(file, "add_sep_token", True) else None
    else:
        last = config.get("eos_token") if _value(file, "add_eos_token", kind == "t5") else None
    if first is not None or last is not None:
        backend.post_processor = _surrounded(first, last, tokens)
    return backend


def _surrounded(first: str | None, last: str | None, tokens: Sequence[str]) -> processors.TemplateProcessing:
    """Adds a token before and one after a text, or a pair of texts."""
    special = {token: tokens.index(token) for token in (first, last) if token is not None}
    one, two = ([part for part in (first, text, last) if part is not None] for text in ("$A", "$B"))
    pair = [*one, *(f"{part}:1" for part in two)]
    return processors.TemplateProcessing(single=one, pair=pair, special_tokens=list(special.items()))


def _bytes(file: GgufFile, tokens: Sequence[str], split: str) -> Tokenizer:
    if split not in SPLITS:
        raise ModelLoadError(
            f"{file.file} splits texts as {shortened(split)!r} (tokenizer.ggml.pre), none of the {len(SPLITS) + len(CHARACTERS)} names in "
            f"docs/MODELS.md; {_REMEDY}"
        )
    vocabulary = _ids(tokens)
    backend = Tokenizer(models.BPE(vocabulary, _given_merges(file, vocabulary), ignore_merges=split in WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizer(split)
    if split in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _given_merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    found = _value(file, "merges", [])
    merges = [(merge[:end], merge[end + 1 :]) for merge in found if (end := merge.find(" ", 1)) > 0]
    fault = "without tokenizer.ggml.merges" if not merges else ""
    for left, right in merges:  # of which tokenizers would panic
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            fault = f"that merges {shortened(left)!r} and {shortened(right)!r}, of which it has not all tokens"
            break
    if fault:
        raise ModelLoadError(f"{file.file} has a tokenizer of pairs {fault}; {_REMEDY}")
    return merges


def _sentencepiece(file: GgufFile, tokens: Sequence[str], unknown: str | None) -> Tokenizer:
    # Runs of spaces are spelled as such in Gemma's files.
    vocabulary = _ids(["▁" * len(token) if token and not token.strip(" ") else token for token in tokens])
    scores = _value(file, "scores")
    is_gemma = file.architecture.startswith("gemma")  # whose merges come in the order of the tokens, not of the scores
    rank = {token: -id if scores is None or is_gemma else scores[id] for token, id in vocabulary.items()}
    return _characters(vocabulary, _merges(vocabulary, rank), unknown, has_prefix=_value(file, "add_space_prefix", True))


def _characters(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, *, has_prefix: bool
) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if has_prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(vocabulary: Mapping[str, int], rank: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the tokens of the highest rank first."""
    if (length := sum(map(len, vocabulary))) > _MAX_CHARACTERS:
        raise ValueError(f"its tokens have {length} characters together, at most {_MAX_CHARACTERS} are possible")
    found = [
        (-rank[token], left, right)
        for token in vocabulary
        for i in range(1, len(token))
        if (left := vocabulary.get(token[:i])) is not None and (right := vocabulary.get(token[i:])) is not None
    ]
    if len(found) > _MAX_MERGES:
        raise ValueError(f"its tokens follow from {len(found)} merges, at most {_MAX_MERGES} are possible")
    texts = {id: token for token, id in vocabulary.items()}
    return [(texts[left], texts[right]) for _, left, right in sorted(found)]


def _word_piece(file: GgufFile, tokens: Sequence[str], unknown: str | None) -> Tokenizer:
    # A file marks what begins a word, tokenizers what continues one; neither marks [CLS] and its like.
    is_name = [token.startswith("[") and token.endswith("]") for token in tokens]
    pieces = [
        token if named else token[1:] if token.startswith("▁") else f"##{token}"
        for token, named in zip(tokens, is_name, strict=True)
    ]
    backend = Tokenizer(models.WordPiece(_ids(pieces), unk_token=unknown or "[UNK]"))
    lowercase = _value(file, "normalizer.lowercase", True)
    strips = _value(file, "normalizer.strip_accents", lowercase)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(file: GgufFile, tokens: Sequence[str], unknown: str | None) -> Tokenizer:
    scores = _value(file, "scores")
    if not scores or unknown is None:
        raise ModelLoadError(f"{file.file} has a unigram tokenizer without scores or an unknown token; {_REMEDY}")
    backend = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=False)), tokens.index(unknown)))
    steps: list[normalizers.Normalizer] = []
    if charsmap := _value(file, "precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(charsmap)))
    if _value(file, "remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if has_prefix := _value(file, "add_space_prefix", False):
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="always" if has_prefix else "never")
    return backend


def _chat_templates(file: GgufFile) -> dict[str, str]:
    """By name, the usual one is called "default"."""
    known = file.metadata
    found = {name: known.get(f"tokenizer.chat_template.{name}") for name in known.get("tokenizer.chat_templates") or ()}
    found["default"] = known.get("tokenizer.chat_template")
    return {name: template for name, template in found.items() if template is not None}


_TYPES = msgspec.defstruct(
    "_TYPES",
    [
        *((name, str | None, None) for name in ("model", "pre")),
        *((name, list[str] | None, None) for name in ("tokens", "merges")),
        *((name, list[float] | None, None) for name in ("scores",)),
        *((name, list[int] | None, None) for name in ("token_type", "precompiled_charsmap")),
        *((f"{name}_token_id", int | None, None) for name in _NAMES.values()),
        *((name.replace(".", "_"), bool | int | None, None) for name in _SWITCHES),
    ],
)
"""Types of the values under tokenizer.ggml."""


def _check_types(file: GgufFile) -> None:
    prefix, known = "tokenizer.ggml.", file.metadata
    given = {name.removeprefix(prefix).replace(".", "_"): value for name, value in known.items() if name.startswith(prefix)}
    texts = {
        name: value for name, value in known.items() if name.startswith(("tokenizer.chat_template", "tokenizer.huggingface"))
    }
    names = texts.pop("tokenizer.chat_templates", [])
    try:
        msgspec.convert(given, _TYPES)
        msgspec.convert(texts, dict[str, str])
        msgspec.convert(names, list[str])
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{file.file} has a tokenizer of wrong types ({error}); {_REMEDY}") from error


def _value(file: GgufFile, name: str, default: Any = None) -> Any:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    return default if found is None else found


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}
