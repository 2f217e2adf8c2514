"""Bodies of the form multipart/form-data."""

import random

import pytest

from server.errors import ApiError
from server.multipart import MAX_PARTS, Form, read_form

TYPE = 'multipart/form-data; boundary="a b"'
GOOD = (
    b'--a b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'
    b'--a b\r\ncontent-disposition: form-data; name="x"\r\nContent-Type: text/plain\r\n\r\n\xc3\xa4\r\n'
    b'--a b\r\nContent-Disposition: form-data; name="file"; filename="a;b.wav"\r\n\r\n\r\n--a\r\n\x00\r\n--a b--\r\n'
)


def test_texts_and_files_are_found() -> None:
    assert read_form(TYPE, GOOD) == Form({"x": ["1", "ä"]}, {"file": b"\r\n--a\r\n\x00"})
    assert read_form("Multipart/Form-Data; charset=utf-8; boundary=q", b"--q--") == Form()


@pytest.mark.parametrize(
    "disposition",
    [
        "form-data; name=file; filename=a.wav; filename*=utf-8''a.wav",  # .NET
        "form-data; name=\"file\"; filename*=utf-8''%C3%A4.wav",  # urllib3 1
        'form-data; filename="a; name=b"; name="file"',
    ],
)
def test_names_are_found_however_clients_write_them(disposition: str) -> None:
    raw = f"--q\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + b"\xff\r\n--q--\r\n"
    assert read_form("multipart/form-data; boundary=q", raw) == Form({}, {"file": b"\xff"})


@pytest.mark.parametrize(
    ("kind", "raw", "status", "told"),
    [
        ("application/json", GOOD, 415, "must be multipart/form-data"),
        ("multipart/form-data", GOOD, 400, "no boundary"),
        ('multipart/form-data; boundary=""', GOOD, 400, "no boundary"),
        ("multipart/form-data; boundary=other", GOOD, 400, "does not begin"),
        (TYPE, b"", 400, "does not begin"),
        (TYPE, GOOD[:-6], 400, "ends before"),
        (TYPE, b"--a b\r\nX: y\r\n--a b--", 400, "no end of its headers"),
        (TYPE, b"--a b\r\nX: y\r\n\r\nz\r\n--a b--", 400, "no name"),
        (TYPE, GOOD.replace(b"\xc3\xa4", b"\xff"), 400, "x is not UTF-8"),
        (TYPE, GOOD.replace(b'name="x"', b'name="file"; filename="b"'), 400, "file is sent twice"),
        (TYPE, GOOD.replace(b"Content-Type: text/plain", b"Content-Transfer-Encoding: base64"), 400, "send it as it is"),
        (TYPE, b"--a b\r\n" + b"\r\n--a b" * (MAX_PARTS + 1), 400, "more than 64 parts"),
    ],
)
def test_damaged_bodies_are_refused(kind: str, raw: bytes, status: int, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        read_form(kind, raw)
    assert caught.value.status == status


def test_no_body_does_anything_else() -> None:
    generator = random.Random(0)
    for _ in range(500):
        raw = bytearray(GOOD)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(raw))
            raw[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 2))
        try:
            read_form(TYPE, bytes(raw))
        except ApiError as error:
            assert error.status == 400
