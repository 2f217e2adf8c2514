"""Makes the tokenizer that a GGUF file describes: byte-level (gpt2) or sentencepiece's byte-pair encoding (llama).

Source: llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.reading import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens."""
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "smollm": (r"\p{N}", _GPT2),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
}
"""How texts are split before merging, by llama.cpp's name: each pattern splits what the one before it left."""


def tokenizer_files(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json, and the object of tokenizer_config.json. Raises ModelLoadError."""
    known = file.metadata
    tokens = known.get("tokenizer.ggml.tokens") or []
    names = {name: known.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in _NAMES.items()}
    config: dict[str, Any] = {name: tokens[id] for name, id in names.items() if id is not None and id < len(tokens)}
    config["chat_template"] = known.get("tokenizer.chat_template")
    if whole := known.get("tokenizer.huggingface.json"):
        return whole, config
    kind = known.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens, config.get("unk_token"))
    else:
        raise ModelLoadError(f"{file.file} has a tokenizer of the kind {kind!r}, supported: gpt2 and llama; pass --tokenizer")
    _add_tokens(backend, tokens, known.get("tokenizer.ggml.token_type") or [])
    adds_bos = known.get("tokenizer.ggml.add_bos_token", kind == "llama")
    bos = config.get("bos_token")
    if adds_bos and bos is not None:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
        byte_level = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
        backend.post_processor = processors.Sequence([*byte_level, template])
    return backend.to_str(), config


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    split = file.metadata.get("tokenizer.ggml.pre", "default")
    if split not in SPLITS:
        raise ModelLoadError(
            f"{file.file} splits texts as {split!r}, supported: {', '.join(SPLITS)}; pass --tokenizer with the original model's"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges") or []]
    patterns = SPLITS[split]
    # Vocabularies of these kinds hold words that their merges do not reach.
    backend = Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=patterns in ((_LLAMA3,), (_TEKKEN,))))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if patterns == (_QWEN2,):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: Sequence[str], unknown: str | None) -> Tokenizer:
    # Runs of spaces are spelled as such in Gemma's files.
    vocabulary = _ids(["▁" * len(token) if token and not token.strip(" ") else token for token in tokens])
    scores = file.metadata.get("tokenizer.ggml.scores")
    is_gemma = file.architecture.startswith("gemma")  # whose merges come in the order of the tokens, not of the scores
    rank = {token: -id if scores is None or is_gemma else scores[id] for token, id in vocabulary.items()}
    merges = _merges(vocabulary, rank)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if has_prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(vocabulary: Mapping[str, int], rank: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the tokens of the highest rank first."""
    found = [
        (-rank[token], vocabulary[token[:i]], vocabulary[token[i:]], token[:i], token[i:])
        for token in vocabulary
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are whole in every text."""
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED and token.strip(" "):
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}
