"""Renders a conversation into the text that a model was trained on, with the Jinja template of its tokenizer.

The environment is the one that `transformers` gives its templates (sandbox, loop controls, `tojson`, `raise_exception`,
`strftime_now`, `{% generation %}`), so that templates mean the same here.
"""

import datetime
import functools
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.log import logger
from jaxllm.text.built_in_templates import OF_ARCHITECTURES, built_in_template
from jaxllm.text.chat_media import PARTS, A

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer  # a process that only renders loads no tokenizers

ContentFormat = Literal["auto", "string", "openai"]
ArgumentsFormat = Literal["object", "text", "either"]


class ChatTemplateError(InvalidRequestError):
    """The template could not be rendered, or refused the conversation."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Compiled(NamedTuple):
    """A template and what it expects of messages."""

    template: jinja2.Template
    walks: bool
    """It walks through the parts of a message's content."""
    asks: bool
    """It asks whether content is a string."""
    arguments: ArgumentsFormat
    """Which form the arguments of a tool call may have."""


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> _Compiled:
    environment = _environment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template has a syntax error in line {error.lineno}: {error.message}", "chat_template"
        ) from error
    walks = any(_names(loop.iter, "content") for loop in tree.find_all(jinja2.nodes.For))
    of_strings = [test.node for test in tree.find_all(jinja2.nodes.Test) if test.name == "string"]
    return _Compiled(template, walks, bool(of_strings), _arguments_format(tree, of_strings))


def _arguments_format(tree: jinja2.nodes.Template, of_strings: Sequence[jinja2.nodes.Node]) -> ArgumentsFormat:
    if any(_names(node, "arguments") for node in of_strings):
        return "either"
    written = (each.node for each in tree.find_all(jinja2.nodes.Filter) if each.name == "tojson" and each.node is not None)
    if any(_names(node, "arguments") for node in written):
        return "object"
    sums = tree.find_all(jinja2.nodes.Add)
    return "text" if any(_names(node, "arguments") for each in sums for node in (each.left, each.right)) else "object"


def _names(node: jinja2.nodes.Node, name: str) -> bool:
    """Whether an expression is the variable, attribute or item of this name."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == name
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == name
    return isinstance(node, jinja2.nodes.Name) and node.name == name


def template_variables(source: str) -> set[str]:
    """The names of variables that a template reads. Evaluates its constants, which a hostile template can make costly."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(source))


def load_chat_template(text_or_file: str) -> str:
    """The template that an option gives: its text, the path of a file, or a name of ours. Raises ConfigError if it is no template."""
    source = text_or_file
    if source in OF_ARCHITECTURES.values():
        return built_in_template(source)
    if "{" not in source and "\n" not in source:
        file = Path(source).expanduser()
        if not file.is_file():
            raise ConfigError(f"chat_template is {source!r}, must be an existing file or the text of a Jinja template")
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        _compiled(source)
    except ChatTemplateError as error:
        raise ConfigError(str(error)) from error
    return source


def choose_template(tokenizer: "Tokenizer", given: str | None = None, *, tools: bool = False) -> str:
    """The given template (by name, or its text), else the tokenizer's for tools, else its usual one."""
    templates = tokenizer.chat_templates
    if given is not None:
        return templates.get(given, given)
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise ChatTemplateError(
            f"the tokenizer has the chat templates {', '.join(sorted(templates))} but no default; name one in chat_template",
            "chat_template",
        )
    raise ChatTemplateError(
        "the tokenizer has no chat template; pass one with chat_template (--chat-template), or use a plain prompt",
        "chat_template",
    )


def render_chat(
    tokenizer: "Tokenizer",
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    content_format: ContentFormat = "auto",
    image_texts: Sequence[str] = (),
    interleave_images: bool = False,
    **chat_template_kwargs: Any,
) -> str:
    """The prompt of a conversation, in which `split_media` has replaced images. Raises ChatTemplateError or InvalidRequestError.

    continue_final_message leaves the last message open, so that the model continues it. content_format says whether the
    template expects a message's content as a string or as a list of parts; "auto" inspects the template. image_texts: what stands
    for each image where content is a string; before the message's text, or with interleave_images where the image's part is.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt starts a new message and continue_final_message continues the last; set only one",
            "continue_final_message",
        )
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects (JSON schemas of functions)", "tools")
    compiled = _compiled(choose_template(tokenizer, chat_template, tools=bool(tools)))
    if content_format == "auto":
        as_parts, keep_strings = compiled.walks, compiled.asks or not compiled.walks
    else:
        as_parts, keep_strings = content_format == "openai", content_format == "string"
    images = _ImageTexts(image_texts, interleave_images)
    messages = [
        _normalised(message, number, images, as_parts=as_parts, keep_strings=keep_strings, arguments=compiled.arguments)
        for number, message in enumerate(_checked_conversation(conversation))
    ]
    mark = f"{uuid.uuid4().hex} "
    if continue_final_message:
        _append_mark(messages[-1], mark)
    variables = {
        **tokenizer.special_tokens_map,
        "messages": messages,
        "tools": list(tools) if tools else None,
        "documents": list(documents) if documents else None,
        "add_generation_prompt": add_generation_prompt,
        **chat_template_kwargs,
    }
    try:
        text = compiled.template.render(variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template refused the conversation: {error.message or error}", "messages") from error
    except Exception as error:  # a template can fail like any program
        raise ChatTemplateError(
            f"the chat template failed on the conversation: {type(error).__name__}: {error}", "messages"
        ) from error
    return _cut_at_mark(text, mark) if continue_final_message else text


def _checked_conversation(conversation: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(conversation).__name__}, must be a list of objects with role and content", "messages"
        )
    if not conversation:
        raise InvalidRequestError("messages is empty, must hold at least one message", "messages")
    return conversation


class _ImageTexts:
    """Inserts placeholders of images into contents that are strings."""

    def __init__(self, texts: Sequence[str], interleaved: bool):
        self._texts, self._interleaved = iter(texts), interleaved

    def joined(self, parts: Sequence[Mapping[str, Any]], where: str) -> str:
        """A message's parts as one string."""
        texts: list[str] = []
        num_images = 0
        for part in parts:
            if part["type"] == "text":
                texts.append(part["text"])
                continue
            if (text := next(self._texts, None)) is None:
                raise InvalidRequestError(
                    f"{where} has {A[part['type']]}, but the chat template and the model take text alone", "messages"
                )
            texts.insert(len(texts) if self._interleaved else num_images, text)
            num_images += 1
        return "\n".join(texts)


def _normalised(
    message: Any, number: int, images: _ImageTexts, *, as_parts: bool, keep_strings: bool, arguments: ArgumentsFormat
) -> dict[str, Any]:
    """One message in the form that the template takes."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is a {type(message).__name__}, must be an object with role and content", "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} has the role {role!r}, must be a string like 'user' or 'assistant'", "messages")
    normalised = dict(message)
    if content is None:
        normalised["content"] = ""
    elif isinstance(content, str):
        if as_parts and not keep_strings:
            normalised["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, Sequence):
        parts = [_part(part, f"{where}, part {n}") for n, part in enumerate(content)]
        normalised["content"] = parts if as_parts else images.joined(parts, where)
    else:
        raise InvalidRequestError(
            f"{where} has content of type {type(content).__name__}, must be a string or a list of parts", "messages"
        )
    if tool_calls := message.get("tool_calls"):
        normalised["tool_calls"] = [_tool_call(call, where, arguments) for call in tool_calls]
    return normalised


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part in PARTS.values():
        return dict(part)
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        raise InvalidRequestError(f"{where} has no text", "messages")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where} is {kind!r}; parts may be text ({{'type': 'text', 'text': …}}) and, for models that take them, images "
        "({'type': 'image_url', 'image_url': {'url': …}}), videos (video_url) and audio (audio_url, input_audio)",
        "messages",
    )


def _tool_call(call: Any, where: str, format: ArgumentsFormat) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; the OpenAI API sends them as JSON text.

    Arguments that are no JSON object, such as those that max_tokens cut, stay text where the template takes text, and are
    empty elsewhere: a client sends them with every further request.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequestError(f"{where} has a tool call without a function", "messages")
    function = dict(call["function"])
    given = function.get("arguments")
    parsed: Any = _parsed(given)
    if parsed is None:
        as_text = format != "object" and isinstance(given, str)
        logger.debug("%s has a tool call whose arguments are no JSON object: taken as %s", where, "text" if as_text else "{}")
        parsed = given if as_text else {}
    if format == "text" and not isinstance(parsed, str):
        parsed = given if parsed and isinstance(given, str) else _to_json(parsed)
    function["arguments"] = parsed
    return {**call, "function": function}


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, empty where there are none; None if they are something else."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, Mapping) else None


def _append_mark(message: dict[str, Any], mark: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    elif content and content[-1]["type"] == "text":
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        message["content"] = [*content, {"type": "text", "text": mark}]


def _cut_at_mark(text: str, mark: str) -> str:
    """The text before the mark, stripped if the template stripped the space after the mark."""
    at = text.rfind(mark.strip())
    if at < 0:
        raise ChatTemplateError(
            "the chat template leaves the final message out, so it cannot be continued", "continue_final_message"
        )
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()
