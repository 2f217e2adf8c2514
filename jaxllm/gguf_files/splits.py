"""How byte-level tokenizers split texts before they merge bytes, by llama.cpp's name (`tokenizer.ggml.pre` of a file).

Sources: names and which of them split alike are those of llama.cpp's src/llama-vocab.cpp, patterns those of the models' own
tokenizer.json where llama.cpp has to approximate them.
"""

from collections.abc import Mapping

from tokenizers import Regex, pre_tokenizers


def _first_of(*patterns: str) -> str:
    return "|".join(patterns)


def _cased_words(contraction: str, of: str = "") -> str:
    """Words that end before an upper-case letter that follows a lower-case one. `of`: what else holds for their letters."""
    start, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{of}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{of}]",
    )
    return f"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}"


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_BLANKS = r"\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"
_GPT2 = _first_of(r"'(?:[stmd]|re|ve|ll)", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _BLANKS)
_LLAMA3 = _first_of(_CONTRACTION, _WORD, _UP_TO_3_DIGITS, _MARKS, _LINES, _BLANKS)
_QWEN2 = _first_of(_CONTRACTION, _WORD, _DIGIT, _MARKS, _LINES, _BLANKS)
_GPT4O = _first_of(_cased_words(f"{_CONTRACTION}?"), _UP_TO_3_DIGITS, _PATHS, _LINES, _BLANKS)
_ASCII_MARK = r"[!-/:-@\[-`{-~]"
_DEEPSEEK_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _first_of(rf"{_ASCII_MARK}[A-Za-z]+", _DEEPSEEK_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, _BLANKS)
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_NOT_LATIN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
        ),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), (_DIGIT, _GPT2)
    ),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
            *("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"),
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)
    ),
    "qwen35": (
        _first_of(
            *(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _BLANKS)
        ),
    ),
    "ufakzeka": (_first_of(_WORD, _DIGIT, _MARKS, _LINES, _BLANKS),),
    "laguna": (r"[^\n]+|\n+", _QWEN2),
    "minicpm5": (_UP_TO_3_DIGITS, _first_of(_CONTRACTION, _WORD, r"\p{N}+", _MARKS, _LINES, _BLANKS)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "tekken": (_first_of(_cased_words(""), _DIGIT, _PATHS, _LINES, _BLANKS),),
    "youtu": (
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|"
        + _HAN_AND_KANA,
        _first_of(_cased_words(f"{_CONTRACTION}?"), _DIGIT, _PATHS, _LINES, _BLANKS),
    ),
    "kimi-k2": (
        _first_of(*(r"\p{Han}+", _cased_words(f"{_CONTRACTION}?", r"&&[^\p{Han}]"), _UP_TO_3_DIGITS, _MARKS, _LINES, _BLANKS)),
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (_UP_TO_3_DIGITS, _HAN_AND_KANA, _DEEPSEEK3)),
    "spark2_5": (
        _UP_TO_3_DIGITS,
        _HAN_AND_KANA,
        _first_of(rf"{_ASCII_MARK}[A-Za-z]+", _DEEPSEEK_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", _BLANKS),
        _DIGIT,
    ),
    "afmoe": (
        *(r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{3}"),
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0EFF}"
        r"\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
        _DEEPSEEK3,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _NOT_LATIN, _DIGIT),
    "deepseek-llm": (
        *(
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}]]+",
            r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
            r"\s+$",
            _NOT_LATIN,
            r"\p{N}+",
        ),
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (
            _first_of(
                "'(?i:[sdmt]|ll|ve|re)",
                r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                _DIGIT,
                r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                r"\s*[\r\n]",
                _BLANKS,
            ),
        ),
    ),
    "exaone-moe": (
        _first_of(
            *(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", _DIGIT),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", _BLANKS),
        ),
    ),
    "seed-coder": (_first_of(_CONTRACTION, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _BLANKS),),
    "jais-2": (
        _first_of(
            *(_CONTRACTION, _WORD, _UP_TO_3_DIGITS, _MARKS, _LINES),
            *(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")),
            r"\s",
        ),
    ),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, _DIGIT),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "chameleon": (
        *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT),
        *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    ),
}
"""Patterns by name. The parts of a text are what a pattern matches and what lies between; the next pattern splits these parts."""

CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Names whose tokens are merged from characters instead of bytes, in the whole text."""
WHOLE_WORDS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("smaug-bpe", "dbrx", "tekken", "minicpm5", "youtu", "granite-embed-multi-97m"),
    )
)
"""Names of vocabularies that hold words which their merges do not reach: a part that is a token is not merged from bytes."""
BEGINNING = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    )
)
"""Names whose texts begin with the token bos where the file does not say."""
COMPOSED = frozenset(("qwen2", "qwen35", "deepseek-r1-qwen"))
"""Names whose texts are brought into Unicode's form NFC first."""


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Splits by the patterns of a name in SPLITS, then spells bytes as letters."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
