"""Faults of files: in plain bytes, in JSON, in the opcodes of a pickle. All are drawn from a generator, so a seed repeats them."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

EXTREMES = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
"""Values for fields of lengths, counts and offsets."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 10**8, 2**31, 2**53, 2**60, 2**62, 2**63, -(2**63), 2**64, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "a",
        "0",
        "-1",
        "1e9",
        "\x00",
        "\ud800",
        "ä" * 100,
        "x" * 5000,
        "../../etc/passwd",
        "(a+)+$",
        "{{ 9**9 }}",
        "re:(",
        "|" * 50,
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0],
        [-1],
        [1.5],
        ["a"],
        ["a"] * 3,
        [2**62] * 2,
        {"a": 1},
        {"content": 1},
        {"type": "x"},
        [[1, 2], [3]],
    ),
)
"""Values of any type for any place in a JSON file."""
_TEXTS = tuple(value for value in VALUES if isinstance(value, str))
_INFREQUENT = 0.01
"""How often a fault that makes a file large is chosen."""
_LARGE = 200_000
"""Bytes of a file that is not made larger."""
_DEPTHS = (5, 60, 130, 700, 1100, 20_000, 200_000)


def mutate_bytes(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to four faults. others: what to splice in."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if len(data) < _LARGE:
            data = rng.choice(_BYTE_FAULTS)(rng, data, others)
    return data


def _flip(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extreme(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """An integer of 1 to 8 bytes somewhere, most often near the start, where lengths are."""
    width = rng.choice((1, 2, 4, 8))
    end = max(1, len(data) - width)
    at = rng.randrange(min(end, 64) if rng.random() < 0.5 else end)
    value = rng.choice(EXTREMES) + rng.choice((-1, 0, 0, 1))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


def _delete(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at, length = _run(rng, data)
    return data[:at] + data[at + length :]


def _repeat(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at, length = _run(rng, data)
    times = rng.choice((2, 3, 10)) if rng.random() > _INFREQUENT else 2000
    return data[:at] + data[at : at + length] * times + data[at + length :]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    at, length = _run(rng, other)
    place = rng.randrange(len(data) + 1)
    return data[:place] + other[at : at + length] + data[place + rng.choice((0, length)) :]


def _random(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at, length = _run(rng, data)
    return data[:at] + rng.randbytes(length) + data[at + length :]


def _run(rng: random.Random, data: bytes) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    return at, rng.randint(0, min(len(data) - at, rng.choice((4, 16, 256))))


_BYTE_FAULTS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip,
    _truncate,
    _extreme,
    _extreme,
    _delete,
    _repeat,
    _splice,
    _random,
)


def mutate_json(rng: random.Random, value: Any) -> bytes:
    """The text of a JSON value with one to three faults: in its values, its keys, its nesting, or its text."""
    text = json.dumps(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if len(text) < _LARGE:
            text = json.dumps(_changed(rng, json.loads(text)))  # a copy without parts in common
    encoded = text.encode()
    if rng.random() < 0.15:
        return mutate_bytes(rng, encoded)
    if rng.random() < 0.03:
        return _nested(rng, encoded)
    return encoded


def _changed(rng: random.Random, value: Any) -> Any:
    """The value with one place changed; places deep inside are as likely as those at the top."""
    places = list(_places(value))
    if not places or rng.random() < 0.01:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    other, other_key = rng.choice(places)
    fault = rng.randrange(8)
    if fault == 0:
        del holder[key]
    elif fault == 1:
        holder[key] = other[other_key] if not isinstance(other[other_key], dict | list) else None
    elif fault == 2 and isinstance(holder, dict):
        holder[rng.choice((f"{key}x", "", "a" * 300, f"{key}.weight"))] = holder.pop(key)
    elif fault == 3 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * (rng.choice((1, 3, 30)) if rng.random() > _INFREQUENT else 5000)
    elif fault == 4 and isinstance(holder[key], str):
        text = holder[key]
        holder[key] = rng.choice(
            (text * 2, text[:-1], text + "\n", text.upper(), text * 1000, "(" + text, text + "*" * 3, *_TEXTS)
        )
    elif fault == 5 and type(holder[key]) in (int, float):
        number = holder[key]
        third = number // 3 if isinstance(number, int) else number / 3
        holder[key] = rng.choice((-number, number + 1, number * 2**20, third, str(number), *EXTREMES))
    elif fault == 6:
        for _ in range(rng.choice((1, 5, 100))):
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    else:
        holder[key] = rng.choice(VALUES)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, inner in items:
            found.append((holder, key))
            pending.append(inner)
    return found


def _nested(rng: random.Random, text: bytes) -> bytes:
    """A text in which a value is very deep, or that is nothing else."""
    depth = rng.choice(_DEPTHS)
    left, right = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"text_config":', b"}"), (b"[{}, [", b"]]")))
    closed = rng.random() < 0.7
    deep = left * depth + b"1" + (right * depth if closed else b"")
    if rng.random() < 0.5 or b":" not in text:
        return deep
    at = text.index(b":", rng.randrange(text.rindex(b":") + 1)) + 1
    return text[:at] + deep + b", " + text[at:]


def mutate_opcodes(rng: random.Random, opcodes: Sequence[bytes]) -> bytes:
    """A pickle with one to three faults in its opcodes; each element is one opcode with its argument."""
    changed = list(opcodes)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(changed) + 1)
        fault = rng.randrange(7)
        if fault == 0 and changed:
            del changed[at % len(changed)]
        elif fault == 1 and changed:
            changed.insert(at, rng.choice(changed))
        elif fault == 2 and changed:
            other = rng.randrange(len(changed))
            changed[at % len(changed)], changed[other] = changed[other], changed[at % len(changed)]
        elif fault == 3 and changed:
            opcode = changed[at % len(changed)]
            changed[at % len(changed)] = opcode[:1] + mutate_bytes(rng, opcode[1:]) if len(opcode) > 1 else opcode * 2
        elif fault == 4:
            times = rng.choice((1, 20, 500)) if rng.random() > 5 * _INFREQUENT else rng.choice((30_000, 300_000))
            changed[at:at] = [rng.choice(_REPEATABLE)] * times
        else:
            changed.insert(at, rng.choice(_OPCODES)(rng))
    return b"".join(changed)


_REPEATABLE = (b"\x85", b"(", b")\x85", b"0", b"2", b"]", b"}", b"\x94", b"\x86", b"(t", b"2\x86", b"2\x85")
"""Opcodes that nest or copy what is on the stack, or fill memory, when there are many."""
_OPCODES: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: b"r" + struct.pack("<I", rng.choice(EXTREMES) % 2**32),  # LONG_BINPUT
    lambda rng: b"j" + struct.pack("<I", rng.choice(EXTREMES) % 2**32),  # LONG_BINGET
    lambda rng: b"X" + struct.pack("<I", rng.choice(EXTREMES) % 2**32) + b"abc",  # BINUNICODE
    lambda rng: b"\x8d" + struct.pack("<Q", rng.choice(EXTREMES) % 2**64) + b"abc",  # BINUNICODE8
    lambda rng: b"\x8b" + struct.pack("<i", rng.choice((-1, 0, 9, 100_000))) + b"\xff" * 9,  # LONG4
    lambda rng: b"\x8b" + struct.pack("<I", 200_000) + b"\xff" * 200_000,
    lambda rng: b"p" + str(rng.choice(EXTREMES)).encode() + b"\n",  # PUT
    lambda rng: b"L" + b"9" * rng.choice((1, 20, 5000, 100_000)) + b"L\n",  # LONG
    lambda rng: b"\x95" + struct.pack("<Q", rng.choice(EXTREMES) % 2**64),  # FRAME
    lambda rng: (
        b"c" + rng.choice((b"os\nsystem\n", b"builtins\neval\n", b"torch\nFloatStorage\n", b"collections\nOrderedDict\n"))
    ),
    lambda rng: rng.choice(
        (b"R", b"b", b"\x81", b"\x92", b"Q", b"a", b"e", b"s", b"u", b"\x90", b"\x91", b".", b"\x80\x05", b"\x82\x01")
    ),
    lambda rng: b"G" + struct.pack(">d", rng.choice((float("nan"), float("inf"), 1e308, -1.5))),  # BINFLOAT
    lambda rng: b"J" + struct.pack("<i", rng.choice((-1, 0, 2**31 - 1, -(2**31)))),  # BININT
)
