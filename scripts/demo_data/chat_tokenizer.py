"""The demo model's tokenizer: byte-level BPE with single digits, its special tokens and chat template, and its files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .dialogue import Dialogue

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Their ids are their places here: 0, 1, 2."""
END_OF_TEXT_ID, TURN_END_ID = (SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, TURN_END))
STOP_IDS = (TURN_END_ID, END_OF_TEXT_ID)
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but part of the text."""
ROLES = ("system", "user", "assistant", "tool")
MAX_LENGTH = 2048

# Line ends; runs of blanks whole, so that a prompt may end in its indentation; words and signs with the space before them;
# single digits.
_PIECES = r"\n+| {2,}| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"

_TOOLS_INTRODUCTION = "You can call these tools:\n<tools>\n"
_TOOLS_END = "</tools>\nTo call one, answer with its name and arguments as JSON in a tool_call tag."

CHAT_TEMPLATE = """{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{%- if has_system -%}{{- '\\n\\n' -}}{%- endif -%}
{{- 'You can call these tools:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- '</tools>\\nTo call one, answer with its name and arguments as JSON in a tool_call tag.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and has_system) -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
{%- else -%}
{{- text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{%- if not loop.first or text(message.content) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}{%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), ask: bool = False) -> str:
    """Render the messages as the chat template does (a test compares them); far faster than Jinja."""
    parts = []
    rest = list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
    if system is not None or tools:
        parts.append(f"{TURN_START}system\n{system or ''}")
        if tools:
            lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
            parts.append(("\n\n" if system is not None else "") + _TOOLS_INTRODUCTION + lines + _TOOLS_END)
        parts.append(TURN_END + "\n")
    for message in rest:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        parts.append(f"{TURN_START}{message['role']}\n{content}{TURN_END}\n")
    if ask:
        parts.append(f"{TURN_START}assistant\n")
    return "".join(parts)


def render_dialogue(dialogue: Dialogue) -> str:
    """A whole dialogue, as trained."""
    return render(dialogue.messages, dialogue.tools)


def render_question(dialogue: Dialogue) -> str:
    """A dialogue up to where the last answer begins."""
    return render(dialogue.messages[:-1], dialogue.tools, ask=True)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    roles: Sequence[str] = ROLES,
) -> Tokenizer:
    """Byte-level BPE. The roles of a chat are one token each, which the training mask relies on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_TAGS),
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TOOL_TAGS])
    for role in roles:
        if len(tokenizer.encode(role).ids) != 1:
            raise RuntimeError(f"the role {role!r} is not one token of the trained vocabulary")
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    directory: Path,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    special = {
        str(place): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for place, token in enumerate(special_tokens)
    }
    config = {
        "added_tokens_decoder": special,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
