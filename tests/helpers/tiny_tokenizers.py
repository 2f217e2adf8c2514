"""Small real tokenizers, trained on the spot: byte-level, metaspace with byte fallback, and plain words."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells, doesn't she?",
    "def add(first, second):\n    return first + second\n",
    "Grüße aus Köln! Ça va? 中文字符 and emoji 😀🎉 in one line.",
    "one two three four five six seven eight nine ten " * 3,
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS, ROLE, PLAIN = "<s>", "</s>", "<|user|>", "<plain>"


@functools.cache
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return _finished(tokenizer, trainer)


@functools.cache
def ascii_json(vocab_size: int = 128) -> str:
    """As many tokens as the tiny checkpoints have: BOS, EOS, the ASCII characters, and pairs of them as JSON has."""
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # as byte-level tokenizers spell space and newline
    pairs = [
        '{"',
        '":',
        '",',
        '"}',
        '["',
        '"]',
        "],",
        "},",
        "00",
        "12",
        "ab",
        "tr",
        "ue",
        "fa",
        "ls",
        "nu",
        "ll",
        "Ġ{",
        "Ġ[",
        ",Ġ",
    ]
    pairs += [letter + "e" for letter in "bcdfghkmnprst"]
    tokens = [BOS, EOS, *letters, *pairs][:vocab_size]
    merges = [(token[0], token[1]) for token in tokens[2 + len(letters) :]]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer.to_str()


@functools.cache
def byte_fallback_json() -> str:
    """As SentencePiece models look: ▁ for spaces, <0xE4> for bytes of unknown characters."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Trained on ASCII only, so that other characters fall back to bytes.
    corpus = [text.encode("ascii", "ignore").decode().replace(" ", "▁") for text in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", BOS, EOS], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for token in byte_tokens:
        vocab[token] = len(vocab)
    state["model"]["byte_fallback"] = True
    return _finished(Tokenizer.from_str(json.dumps(state)), None)


@functools.cache
def unigram_json() -> str:
    """As other SentencePiece models look: scored pieces, with bytes for the rest."""
    pieces = sorted({piece for text in CORPUS if text.isascii() for word in text.split() for piece in ("▁" + word, *word)})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [("<unk>", 0.0), *((token, -20.0) for token in byte_tokens), ("▁", -3.0), *((piece, -5.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return _finished(tokenizer, None)


@functools.cache
def words_json() -> str:
    """Without a decoder, so that tokens are joined by spaces."""
    words = sorted({word for text in CORPUS for word in text.split()})
    vocab = {word: place for place, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(tokenizer, None)


def _finished(tokenizer: Tokenizer, trainer: Any) -> str:
    if trainer is not None:
        tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([BOS, EOS, ROLE])
    tokenizer.add_tokens([AddedToken(PLAIN, normalized=False)])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer.to_str()


KINDS = {
    "ascii": ascii_json,
    "byte_level": byte_level_json,
    "byte_fallback": byte_fallback_json,
    "unigram": unigram_json,
    "words": words_json,
}


def write_tokenizer(
    directory: Path,
    kind: str = "byte_level",
    *,
    chat_template: Any = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    added_tokens: Sequence[str] = (),
) -> Path:
    """A model directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(KINDS[kind]())
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added_tokens])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return directory
