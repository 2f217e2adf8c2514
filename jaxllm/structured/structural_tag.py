"""Converts structural tags to llguidance grammars: free text in which triggers begin parts that must fit a grammar.

Two notations exist. {"structures": [{"begin", "schema", "end"}], "triggers": [...]} and
{"type": "structural_tag", "format": F}, where F is a tree of const_string, json_schema, regex, grammar, any_text, sequence,
or, tag, triggered_tags and tags_with_separator.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import GrammarError

_FREE_TEXT = "/(.|\\n)*/"


class Part(NamedTuple):
    """A run of ordinary text, or one special token."""

    text: str
    special_id: int | None = None

    def __str__(self) -> str:
        return json.dumps(self.text) if self.special_id is None else f"<[{self.special_id}]>"


Split = Callable[[str], Sequence[Part]]


def structural_tag_grammar(tag: dict[str, Any], prepare: Callable[[Any], dict[str, Any]], split: Split) -> str:
    """The grammar of a structural tag in either notation. `prepare` checks a schema and adds its options; `split` finds special
    tokens in a text. Raises GrammarError."""
    writer = _Writer(prepare, split)
    if "structures" in tag:
        _check_keys(tag, "", ("structures", "triggers"), ("type",))
        structures = _list(tag, "", "structures")
        tags = []
        for index, structure in enumerate(structures):
            place = f"/structures/{index}"
            _check_keys(structure, place, ("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": structure["schema"]}
            tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
        body = writer.triggered_tags({"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}, "")
    else:
        _check_keys(tag, "", ("type", "format"))
        body = writer.write(tag["format"], "/format")
    lark = "\n".join(["%llguidance {}", f"start: {body}", *writer.rules])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *writer.grammars]})


class _Writer:
    """Collects rules. Each `write` returns an expression of the rules so far."""

    def __init__(self, prepare: Callable[[Any], dict[str, Any]], split: Split):
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        """Grammars with names of their own rules, which the rules refer to as @name."""
        self._prepare = prepare
        self._split = split
        self._numbers = itertools.count()

    def write(self, node: Any, place: str) -> str:
        if not isinstance(node, dict):
            raise GrammarError(f"at {place} is {node!r:.60}, must be an object")
        kind = node.get("type")
        method = getattr(self, str(kind), None) if kind in _KINDS else None
        if method is None:
            raise GrammarError(f"at {place}/type is {kind!r:.60}, must be one of {', '.join(_KINDS)}")
        return method(node, place)

    def const_string(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("value",), ("type",))
        return self._literal(_text(node, place, "value"))

    def json_schema(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("json_schema",), ("type", "style"))
        if node.get("style", "json") != "json":
            raise GrammarError(f"at {place}/style is {node['style']!r:.60}; only json is supported")
        try:
            return self._rule(f"%json {json.dumps(self._prepare(node['json_schema']))}")
        except GrammarError as error:
            raise GrammarError(f"at {place}/json_schema: {error}") from None

    def regex(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("pattern",), ("type",))
        return self._grammar(f"start: {lark_regex(_text(node, place, 'pattern'))}")

    def grammar(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("grammar",), ("type",))
        return self._grammar(_text(node, place, "grammar"))

    def any_text(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, (), ("type", "excludes"))
        return self._free_text(node, place)

    def sequence(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("elements",), ("type",))
        elements = _list(node, place, "elements")
        written, index = [], 0
        while index < len(elements):
            element, here = elements[index], f"{place}/elements/{index}"
            index += 1
            if _is_any_text(element) and index < len(elements):
                follower, there = elements[index], f"{place}/elements/{index}"
                written.append(self._text_until(element, here, follower, there))
                index += 1
            else:
                written.append(self.write(element, here))
        return self._rule(" ".join(written))

    def _or(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("elements",), ("type",))
        return self._any_of(
            self.write(element, f"{place}/elements/{index}") for index, element in enumerate(_list(node, place, "elements"))
        )

    def tag(self, node: dict[str, Any], place: str, *, skip: int = 0) -> str:
        """A tag without the first `skip` characters of its begin, which the caller has written."""
        _check_keys(node, place, ("begin", "content", "end"), ("type",))
        begin, end, content = _text(node, place, "begin"), node["end"], node["content"]
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(text, str) for text in ends):
            raise GrammarError(f"at {place}/end is {end!r:.60}, must be a string or a list of strings")
        if _is_any_text(content):
            inner = self._any_of(
                self._text_until(content, f"{place}/content", {"type": "const_string", "value": text}, f"{place}/end")
                if text
                else self._free_text(content, f"{place}/content")
                for text in ends
            )
        else:
            inner = f"{self.write(content, f'{place}/content')} {self._any_of(map(self._literal, ends))}"
        return self._rule(f"{self._literal(begin[skip:])} {inner}")

    def triggered_tags(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("triggers", "tags"), ("type", "at_least_one", "stop_after_first", "excludes"))
        triggers, tags = _list(node, place, "triggers"), _list(node, place, "tags")
        starts: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            here = f"{place}/tags/{index}"
            begin = _text(tag if isinstance(tag, dict) else {}, here, "begin")
            fitting = [trigger for trigger in triggers if isinstance(trigger, str) and trigger and begin.startswith(trigger)]
            if not fitting:
                raise GrammarError(f"at {here}/begin is {begin!r:.60}, must start with one of the triggers")
            trigger = max(fitting, key=len)
            starts.setdefault(trigger, []).append(self.tag(tag, here, skip=len(trigger)))
        for index, trigger in enumerate(triggers):
            if trigger not in starts:
                raise GrammarError(f"at {place}/triggers/{index} is {trigger!r:.60}, but no tag begins with it")
        calls = [
            f"{self._text_until(node, place, {'type': 'const_string', 'value': trigger}, place)} {self._any_of(bodies)}"
            for trigger, bodies in starts.items()
        ]
        call = self._any_of(calls)
        repeat = {(False, False): "*", (True, False): "+", (False, True): "?", (True, True): ""}
        first, once = _flag(node, place, "at_least_one"), _flag(node, place, "stop_after_first")
        tail = "" if once and first else self._free_text(node, place)
        if once and not first:
            return self._any_of([call, tail])
        return self._rule(f"({call}){repeat[first, once]} {tail}")

    def tags_with_separator(self, node: dict[str, Any], place: str) -> str:
        _check_keys(node, place, ("tags", "separator"), ("type", "at_least_one", "stop_after_first"))
        tags = _list(node, place, "tags")
        one = self._any_of(self.tag(_object(tag, f"{place}/tags/{i}"), f"{place}/tags/{i}") for i, tag in enumerate(tags))
        rest = "" if _flag(node, place, "stop_after_first") else f" ({self._literal(_text(node, place, 'separator'))} {one})*"
        whole = self._rule(f"{one}{rest}")
        return whole if _flag(node, place, "at_least_one") else self._rule(f"({whole})?")

    # Expressions

    def _text_until(self, text: dict[str, Any], place: str, follower: Any, there: str) -> str:
        """Free text up to what begins `follower`, and the follower."""
        free = self._free_text(text, place)
        kind = follower.get("type") if isinstance(follower, dict) else None
        name = {"const_string": "value", "tag": "begin"}.get(str(kind))
        if name is None or not (literal := _text(follower, there, name)):
            raise GrammarError(f"at {place}: any_text must be followed by a const_string or a tag, which mark its end")
        first, *others = self._split(literal)
        if first.special_id is not None:  # ordinary text cannot contain it
            head = f"{free} {first}"
        else:
            head = f"f{next(self._numbers)}"
            self.rules.append(f"{head}[lazy]: {free} {first}")
        rest = " ".join(map(str, others))
        if kind == "tag":
            rest = f"{rest} {self.tag(follower, there, skip=len(literal))}"
        return f"{head} {rest}"

    def _free_text(self, node: dict[str, Any], place: str) -> str:
        excludes = node.get("excludes") or []
        if not isinstance(excludes, list) or not all(isinstance(text, str) and text for text in excludes):
            raise GrammarError(f"at {place}/excludes is {excludes!r:.60}, must be a list of strings")
        name = f"TEXT{next(self._numbers)}"
        without = "".join(f" & ~/(?s:.*){regex_literal(text)}(?s:.*)/" for text in excludes)
        self.rules.append(f"{name}: {_FREE_TEXT}{without}")
        return name

    def _literal(self, text: str) -> str:
        return " ".join(map(str, self._split(text)))

    def _any_of(self, expressions: Any) -> str:
        return self._rule(" | ".join(expression.strip() or '""' for expression in expressions))

    def _rule(self, body: str) -> str:
        name = f"r{next(self._numbers)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _grammar(self, lark: str) -> str:
        name = f"g{next(self._numbers)}"
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


setattr(_Writer, "or", _Writer._or)  # a keyword cannot name a method
_KINDS = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)


def lark_regex(pattern: str) -> str:
    """A regular expression between Lark's slashes."""
    written, escaped = [], False
    for letter in pattern:
        if letter == "/" and not escaped:
            written.append("\\/")
        else:
            written.append({"\n": "\\n" if not escaped else "n", "\r": "\\r" if not escaped else "r"}.get(letter, letter))
        escaped = letter == "\\" and not escaped
    return f"/{''.join(written)}/"


def regex_literal(text: str) -> str:
    """A regular expression of one text."""
    return "".join(letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _is_any_text(node: Any) -> bool:
    return isinstance(node, dict) and node.get("type") == "any_text"


def _check_keys(node: Any, place: str, needed: Sequence[str], others: Sequence[str] = ()) -> None:
    node = _object(node, place)
    for name in needed:
        if name not in node:
            raise GrammarError(f"at {place or '/'} lacks {name!r}")
    for name in node:
        if name not in (*needed, *others):
            raise GrammarError(
                f"at {place or '/'} has {name!r:.60}, which is unknown; allowed are {', '.join((*needed, *others))}"
            )


def _object(node: Any, place: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise GrammarError(f"at {place or '/'} is {node!r:.60}, must be an object")
    return node


def _list(node: dict[str, Any], place: str, name: str) -> list[Any]:
    value = node[name]
    if not isinstance(value, list) or not value:
        raise GrammarError(f"at {place}/{name} is {value!r:.60}, must be a non-empty list")
    return value


def _text(node: dict[str, Any], place: str, name: str) -> str:
    value = node.get(name)
    if not isinstance(value, str):
        raise GrammarError(f"at {place}/{name} is {value!r:.60}, must be a string")
    return value


def _flag(node: dict[str, Any], place: str, name: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise GrammarError(f"at {place}/{name} is {value!r:.60}, must be true or false")
    return value
