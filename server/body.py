"""Reads a request's body: JSON of bounded depth with finite numbers, then the model's validation. Errors are 400s."""

import difflib
import functools
import math
import re
from collections.abc import MutableMapping
from typing import Any, TypeVar

from pydantic import AliasChoices, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from jaxllm.kv_transfer import PARAM
from server.errors import ApiError, as_api_error, bad_request, shortened
from server.ignored import log_once
from server.openapi import bodies
from server.protocol.common import RequestModel
from server.protocol.sizes import NO_LIMITS, BodyLimits, check_sizes
from server.work import LARGE_BYTES, Work, finish, in_one_piece

LIKENESS = 0.81
"""Similarity above which an unknown name counts as a typo. Other unknown fields are ignored, because many clients send some."""
MAX_NAME, MAX_COMPARED = 64, 32
"""Maximum length of an unknown field's name, and maximum number of such fields per body, that are compared with known names."""
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16
"""Maximum number of objects and lists in a body."""
MAX_TEXTS = 1 << 17
"""Maximum number of strings in a body, field names included. Checking more would delay other requests."""
MAX_VALUES = 1 << 21
"""Maximum number of commas between values, such as token ids."""
MAX_LOGGED = 8
"""Maximum number of unknown fields that the log names."""
_PLAIN = frozenset((int, str, bool, type(None)))
_HUGE_EXPONENT = re.compile(rb"[0-9][eE]\+?[0-9]{3}")
_BRACKET_OR_TEXT = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|[\[\]{}]', re.DOTALL)
_POSITION = re.compile(r" at line (\d+) column (\d+)$")

Model = TypeVar("Model", bound=RequestModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """Read the body as a model. Raises ApiError."""
    check_content_type(request)
    context = request.app.state.context
    ignore_unknown = context.options.limits.ignore_unknown_fields
    work = parsing(await _bytes_of(request), model, context.body_limits, ignore_unknown, request.scope)
    return await context.work.unless_small(work)


async def read_object(request: Request) -> dict[str, Any]:
    """Read the body as a JSON object, and keep it for `read_body`. Raises ApiError."""
    check_content_type(request)
    return await request.app.state.context.work.unless_small(in_one_piece(parse_object, await request.body()))


async def _bytes_of(request: Request) -> bytes:
    """The body, which `request.body` would keep in memory while the answer is streamed."""
    return b"".join([piece async for piece in request.stream() if piece])


def parse_body(raw: bytes, model: type[Model], *, limits: BodyLimits = NO_LIMITS, ignore_unknown: bool = False) -> Model:
    """Parse bytes as a model. Raises ApiError."""
    return finish(parsing(raw, model, limits, ignore_unknown))


def parsing(
    raw: bytes, model: type[Model], limits: BodyLimits, ignore_unknown: bool, scope: MutableMapping[str, Any] | None = None
) -> Work[Model]:
    """Parse bytes as a model. Raises ApiError. scope: of the request, which `EndLeases` reads."""
    body = parse_object(raw)
    del raw
    if scope is not None and PARAM in body:
        scope[PARAM] = body[PARAM]
    yield None
    model.refuse_unsupported(body)
    if unknown := sorted(body.keys() - _names(model) - model.REFUSED.keys() - model.NO_EFFECT.keys()):
        if not ignore_unknown:
            _refuse_misspelt(unknown, model)
        told = ", ".join(repr(shortened(name, MAX_NAME)) for name in unknown[:MAX_LOGGED])
        log_once(f"ignored unknown fields of a {model.__name__}: {told}{', …' * (len(unknown) > MAX_LOGGED)}")
    check_sizes(body, model, limits)
    yield None
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise as_api_error(error) from None


def _refuse_misspelt(unknown: list[str], model: type[RequestModel]) -> None:
    """Raise ApiError for a field whose name is close to one of the model's."""
    suspects = [name for name in unknown if len(name) <= MAX_NAME and name not in _names_of_all()]
    for name in suspects[:MAX_COMPARED]:
        if close := difflib.get_close_matches(name, sorted(_names(model)), 1, LIKENESS):
            hint = f"did you mean {close[0]}? (--ignore-unknown-fields ignores such fields)"
            raise bad_request(f"{name} is unknown; {hint}", name, "unknown_parameter")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse bytes as a JSON object. Raises ApiError."""
    if not raw:
        raise bad_request("the body is empty, must be a JSON object")
    _check_size(raw)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error)
        param = _field_at(raw, reason) if reason.startswith("recursion limit") else None
        what = f"{param} is" if param else "the body is not valid JSON:"
        raise bad_request(f"{what} {_short_reason(reason)}", param, "invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request(f"the body is {_noun(body)}, must be a JSON object")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or len(raw) >= LARGE_BYTES or _HUGE_EXPONENT.search(raw):
        for name, value in body.items():
            if isinstance(value, (dict, list)):
                _check_tree(value, name)
            elif isinstance(value, float) and not math.isfinite(value):
                raise bad_request(f"{shortened(name, 100)} is too large a number", shortened(name, 100))
    return body


def _check_size(raw: bytes) -> None:
    """Raise ApiError for a body with too many parts. Counts them without parsing."""
    if len(raw) < MAX_CONTAINERS:
        return
    if raw.count(b'"') > 2 * MAX_TEXTS:
        raw = _without_escapes(raw)
        if raw.count(b'"') > 2 * MAX_TEXTS:
            raise bad_request(f"the body has more than {MAX_TEXTS} texts and names; send less at a time")
    if raw.count(b"{") + raw.count(b"[") > MAX_CONTAINERS or raw.count(b",") > MAX_VALUES:
        raw = b"".join(_without_escapes(raw).split(b'"')[::2])  # between the texts
        if raw.count(b"{") + raw.count(b"[") > MAX_CONTAINERS:
            raise bad_request(f"the body has more than {MAX_CONTAINERS} objects and lists; send less at a time")
        if raw.count(b",") > MAX_VALUES:
            raise bad_request(f"the body has more than {MAX_VALUES} numbers and other values; send less at a time")


def _without_escapes(raw: bytes) -> bytes:
    """The body without escaped quotes, so that every quote left begins or ends a text."""
    return raw.replace(rb"\\", b"").replace(rb"\"", b"")


def check_content_type(request: Request) -> None:
    """Raise ApiError for a body that is not sent as plain JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"content-type is {kind[:100]!r}, must be application/json", code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"content-encoding is {coding[:100]!r}; send the body as it is", code="unsupported_media_type")


def _check_tree(root: Any, name: str) -> None:
    """Iterate over the containers of a field, level by level."""
    level, name = [root], shortened(name, 100)
    for _ in range(MAX_DEPTH - 1):
        below: list[Any] = []
        for node in level:
            values = node.values() if isinstance(node, dict) else node
            if _PLAIN.issuperset(map(type, values)):
                continue
            for value in values:
                if isinstance(value, (dict, list)):
                    below.append(value)
                elif isinstance(value, float) and not math.isfinite(value):
                    raise bad_request(f"{name} has a number that is too large", name)
        if not below:
            return
        level = below
    raise bad_request(f"{name} is nested too deeply: at most {MAX_DEPTH} levels are possible", name, "invalid_json")


def _field_at(raw: bytes, reason: str) -> str | None:
    """The field of the body at which the parser stopped."""
    found = _POSITION.search(reason)
    lines = raw.split(b"\n", int(found[1])) if found else []
    end = sum(len(line) + 1 for line in lines[: int(found[1]) - 1]) + int(found[2]) if found else 0
    name, depth = None, 0
    for part in _BRACKET_OR_TEXT.finditer(raw, 0, end):
        if part[0] in b"[{":
            depth += 1
        elif part[0] in b"]}":
            depth -= 1
        elif depth == 1 and part[2] is not None:
            name = part[1].decode(errors="replace")[:100]
    return name


def _short_reason(reason: str) -> str:
    if reason.startswith("recursion limit"):
        return f"nested too deeply: at most {MAX_DEPTH} levels are possible"
    return _POSITION.sub(r" (line \1 col \2)", reason)


def _noun(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


@functools.cache
def _names_of_all() -> set[str]:
    """The fields of all routes' bodies: a field of another API is not a typo."""
    return {name for model in bodies() if issubclass(model, RequestModel) for name in _names(model)}


@functools.cache
def _names(model: type[RequestModel]) -> set[str]:
    names = set(model.model_fields)
    for field in model.model_fields.values():
        others = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [field.alias]
        names.update(name for name in others if isinstance(name, str))
    return names
