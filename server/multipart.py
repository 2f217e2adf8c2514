"""Reads bodies of the form multipart/form-data. Source: RFC 7578."""

import re
from dataclasses import dataclass, field

from server.errors import ApiError, bad_request, shortened

MAX_PARTS = 64
MAX_HEADER_BYTES = 8 << 10
"""Of a part."""
_BOUNDARY = re.compile(r""";\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename\*?)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
"""Not all clients quote values, and for a filename that is not ASCII some send filename* alone."""


@dataclass
class Form:
    """The parts of a body."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_form(content_type: str, raw: bytes) -> Form:
    """The texts and files of a body, by name. Raises ApiError."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        kind = shortened(content_type.partition(";")[0], 100)
        raise ApiError(415, f"content-type is {kind!r}, must be multipart/form-data", code="unsupported_media_type")
    if (found := _BOUNDARY.search(content_type)) is None:
        raise bad_request("content-type has no boundary of 1 to 70 characters")
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if not raw.startswith(delimiter):
        raise bad_request("the body does not begin with the boundary of its content-type")
    if raw.count(b"\r\n" + delimiter) > MAX_PARTS:
        raise bad_request(f"the body has more than {MAX_PARTS} parts")
    pieces = raw[len(delimiter) :].split(b"\r\n" + delimiter)
    if not pieces.pop().startswith(b"--"):
        raise bad_request("the body ends before its last boundary")
    form = Form()
    for piece in pieces:
        _add(form, piece)
    return form


def _add(form: Form, piece: bytes) -> None:
    end = piece.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
    if end < 0:
        raise bad_request(f"a part of the body has no end of its headers within {MAX_HEADER_BYTES} bytes")
    disposition = ""
    for line in piece[:end].decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            disposition = value
        elif name.strip().lower() == "content-transfer-encoding" and value.strip().lower() not in ("binary", "8bit", "7bit"):
            raise bad_request(f"a part has the content-transfer-encoding {shortened(value.strip(), 40)!r}; send it as it is")
    parameters = {key.lower().rstrip("*"): quoted or bare for key, quoted, bare in _PARAMETER.findall(disposition)}
    if "name" not in parameters:
        raise bad_request("a part of the body has no name in its content-disposition")
    name, content = shortened(parameters["name"], 100), piece[end + 4 :]
    if "filename" in parameters:
        if name in form.files:
            raise bad_request(f"{name} is sent twice", name)
        form.files[name] = content
        return
    try:
        form.fields.setdefault(name, []).append(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise bad_request(f"{name} is not UTF-8", name) from None
