"""Renders an answer with calls by real chat templates, and reads it back: python scripts/check_templates.py FILE_OR_DIRECTORY ...

Of each *.jinja file it says which dialects `find_dialect_names` sees in it, and whether these read what the template writes for an answer
with content, thoughts and calls, as they would from a model: the names and arguments of calls, the content and the thoughts. A template
may leave out what its model does not have: parallel calls, thoughts, or content beside calls; so smaller answers are tried too.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.errors import JaxLLMError
from jaxllm.text.chat_template import render_chat
from server.dialects import (
    Content,
    Reasoning,
    StreamParser,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    by_name,
    find_dialect_names,
)

TOOLS = (
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("run", {"type": "object", "properties": {"code": {"type": "string"}, "options": {"type": "object"}, "dry": {"type": "boolean"}}}),
)  # fmt: skip
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_weather", {"city": "Paris", "days": 3}),
    ("run", {"code": 'if a < b:\n\tprint("[é]")', "options": {"deep": [1, {"x": 2.5}]}, "dry": True}),
)
CONTENT, THOUGHTS = "I look.", "Hm."
TOKENIZER: Any = SimpleNamespace(chat_templates={}, special_tokens_map={"bos_token": "", "eos_token": ""})


@dataclass
class Answer:
    """An answer of a model, or as much as dialects read of one."""

    calls: list[tuple[str, dict[str, Any]]]
    content: str = ""
    thoughts: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """As a chat template takes it."""
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(self.calls)
        ]
        found: dict[str, Any] = {"role": "assistant", "content": self.content, "tool_calls": calls}
        return found | ({"reasoning_content": self.thoughts} if self.thoughts else {})


def answers() -> Iterator[tuple[str, Answer]]:
    """The largest first."""
    yield "thoughts, content and two calls", Answer(list(CALLS), CONTENT, THOUGHTS)
    yield "content and two calls", Answer(list(CALLS), CONTENT)
    yield "two calls", Answer(list(CALLS))
    yield "a call with text, an object and a boolean", Answer(list(CALLS[1:]))
    yield "a call with a word and a number", Answer(list(CALLS[:1]))


def written(template: str, answer: Answer) -> tuple[str, str]:
    """The prompt, and what the template writes behind it for this answer. Raises JaxLLMError."""
    question = {"role": "user", "content": "How is it?"}
    tools = [{"type": "function", "function": {"name": t.name, "description": "", "parameters": t.parameters}} for t in TOOLS]
    prompt = render_chat(TOKENIZER, [question], chat_template=template, tools=tools, add_generation_prompt=True)
    options: dict[str, Any] = {"chat_template": template, "tools": tools, "add_generation_prompt": False}
    whole = render_chat(TOKENIZER, [question, answer.message], **options)
    # A history may lack the thoughts that the prompt opens. What both have may end in the middle of a marker.
    common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    if (marker := whole.rfind("<", 0, common)) > whole.rfind(">", 0, common):
        common = marker
    return prompt[:common], whole[common:]


def read(prompt: str, text: str, tool: str | None, reasoning: str | None) -> Answer:
    """The answer to a prompt as dialects read it."""
    dialect, thinking = by_name(tool, reasoning, re.findall(r"</?[^<>\s]+>", text))  # tokens whose names end as the model's do
    parser = StreamParser(dialect, thinking, tools=TOOLS, prompt_text=prompt)
    found, arguments = Answer([]), list[str]()
    for delta in [*parser.feed(text), *parser.finish()]:
        match delta:
            case Content(part):
                found.content += part
            case Reasoning(part):
                found.thoughts += part
            case ToolCallStart(_, _, name):
                found.calls.append((name, {}))
                arguments.append("")
            case ToolCallArguments(index, part):
                arguments[index] += part
    found.calls = [(name, _parsed(given)) for (name, _), given in zip(found.calls, arguments, strict=True)]
    return found


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        return json.loads(arguments or "{}")  # type: ignore[no-any-return]
    except ValueError:
        return {"no JSON": arguments}


def check(template: str) -> tuple[bool, str]:
    """Whether a template's answers are read, and what is said of it."""
    tool, reasoning = find_dialect_names(template)
    names = f"{tool or '-'}, {reasoning or '-'}"
    if tool is None:
        return True, f"{names}: no dialect of calls"
    told, has_calls = "", False
    for what, answer in answers():
        try:
            prompt, text = written(template, answer)
        except JaxLLMError as error:
            told = told or f"cannot write {what}: {error}"
            continue
        has_calls = has_calls or answer.calls[0][0] in text
        found = read(prompt, text, tool, reasoning)
        # What ends the turn is a stop token, and stands behind the calls.
        if (
            found.calls == answer.calls
            and found.content.strip().startswith(answer.content)
            and found.thoughts.strip() == answer.thoughts
        ):
            return True, f"{names}: reads {what}" + (f" ({told})" if told else "")
        told = told or f"{what}: wrote {text!r}, read {found}"
    if told and not has_calls and not told.startswith("cannot write"):
        return True, f"{names}: the template writes no calls"
    return False, f"{names}: {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="chat templates, or directories of *.jinja files")
    parser.add_argument("--short", action="store_true", help="at most 150 characters of each")
    given = parser.parse_args(arguments)
    failed = 0
    for file in [file for path in given.paths for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])]:
        is_right, told = check(file.read_text(encoding="utf-8"))
        failed += not is_right
        line = f"{'ok  ' if is_right else 'FAIL'} {file.stem}: {told}"
        print(line[:150] if given.short else line)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
