"""Reads tekken.json, in which Mistral has its tokenizers: tokens by rank, as in tiktoken.model, behind special ones.

Source: Mistral's library mistral-common for the format, and for the special tokens of files without their own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import read_bounded
from jaxllm.rust_failures import failures_as
from jaxllm.text.tiktoken_files import byte_pairs, ranks_of
from jaxllm.text.tokenizer_files import MAX_TOKEN_LENGTH

FILE = "tekken.json"
MAX_BYTES = 32 * 2**20
"""Most bytes of a file; Mistral's have 20 MB."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FIRST_SPECIAL = (
    *(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The first special tokens of files without a list of them."""
MAX_SPECIAL = 2**16
_Id = Annotated[int, msgspec.Meta(ge=0, le=2**24)]


class _Token(msgspec.Struct):
    rank: _Id
    token_bytes: bytes
    """In base64."""


class _Special(msgspec.Struct):
    rank: _Id
    token_str: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_LENGTH)]


class _Config(msgspec.Struct):
    pattern: str
    """By which texts are split before bytes are merged."""
    default_vocab_size: _Id
    default_num_special_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_SPECIAL)]


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def read_tekken(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a file; it puts the first special token of a prompt before texts. Raises ModelLoadError."""

    def refused(reason: object) -> ModelLoadError:
        return ModelLoadError(f"{file} is not a tokenizer: {shortened(str(reason))}; download it again")

    content = read_bounded(file, MAX_BYTES, ModelLoadError)
    try:
        with failures_as(refused):
            return _backend(msgspec.json.decode(content, type=_File))
    except (ValueError, RecursionError) as error:
        raise refused(error) from error


def special_tokens(backend: tokenizers.Tokenizer) -> Mapping[str, Any]:
    """The special tokens that have a role, by its name in tokenizer_config.json."""
    return {name: text for name, text in SPECIAL.items() if backend.token_to_id(text) is not None}


def _backend(read: _File) -> tokenizers.Tokenizer:
    """Raises ValueError."""
    special = _special(read)
    count = read.config.default_vocab_size - len(special)
    if not 0 < count <= len(read.vocab):
        raise ValueError(
            f"default_vocab_size leaves {count} tokens behind {len(special)} special ones, but vocab has {len(read.vocab)}"
        )
    backend = byte_pairs(ranks_of((token.token_bytes, token.rank) for token in read.vocab[:count]), special)
    split = pre_tokenizers.Split(Regex(read.config.pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if backend.get_vocab_size() != read.config.default_vocab_size:
        raise ValueError("a special token is spelled as another token is")
    first = SPECIAL["bos_token"]
    if (id := backend.token_to_id(first)) is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B"], special_tokens=[(first, id)]
        )
    return backend


def _special(read: _File) -> list[str]:
    """The special tokens in the order of their ids; those that the file does not name are called by their ids. Raises ValueError."""
    given = read.special_tokens
    named = dict(enumerate(FIRST_SPECIAL)) if given is None else {token.rank: token.token_str for token in given}
    count = read.config.default_num_special_tokens
    if given is not None and len(named) < len(given):
        raise ValueError("two special tokens have the same rank")
    if named and max(named) >= count:
        raise ValueError(f"a special token has the rank {max(named)}, but there are {count}")
    return [named.get(id, f"<SPECIAL_{id}>") for id in range(count)]
