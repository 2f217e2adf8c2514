"""Converts a Python literal written by a model to JSON text, without evaluating anything."""

import re
from collections.abc import Iterator

from server.dialects.dialect import to_json
from server.dialects.json_scanner import Broken

MAX_DEPTH = 32

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"""
    r"""|(?P<word>[A-Za-z]+)|(?P<mark>[\[\](){},:]))""",
    re.DOTALL,
)
_NUMBER = re.compile(r"\+?(-?)([0-9]*)(?:\.([0-9]*))?(.*)")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def literal_to_json(text: str) -> str:
    """The JSON text of strings, numbers, True, False, None, lists, tuples and dicts. Raises Broken for all else."""
    tokens = _tokens(text)
    out: list[str] = []
    _value(next(tokens), tokens, out, 0)
    if next(tokens) != ("end", ""):
        raise Broken
    return "".join(out)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if not found:
            raise Broken
        yield found.lastgroup or "", found[found.lastgroup or 0]
        at = found.end()
    while True:
        yield "end", ""


def _value(token: tuple[str, str], tokens: Iterator[tuple[str, str]], out: list[str], depth: int) -> None:
    kind, text = token
    if kind == "text":
        out.append(to_json(_unescape(text[1:-1])))
    elif kind == "number":
        out.append(_number(text))
    elif kind == "word" and text in _WORDS:
        out.append(_WORDS[text])
    elif text in _CLOSING and depth < MAX_DEPTH:
        _members(text, tokens, out, depth + 1)
    else:
        raise Broken


def _members(opening: str, tokens: Iterator[tuple[str, str]], out: list[str], depth: int) -> None:
    is_dict, closing = opening == "{", ("mark", _CLOSING[opening])
    out.append("{" if is_dict else "[")
    token = next(tokens)
    while token != closing:
        if is_dict:
            if token[0] != "text" or next(tokens) != ("mark", ":"):
                raise Broken
            out.append(to_json(_unescape(token[1][1:-1])) + ": ")
            token = next(tokens)
        _value(token, tokens, out, depth)
        token = next(tokens)
        if token == ("mark", ","):
            token = next(tokens)
            if token != closing:
                out.append(", ")
        elif token != closing:
            raise Broken
    out.append("}" if is_dict else "]")


def _number(text: str) -> str:
    sign, whole, fraction, exponent = _NUMBER.fullmatch(text.replace("_", "")).groups()  # type: ignore[union-attr]
    return f"{sign}{whole.lstrip('0') or '0'}{'' if fraction is None else '.' + (fraction or '0')}{exponent}"


def _unescape(text: str) -> str:
    return _ESCAPE.sub(_escaped, text) if "\\" in text else text


def _escaped(found: re.Match[str]) -> str:
    code = found[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= 0x10FFFF else found[0]
    return chr(int(code, 8)) if code[0] in "01234567" else found[0]
