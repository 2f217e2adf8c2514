"""Runs blocks of PTX (those of `pallas_kernels.collectives`) on several simulated GPUs at once, with everything late that may be late.

Each thread is a Python generator that pauses at barriers, shuffles and polls; threads, CTAs and devices advance in random order and
at random speeds. A store to global memory becomes visible word by word after a random delay, at another device possibly after the
kernel's end; only stores of one device to one address keep their order. Reading a register that was never written is an error.
"""

import functools
import heapq
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_ROUNDS = 20_000
NANOSECONDS_PER_ROUND = 10_000_000
_MASK = {"32": 0xFFFFFFFF, "64": 0xFFFFFFFFFFFFFFFF, "ed": 1}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "shl": "<<", "shr": ">>"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "ge": ">="}


class TrapError(Exception):
    """A thread executed `trap`."""


@dataclass(frozen=True)
class Launch:
    """A kernel: its block of PTX and the addresses of its operands."""

    text: str
    pointers: tuple[int, ...]
    ctas: int
    threads: int


class Machine:
    """Several devices with one address space."""

    def __init__(self, num_devices: int, seed: int = 0, max_delay: int = 30):
        self.rng = random.Random(seed)
        self.num_devices, self.max_delay = num_devices, max_delay
        self.round = 0
        self._arrays: list[tuple[int, int, np.ndarray]] = []
        self._pending: list[tuple[int, int, int, int, int, np.ndarray, int]] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._num_stores = 0

    def place(self, device: int, array: np.ndarray) -> int:
        """The address of a copy of an array, whole words, in a device's memory."""
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint32).copy()
        used = sum(len(found) * 4 + 4096 for _, owner, found in self._arrays if owner == device)
        address = (device + 1 << 40) + (used + 4095) // 4096 * 4096
        self._arrays.append((address, device, words))
        return address

    def words(self, address: int) -> np.ndarray:
        """The memory of an array, as uint32."""
        return next(found for start, _, found in self._arrays if start == address)

    def run(self, launches: Sequence[Sequence[Launch]]) -> None:
        """launches[d]: what device d runs, one kernel after the other. Raises TimeoutError if they do not end."""
        left = [list(reversed(found)) for found in launches]
        running: list[list[_Cta]] = [[] for _ in left]
        speed = [1.0] * len(left)
        for _ in range(MAX_ROUNDS):
            self.round += 1
            self._deliver()
            if not any(left) and not any(running):
                return
            if self.round % 40 == 0:
                speed = [self.rng.choice([0.05, 0.3, 1.0]) for _ in left]
            for device in range(len(left)):
                if self.rng.random() > speed[device]:
                    continue
                if not running[device] and left[device]:
                    launch = left[device].pop()
                    running[device] = [_Cta(self, device, index, launch) for index in range(launch.ctas)]
                for cta in running[device]:
                    if self.rng.random() < 0.7:
                        cta.advance()
                if running[device] and all(cta.has_ended for cta in running[device]):
                    running[device] = []
                    self._end_kernel(device)
        raise TimeoutError(f"no end after {MAX_ROUNDS} rounds: {[len(found) for found in left]} kernels have not begun")

    def settle(self) -> None:
        """Let every store arrive."""
        self.round += self.max_delay + 1
        self._deliver()

    # What threads do

    def load(self, address: int, size: int) -> int:
        assert address % size == 0, hex(address)
        _, words, index = self._find(address)
        return int(words[index]) if size == 4 else int(words[index]) | int(words[index + 1]) << 32

    def store(self, device: int, address: int, values: Sequence[int], has_system_scope: bool) -> None:
        assert address % (4 * len(values)) == 0, hex(address)
        owner, words, index = self._find(address)
        assert owner == device or has_system_scope, "a store to another device has system scope"
        for i, value in enumerate(values):
            key = (device, address + 4 * i)
            due = max(self.round + self.rng.randrange(self.max_delay), self._newest.get(key, 0))
            self._newest[key] = due
            self._num_stores += 1
            heapq.heappush(self._pending, (due, self._num_stores, device, owner, index + i, words, value))

    @property
    def clock(self) -> int:
        return 1 + self.round * NANOSECONDS_PER_ROUND

    def _find(self, address: int) -> tuple[int, np.ndarray, int]:
        for start, device, words in self._arrays:
            if start <= address < start + 4 * len(words):
                return device, words, (address - start) // 4
        raise IndexError(f"no memory at {address:#x}")

    def _deliver(self) -> None:
        while self._pending and self._pending[0][0] <= self.round:
            *_, index, words, value = heapq.heappop(self._pending)
            words[index] = value

    def _end_kernel(self, device: int) -> None:
        """A device's stores to its own memory are visible to its next kernel."""
        own = sorted(store for store in self._pending if store[2] == store[3] == device)
        for *_, index, words, value in own:
            words[index] = value
        self._pending = [store for store in self._pending if not store[2] == store[3] == device]
        heapq.heapify(self._pending)


class _Cta:
    """The threads of one CTA."""

    def __init__(self, machine: Machine, device: int, index: int, launch: Launch):
        run = translate(launch.text)
        self.machine, self.shared = machine, dict[int, int]()
        arguments = (machine, self.shared, device, index, launch.pointers)
        self.threads: list[Iterator[Any] | None] = [run(thread, *arguments) for thread in range(launch.threads)]
        self.waits: list[Any] = [None] * launch.threads
        """Reason of each thread's pause: None, "barrier", or a shuffle's (value, distance)."""
        self.answers: list[int | None] = [None] * launch.threads
        self.slow_warp = machine.rng.randrange(launch.threads // 32)

    @property
    def has_ended(self) -> bool:
        return not any(self.threads)

    def advance(self) -> None:
        """Every thread that can goes on to its next pause, those of one warp seldom."""
        left_behind = self.slow_warp if self.machine.rng.random() < 0.8 else -1
        order = [
            t for t, wait in enumerate(self.waits) if wait is None and self.threads[t] is not None and t // 32 != left_behind
        ]
        self.machine.rng.shuffle(order)
        for t in order:
            thread: Any = self.threads[t]
            answer, self.answers[t] = self.answers[t], None
            try:
                self.waits[t] = thread.send(answer)
            except StopIteration:
                self.threads[t] = None
        for first in range(0, len(self.waits), 32):
            lanes = range(first, first + 32)
            if all(isinstance(self.waits[t], tuple) for t in lanes):
                for t in lanes:
                    self.answers[t] = self.waits[first + ((t - first) ^ self.waits[t][1])][0]
                for t in lanes:
                    self.waits[t] = None
        if all(wait == "barrier" for wait in self.waits):
            self.waits = [None] * len(self.waits)


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
    names: dict[str, Any] = {"f": _float, "bits": _bits, "bf16": _bfloat16, "TrapError": TrapError}
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
    if operation == "bar":
        return ["yield 'barrier'"]
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
    if operation == "rsqrt":
        return [f"{target} = bits(f({values[0]}) ** -0.5)"]
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
    size = 8 if kinds[-1] == "b64" else 4
    address = [f"address = {_value(base)} + {offset or 0}"]
    if "shared" in kinds:
        if operation == "st":
            return [*address, *(f"shared[address + {4 * i}] = {value}" for i, value in enumerate(registers))]
        return [*address, *(f"{value} = shared[address + {4 * i}]" for i, value in enumerate(registers))]
    if operation == "st":
        return [*address, f"machine.store(device, address, ({', '.join(registers)},), {'sys' in kinds})"]
    pause = ["yield None"] if "relaxed" in kinds else []
    loads = [f"{value} = machine.load(address + {size * i}, {size})" for i, value in enumerate(registers)]
    return [*pause, *address, *loads]


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
