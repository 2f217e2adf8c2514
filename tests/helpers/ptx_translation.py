"""Translates blocks of PTX into Python: a generator for each thread, which pauses at barriers, shuffles and polls."""

import functools
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_MASK = {"32": 0xFFFFFFFF, "64": 0xFFFFFFFFFFFFFFFF, "ed": 1}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "shl": "<<", "shr": ">>"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "ge": ">="}
_UNARY = {"rsqrt": "{} ** -0.5", "rcp": "1 / {}", "ex2": "2.0 ** {}"}
_SIZES = {"b16": 2, "b64": 8}


class TrapError(Exception):
    """A thread executed `trap`."""


@dataclass(frozen=True)
class Meeting:
    """A named barrier at which so many threads wait for each other."""

    name: int
    size: int


@functools.cache
def translate(text: str) -> Callable[..., Iterator[Any]]:
    """A block of PTX as a generator function of (thread, machine, shared, device, cta, pointers)."""
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines()[1:-1]:
        if line.endswith(":"):
            blocks.append([])
            labels[line[:-1]] = len(blocks) - 1
        elif not line.startswith(".reg"):
            blocks[-1] += _instruction(line.removesuffix(";"))
    source = ["def run(thread, machine, shared, device, cta, pointers):", " at = 0", " while True:"]
    for number, body in enumerate(blocks):
        source += [f"  if at == {number}:"]
        source += [re.sub(r"GOTO (\w+)", lambda m: f"at = {labels[m.group(1)]}; continue", f"   {line}") for line in body]
        source += [f"   at = {number + 1}"]
    source += ["  return"]
    names: dict[str, Any] = {"f": _float, "bits": _bits, "bf16": _bfloat16, "TrapError": TrapError, "Meeting": Meeting}
    exec("\n".join(source), names)
    return names["run"]


def _instruction(line: str) -> list[str]:
    """The Python of one instruction."""
    found = re.fullmatch(r"(?:@(!?)(%\w+) )?(\S+)(?: (.*))?", line)
    assert found, line
    negated, predicate, name, rest = found.groups()
    arguments = [part.strip() for part in re.split(r",(?![^{]*\})", rest or "")]
    body = _body(name, arguments)
    if predicate is None:
        return body
    return [f"if {'not ' * bool(negated)}{_value(predicate)}:", *(f" {part}" for part in body)]


def _body(name: str, arguments: list[str]) -> list[str]:
    operation, *kinds = name.split(".")
    target, values = _value(arguments[0]), [_value(argument) for argument in arguments[1:]]
    mask = _MASK.get(kinds[-1][-2:], 0) if kinds else 0
    is_float = bool(kinds) and kinds[-1] == "f32"
    if operation in ("ld", "st"):
        return _memory(operation, kinds, *arguments)
    if operation == "bra":
        return [f"GOTO {arguments[0]}"]
    if kinds[:1] == ["warp"]:
        return []
    if operation == "bar":
        return [f"yield Meeting({_value(arguments[0])}, {values[0]})" if values else "yield 'barrier'"]
    if operation == "fence":
        return [] if kinds[0] == "proxy" else ["machine.fence(device, (cta, thread))"]
    if operation == "cp":
        return _prefetched(*arguments)
    if operation in ("red", "atom"):
        return _atomic(operation, arguments)
    if operation == "trap":
        return ["raise TrapError"]
    if operation == "shfl":
        assert kinds[:2] == ["sync", "bfly"] and values[2:] == ["31", str(_MASK["64"])], name
        return [f"{target} = yield ({values[0]}, {values[1]})"]
    if operation == "setp":
        also = f" and {values[2]}" if kinds[1] == "and" else ""
        return [f"{target} = ({values[0]}) {_COMPARISONS[kinds[0]]} ({values[1]}){also}"]
    if is_float and operation in ("add", "mul"):
        return [f"{target} = bits(f({values[0]}) {_OPERATORS[operation]} f({values[1]}))"]
    if is_float and operation == "fma":
        return [f"{target} = bits(f({values[0]}) * f({values[1]}) + f({values[2]}))"]
    if operation in _UNARY:
        return [f"{target} = bits({_UNARY[operation].format(f'f({values[0]})')})"]
    if operation == "div":
        return [f"{target} = ({values[0]}) // ({values[1]})"]
    if name == "cvt.u16.u32":
        return [f"{target} = {values[0]} & 0xFFFF"]
    if operation == "cvt" and "bf16x2" in kinds:
        return [f"{target} = bf16({values[0]}) << 16 | bf16({values[1]})"]
    if operation in ("mov", "cvt"):
        return [f"{target} = {values[0]}"]
    if operation in ("min", "max"):
        return [f"{target} = {operation}({values[0]}, {values[1]})"]
    if operation == "mad":
        return [f"{target} = ({values[0]} * {values[1]} + {values[2]}) & {mask}"]
    if operation == "mul" and kinds[0] == "wide":
        return [f"{target} = {values[0]} * {values[1]}"]
    return [f"{target} = (({values[0]}) {_OPERATORS[operation]} ({values[1]})) & {mask}"]


def _memory(operation: str, kinds: list[str], first: str, second: str) -> list[str]:
    at, moved = (second, first) if operation == "ld" else (first, second)
    base, _, offset = at[1:-1].partition("+")
    registers = [_value(part) for part in moved.strip("{}").split(",")]
    size = _SIZES.get(kinds[-1], 4)
    address = [f"address = {_value(base)} + {offset or 0}"]
    if "shared" in kinds:
        if operation == "st":
            return [*address, *(f"shared[address + {4 * i}] = {value}" for i, value in enumerate(registers))]
        return [*address, *(f"{value} = shared[address + {4 * i}]" for i, value in enumerate(registers))]
    if operation == "st":
        return [*address, f"machine.store(device, address, ({', '.join(registers)},), {'sys' in kinds}, (cta, thread), {size})"]
    pause = ["yield None"] if "relaxed" in kinds or "acquire" in kinds else []
    loads = [f"{value} = machine.load(address + {size * i}, {size})" for i, value in enumerate(registers)]
    return [*pause, *address, *loads]


def _prefetched(at: str, size: str) -> list[str]:
    """Nothing, but what is asked for must be there."""
    base, _, offset = at[1:-1].partition("+")
    first = f"{_value(base)} + {offset or 0}"
    return [f"machine.load({first}, 4), machine.load({first} + {int(size) - 4}, 4)"]


def _atomic(operation: str, arguments: list[str]) -> list[str]:
    """An addition at once, after what the thread stored before."""
    *target, at, value = arguments
    base, _, offset = at[1:-1].partition("+")
    call = f"machine.add(device, {_value(base)} + {offset or 0}, {_value(value)}, (cta, thread))"
    return ["yield None", f"{_value(target[0])} = {call}" if operation == "atom" else call]


def _value(text: str) -> str:
    text = text.strip()
    special = {"%tid.x": "thread", "%ctaid.x": "cta", "%globaltimer": "machine.clock"}
    if text in special:
        return special[text]
    if text.startswith("%"):
        return text[1:]
    if text.startswith("$"):
        return f"pointers[{text[1:]}]"
    if text.startswith("0f"):
        return str(int(text[2:], 16))
    return str(int(text, 0) & _MASK["64"]) if re.fullmatch(r"-?(0x)?[0-9a-f]+", text) else text


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _bits(value: float) -> int:
    """Bits of the nearest float32; one NaN stands for all."""
    if value != value:
        return 0x7FFFFFFF
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def _bfloat16(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF
