"""The names of dialects, which are vLLM's, and the detection of a model's dialects from its chat template."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxllm.thinking import MARKERS
from server.dialects.apertus import Apertus
from server.dialects.deepseek import DeepSeek
from server.dialects.dialect import ReasoningDialect, ToolDialect, special_tokens_of
from server.dialects.gemma4 import Gemma4
from server.dialects.harmony import HARMONY, read_messages
from server.dialects.kimi import Kimi
from server.dialects.llama_json import LlamaJson
from server.dialects.marked_json import COHERE, GRANITE, GRANITE_20B_FC, HERMES, JAMBA, LONGCAT, NEMOTRON, PHI4_MINI
from server.dialects.mistral import Mistral
from server.dialects.nested_tags import NestedTags
from server.dialects.pythonic import Pythonic, PythonicLines
from server.dialects.response_template import TemplateCalls, TemplateReasoning, is_usable
from server.dialects.xlam import Xlam
from server.dialects.xml import (
    DOTS,
    GLM45,
    HY_V3,
    K2_HORIZON,
    MIMO,
    MINICPM5,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    XmlCalls,
    dsml,
)
from server.dialects.xtml import CLOSE, END_MESSAGE, OPEN, SEP, Xtml

TOOL_DIALECTS: dict[str, ToolDialect] = {
    "apertus": Apertus(),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "deepseek_v3": DeepSeek(code_block=True),
    "deepseek_v31": DeepSeek(code_block=False),
    "deepseek_v32": XmlCalls(dsml("function_calls")),
    "deepseek_v4": XmlCalls(dsml("tool_calls"), ends_reasoning=True),
    "deepseek_v41": XmlCalls(dsml("calls", space=" "), ends_reasoning=True),
    "dots": XmlCalls(DOTS),
    "ernie45": HERMES,
    "functiongemma": Gemma4("<start_function_call>", "<end_function_call>", "<escape>", reasons=False, quotes_all=True),
    "gemma4": Gemma4(),
    "glm45": XmlCalls(GLM45),
    "glm47": XmlCalls(GLM45),
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_20B_FC,
    "granite4": HERMES,
    "hermes": HERMES,
    "hf": TemplateCalls(),
    "hunyuan_a13b": JAMBA,
    "hy_v3": XmlCalls(HY_V3, ends_reasoning=True, is_suffixed=True),
    "jamba": JAMBA,
    "k2_horizon": XmlCalls(K2_HORIZON, ends_reasoning=True),
    "kimi_k2": Kimi(),
    "kimi_k3": Xtml(),
    "lfm2": Pythonic(("<|tool_call_start|>",), "<|tool_call_end|>", bare=False),
    "ling3": XmlCalls(GLM45, ends_reasoning=True),
    "llama3_json": LlamaJson(),
    "llama4_json": LlamaJson(),
    "llama4_pythonic": Pythonic(("<|python_start|>",), "<|python_end|>"),
    "longcat": LONGCAT,
    "mimo": XmlCalls(MIMO, section_optional=True),
    "minicpm5": XmlCalls(MINICPM5),
    "minimax_m2": XmlCalls(MINIMAX_M2),
    "minimax_m3": NestedTags(),
    "mistral": Mistral(),
    "nemotron_json": NEMOTRON,
    "olmo3": PythonicLines(("<function_calls>",), "</function_calls>", bare=False),
    "openai": HARMONY,
    "phi4_mini_json": PHI4_MINI,
    "poolside_v1": XmlCalls(GLM45),
    "pythonic": Pythonic(),
    "qwen3_coder": XmlCalls(QWEN3_CODER, section_optional=True),
    "qwen3_json": HERMES,
    "qwen3_xml": XmlCalls(QWEN3_CODER, section_optional=True),
    "seed_oss": XmlCalls(SEED_OSS),
    "step3p5": XmlCalls(QWEN3_CODER, section_optional=True),
    "xlam": Xlam(),
}

_THINK, _MISTRAL, _SEED, _COHERE, _GEMMA = (((start,), (end,)) for start, end in MARKERS)
_IFM = tuple(f"ifm|{name}" for name in ("think", "think_fast", "think_faster"))
_MARKED = ReasoningDialect(*_THINK)
_EXPECTED = ReasoningDialect(*_THINK, expected=True)
_IMPLIED = ReasoningDialect(*_THINK, implied=True, expected=True)
_COHERE_COMMAND = ReasoningDialect(
    *_COHERE,
    answer_start=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    answer_end=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)

HF = "hf"
"""The dialect that a checkpoint describes in its response template."""

REASONING_DIALECTS: dict[str, ReasoningDialect] = {
    "cohere_command3": _COHERE_COMMAND,
    "cohere_command4": _COHERE_COMMAND,
    "deepseek_r1": _IMPLIED,
    "deepseek_v3": _MARKED,
    "deepseek_v4": _IMPLIED,
    "deepseek_v41": _IMPLIED,
    "ernie45": replace(_IMPLIED, answer_start=("<response>",), answer_end=("</response>",)),
    "gemma4": ReasoningDialect(tuple(f"{start}thought" for start in _GEMMA[0]), _GEMMA[1]),
    "glm45": _EXPECTED,
    "glm47": _EXPECTED,
    "granite": ReasoningDialect(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "granite33": replace(_MARKED, answer_start=("<response>",), answer_end=("</response>",)),
    "granite_thinking_parser": _EXPECTED,
    "hf": TemplateReasoning(),
    "holo2": _IMPLIED,
    "hunyuan_a13b": replace(_MARKED, answer_start=("<answer>", "助手："), answer_end=("</answer>",)),
    "hy_v3": replace(_MARKED, is_suffixed=True),
    "k2_horizon": ReasoningDialect(
        tuple(f"<{name}>" for name in _IFM), tuple(f"</{name}>" for name in _IFM), implied=True, expected=True
    ),
    "kimi_k2": _MARKED,
    "kimi_k3": ReasoningDialect(
        (f"{OPEN}think{SEP}",),
        (f"{CLOSE}think{SEP}",),
        answer_start=(f"{OPEN}response{SEP}",),
        answer_end=(f"{CLOSE}response{SEP}", END_MESSAGE),
    ),
    "ling3": _MARKED,
    "mimo": _EXPECTED,
    "minicpmv": _MARKED,
    "minimax_m2": _IMPLIED,
    "minimax_m2_append_think": replace(_IMPLIED, in_content=True),
    # An answer without thoughts begins with the marker that closes them.
    "minimax_m3": ReasoningDialect(("<mm:think>",), ("</mm:think>",), answer_start=("</mm:think>",)),
    "mistral": ReasoningDialect(*_MISTRAL),
    "nano_v3": _EXPECTED,
    "nemotron_v3": _EXPECTED,
    "olmo3": _IMPLIED,
    "openai_gptoss": ReasoningDialect(channels=True, expected=True, markers=HARMONY.openings, whole=read_messages),
    "poolside_v1": _MARKED,
    "qwen3": _EXPECTED,
    "seed_oss": ReasoningDialect(*_SEED),
    "step3": _IMPLIED,
    "step3p5": _IMPLIED,
    "step5": _IMPLIED,
    "think": _MARKED,
}


def by_name(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    added_tokens: Collection[str] = (),
    response_template: Mapping[str, Any] | None = None,
    *,
    tools: Mapping[str, ToolDialect] = TOOL_DIALECTS,
    reasonings: Mapping[str, ReasoningDialect] = REASONING_DIALECTS,
) -> tuple[ToolDialect | None, ReasoningDialect | None]:
    """The dialects with these names, of a model with these tokens and this response template.

    tools, reasonings: those that are known. Raises ValueError for an unknown name, or one that does not fit.
    """
    check_known(tool_parser, reasoning_parser, tools, reasonings)
    if HF in (tool_parser, reasoning_parser) and {tool_parser, reasoning_parser} - {HF, None}:
        raise ValueError(f"{HF} reads tool calls and reasoning together: name it for both, or none for one of them")
    tool, reasoning = tools.get(tool_parser or ""), reasonings.get(reasoning_parser or "")
    return tool and tool.of(added_tokens, response_template), reasoning and reasoning.of(added_tokens, response_template)


def check_known(
    tool_parser: str | None, reasoning_parser: str | None, tools: Collection[str], reasonings: Collection[str]
) -> None:
    """Raise ValueError for a name that is not among the known ones."""
    for name, known, flag in ((tool_parser, tools, "--tool-call-parser"), (reasoning_parser, reasonings, "--reasoning-parser")):
        if name and name not in known:
            raise ValueError(f"{flag} {name} is unknown; known are {', '.join(sorted(known))}")


_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v41", ("｜DSML｜ calls>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("minimax_m3", ("]<]minimax[>[", "<tool_call>")),
    ("functiongemma", ("<start_function_call>",)),
    ("dots", ("<dots_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("k2_horizon", ("<ifm|tool_calls>", "<ifm|arg_key>")),
    ("longcat", ("<longcat_tool_call>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("olmo3", ("<functions>", "<function_calls>")),
    ("minicpm5", ('<function name="', '<param name="')),
    ("hy_v3", ("<tool_sep", "<arg_key")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("mimo", ("<function=", "<parameter=", "MiMo")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("hunyuan_a13b", ("<tool_calls>", "<answer>")),
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
    ("gemma4", ("<|channel>", "<channel|>")),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("minimax_m3", ("<mm:think>",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("seed_oss", ("<seed:think>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<think>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("cohere_command3", ("<|START_RESPONSE|>",)),
    ("k2_horizon", ("<ifm|think>",)),
    ("granite33", ("<response>", "</think>", "<|start_of_role|>")),
    ("ernie45", ("<response>", "</think>")),
    ("hunyuan_a13b", ("<answer>", "</think>", "<|extra_0|>")),
    ("deepseek_v4", ("｜DSML｜", "</think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "</think>", "thinking")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("hy_v3", ("<tool_sep", "<arg_key", "</think")),
    ("glm45", ("<arg_key>", "</think>")),
    ("qwen3", ("</think>", "enable_thinking")),
    ("think", ("<think>",)),
)


_TOOL_TOKENS = {"mistral": "[TOOL_CALLS]", "lfm2": "<|tool_call_start|>"}
"""Special tokens that show the format where a template takes tools and shows no sign."""


def find_dialect_names(chat_template: str | None, tokenizer: Any = None) -> tuple[str | None, str | None]:
    """The names of the tool and reasoning dialects detected in a chat template, or None."""
    template = chat_template or ""
    tool = next((name for name, signs in _TOOL_SIGNS if all(sign in template for sign in signs)), None)
    reasoning = next((name for name, signs in _REASONING_SIGNS if all(sign in template for sign in signs)), None)
    if tool is None and "tools" in template:
        special_tokens = special_tokens_of(tokenizer)
        tool = next((name for name, token in _TOOL_TOKENS.items() if token in special_tokens), None)
    if tool is None and reasoning is None and is_usable(response_template_of(tokenizer)):
        return HF, HF
    return tool, reasoning


def response_template_of(tokenizer: Any) -> Mapping[str, Any] | None:
    """The `response_template` in tokenizer_config.json, which describes the format of answers."""
    found = getattr(tokenizer, "config", {}).get("response_template")
    return found if isinstance(found, Mapping) else None
