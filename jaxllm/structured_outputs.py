"""The structured-output parameters of a request, with the checks that need no compiler. Independent of tokens and grammars."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError

MAX_SPEC_BYTES = 256 * 1024
MAX_NESTING = 64
"""Deepest nesting of a JSON schema or structural tag."""
MAX_NODES = 10_000
"""Values in a JSON schema or structural tag."""
MAX_CHOICES = 10_000
MAX_START_TOKENS = 64

PARAM = "structured_outputs"
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint of an output, exactly one, with options.

    Construction raises InvalidRequestError for what is malformed or too large, and converts JSON to text.
    Only compiling shows whether a constraint can be satisfied.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as text or as Python's value of it."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """The allowed outputs; any list of strings is accepted."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in GBNF (EBNF with ::=)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which certain tags begin parts of a given form."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its tokens."""
    disable_additional_properties: bool = False
    """Whether objects have only the properties that the schema names, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """Regular expression of the space between the tokens of JSON."""
    start_after_token_ids: tuple[int, ...] | None = None
    """The constraint applies only after this run of output tokens."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has none"
            raise _wrong("", f"{found}, must have exactly one of {', '.join(CONSTRAINTS)}")
        for name in ("json", "structural_tag"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _json_text(name, value))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_object is not None and self.json_object is not True:
            raise _wrong("json_object", f"is {self.json_object!r}, must be true, or left out")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"is {_shown(getattr(self, name))}, must be true or false")
        self._check_agreement()
        if self.start_after_token_ids is not None:
            object.__setattr__(self, "start_after_token_ids", _start_tokens(self.start_after_token_ids))

    def _check_agreement(self) -> None:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _wrong("whitespace_pattern", "contradicts disable_any_whitespace; give one of them")
        options = {
            "disable_any_whitespace": self.disable_any_whitespace,
            "disable_additional_properties": self.disable_additional_properties,
            "whitespace_pattern": self.whitespace_pattern is not None,
        }
        if self.json is None and self.json_object is None and self.structural_tag is None:
            for name, is_set in options.items():
                if is_set:
                    raise _wrong(name, f"is about JSON, but the constraint is {self.kind}; leave it out")

    @property
    def kind(self) -> str:
        """The name of the constraint."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """From an object of this class or a mapping of its fields. Raises InvalidRequestError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong("", f"is a {type(value).__name__}, must be an object with one of {', '.join(CONSTRAINTS)}")
        known = cls.__dataclass_fields__
        for name in value:
            if name not in known:
                raise _wrong("", f"has {_shown(name)}, which is unknown; it may have {', '.join(known)}")
        return cls(**value)


def _wrong(field: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}{'.' * bool(field)}{field} {what}", PARAM)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise _wrong(name, f"is a {type(text).__name__}, must be a string")
    if not text.strip():
        raise _wrong(name, "is empty")
    if "\0" in text:
        raise _wrong(name, f"has a NUL character at place {text.index(chr(0))}")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise _wrong(name, f"has half a surrogate pair at place {error.start}") from None
    if num_bytes > MAX_SPEC_BYTES:
        raise _wrong(name, f"has {num_bytes} bytes, at most {MAX_SPEC_BYTES} are allowed")


def _json_text(name: str, value: Any) -> str:
    """The text of a JSON value given as text or as Python's value, within the limits."""
    if isinstance(value, str):
        _check_text(name, value)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except RecursionError:
            raise _wrong(name, _TOO_DEEP.format("")) from None
        except json.JSONDecodeError as error:
            raise _wrong(name, f"is not valid JSON: {error.msg} (line {error.lineno} column {error.colno})") from None
        except ValueError as error:
            raise _wrong(name, f"is not valid JSON: {error}") from None
    allowed: tuple[type, ...] = (Mapping, bool) if name == "json" else (Mapping,)
    if not isinstance(value, allowed):
        raise _wrong(name, f"is {_shown(value)}, must be an object{' (a JSON schema), or true' * (name == 'json')}")
    if (fault := size_fault(value)) is not None:
        raise _wrong(name, fault)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong(name, f"is not JSON: {error}") from None
    _check_text(name, text)
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


_TOO_DEEP = f"is nested too deeply{{}}: at most {MAX_NESTING} levels are allowed"


def size_fault(value: Any) -> str | None:
    """Describe what is wrong with the nesting, the number of values or the texts of a JSON value; None if it is within the limits."""
    todo: list[tuple[Any, str, int]] = [(value, "", 1)]
    num_nodes, num_characters = 1, 0
    while todo:
        node, pointer, level = todo.pop()
        if isinstance(node, str):
            num_characters += len(node)
        elif isinstance(node, (Mapping, list, tuple)):
            num_nodes += len(node)
        if isinstance(node, Mapping):
            num_characters += sum(len(key) for key in node if isinstance(key, str))
        if num_nodes > MAX_NODES:
            return f"has more than {MAX_NODES} values; ask for something simpler"
        if num_characters > MAX_SPEC_BYTES:
            return f"has more than {MAX_SPEC_BYTES} bytes of texts; ask for something simpler"
        if not isinstance(node, (Mapping, list, tuple)):
            continue
        if level > MAX_NESTING:
            return _TOO_DEEP.format(f" at {pointer[:80]}…")
        children = node.items() if isinstance(node, Mapping) else enumerate(node)
        todo += [(child, f"{pointer}/{str(key)[:81]}"[:81], level + 1) for key, child in children]
    return None


def _choices(choices: Any) -> tuple[str, ...]:
    if not isinstance(choices, (list, tuple)):
        raise _wrong("choice", f"is a {type(choices).__name__}, must be a list of strings")
    if not choices:
        raise _wrong("choice", "is empty, must have at least 1 string")
    if len(choices) > MAX_CHOICES:
        raise _wrong("choice", f"has {len(choices)} strings, at most {MAX_CHOICES} are allowed")
    for place, choice in enumerate(choices):
        _check_text(f"choice[{place}]", choice)
    num_bytes = sum(len(choice.encode()) for choice in choices)
    if num_bytes > MAX_SPEC_BYTES:
        raise _wrong("choice", f"has {num_bytes} bytes in all, at most {MAX_SPEC_BYTES} are allowed")
    return tuple(dict.fromkeys(choices))


def _start_tokens(ids: Any) -> tuple[int, ...]:
    name = "start_after_token_ids"
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int and token >= 0 for token in ids):
        raise _wrong(name, f"is {_shown(ids)}, must be a list of token ids")
    if not 1 <= len(ids) <= MAX_START_TOKENS:
        raise _wrong(name, f"has {len(ids)} token ids, must have 1 to {MAX_START_TOKENS}")
    return tuple(ids)


GuidedDecodingParams = StructuredOutputsParams
"""The name that older scripts import."""
