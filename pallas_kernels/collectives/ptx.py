"""Writing a block of PTX: registers are declared as they are asked for, operands have names, labels are unique."""

import struct
from collections.abc import Iterable, Sequence


class Block:
    """One block of PTX under construction. An operand is a pointer and becomes `$k`, its place among the operands."""

    def __init__(self, operands: Iterable[str]):
        self.operands = list(operands)
        self._declarations: list[str] = []
        self._lines: list[str] = []
        self._num_names = 0

    def reg(self, kind: str = "b32") -> str:
        """A new register."""
        self._num_names += 1
        name = f"%q{self._num_names}"
        self._declarations.append(f".reg .{kind} {name};")
        return name

    def regs(self, count: int, kind: str = "b32") -> list[str]:
        return [self.reg(kind) for _ in range(count)]

    def emit(self, *lines: str) -> None:
        """Instructions, without their semicolons."""
        self._lines.extend(f"{line};" for line in lines)

    def compute(self, instruction: str, *arguments: object, kind: str = "b32") -> str:
        """The result of an instruction, in a new register."""
        result = self.reg(kind)
        self.emit(f"{instruction} {result}, {', '.join(map(str, arguments))}")
        return result

    def operand(self, name: str) -> str:
        return f"${self.operands.index(name)}"

    def label(self) -> str:
        self._num_names += 1
        return f"Q{self._num_names}"

    def place(self, label: str) -> None:
        self._lines.append(f"{label}:")

    def both(self, *predicates: str | None) -> str | None:
        """A predicate that holds where all of these do; None always holds."""
        found = [predicate for predicate in predicates if predicate is not None]
        if not found:
            return None
        result = found[0]
        for other in found[1:]:
            result = self.compute("and.pred", result, other, kind="pred")
        return result

    def text(self) -> str:
        return "\n".join(["{", *self._declarations, *self._lines, "}"])


def guarded(predicate: str | None, instruction: str) -> str:
    """An instruction that runs where the predicate holds."""
    return instruction if predicate is None else f"@{predicate} {instruction}"


def vector(registers: Sequence[str]) -> str:
    return "{" + ", ".join(registers) + "}"


def float32(value: float) -> str:
    """A float32 constant."""
    return "0f" + struct.pack(">f", value).hex().upper()
