"""The names of dialects, which are vLLM's, and the detection of a model's dialects from its chat template."""

from typing import Any

from jaxllm.thinking import MARKERS
from server.dialects.deepseek import DeepSeek
from server.dialects.dialect import ReasoningDialect, ToolDialect, special_tokens_of
from server.dialects.harmony import HARMONY
from server.dialects.kimi import Kimi
from server.dialects.llama_json import LlamaJson
from server.dialects.marked_json import GRANITE, HERMES, JAMBA, PHI4_MINI
from server.dialects.mistral import Mistral
from server.dialects.pythonic import Pythonic
from server.dialects.xlam import Xlam
from server.dialects.xml import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, XmlCalls

TOOL_DIALECTS: dict[str, ToolDialect] = {
    "deepseek_v3": DeepSeek(code_block=True),
    "deepseek_v31": DeepSeek(code_block=False),
    "glm45": XmlCalls(GLM45),
    "glm47": XmlCalls(GLM45),
    "granite": GRANITE,
    "granite4": HERMES,
    "hermes": HERMES,
    "jamba": JAMBA,
    "kimi_k2": Kimi(),
    "llama3_json": LlamaJson(),
    "llama4_json": LlamaJson(),
    "llama4_pythonic": Pythonic(("<|python_start|>",), "<|python_end|>"),
    "minimax_m2": XmlCalls(MINIMAX_M2),
    "mistral": Mistral(),
    "openai": HARMONY,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": Pythonic(),
    "qwen3_coder": XmlCalls(QWEN3_CODER, section_optional=True),
    "qwen3_json": HERMES,
    "qwen3_xml": XmlCalls(QWEN3_CODER, section_optional=True),
    "seed_oss": XmlCalls(SEED_OSS),
    "xlam": Xlam(),
}

_THINK, _MISTRAL, _SEED = (((start,), (end,)) for start, end in MARKERS)
REASONING_DIALECTS: dict[str, ReasoningDialect] = {
    "deepseek_r1": ReasoningDialect(*_THINK, implied=True, expected=True),
    "deepseek_v3": ReasoningDialect(*_THINK),
    "glm45": ReasoningDialect(*_THINK, expected=True),
    "granite": ReasoningDialect(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "kimi_k2": ReasoningDialect(*_THINK),
    "minimax_m2": ReasoningDialect(*_THINK, implied=True, expected=True),
    "mistral": ReasoningDialect(*_MISTRAL),
    "openai_gptoss": ReasoningDialect(channels=True, expected=True, markers=HARMONY.openings),
    "qwen3": ReasoningDialect(*_THINK, expected=True),
    "seed_oss": ReasoningDialect(*_SEED),
    "think": ReasoningDialect(*_THINK),
}


def by_name(
    tool_parser: str | None = None, reasoning_parser: str | None = None
) -> tuple[ToolDialect | None, ReasoningDialect | None]:
    """The dialects with these names. Raises ValueError for an unknown name."""
    for name, known, flag in (
        (tool_parser, TOOL_DIALECTS, "--tool-call-parser"),
        (reasoning_parser, REASONING_DIALECTS, "--reasoning-parser"),
    ):
        if name and name not in known:
            raise ValueError(f"{flag} {name} is unknown; known are {', '.join(sorted(known))}")
    return TOOL_DIALECTS.get(tool_parser or ""), REASONING_DIALECTS.get(reasoning_parser or "")


_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_json", ("<|python_start|>", '"parameters"')),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("pythonic", ("[func_name1(",)),
)
"""The first row whose signs all occur in a template."""

_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("seed_oss", ("<seed:think>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "</think>", "thinking")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("glm45", ("<arg_key>", "</think>")),
    ("qwen3", ("</think>", "enable_thinking")),
    ("think", ("<think>",)),
)


def find_dialect_names(chat_template: str | None, tokenizer: Any = None) -> tuple[str | None, str | None]:
    """The names of the tool and reasoning dialects detected in a chat template, or None."""
    template = chat_template or ""
    tool = next((name for name, signs in _TOOL_SIGNS if all(sign in template for sign in signs)), None)
    reasoning = next((name for name, signs in _REASONING_SIGNS if all(sign in template for sign in signs)), None)
    if tool is None and "tools" in template and "[TOOL_CALLS]" in special_tokens_of(tokenizer):
        tool = "mistral"
    return tool, reasoning
