"""PTX of a few registers on arrays: what decodes packed numbers."""

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

import ml_dtypes
import numpy as np


def run_ptx(text: str, given: dict[str, np.ndarray], results: Sequence[str], temporaries: Collection[str]) -> list[np.ndarray]:
    """The results of the instructions on the given registers, uint32. They may use the registers of `temporaries`."""
    registers = dict(given)
    word = next(iter(given.values()))

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(word, int(name, 0))

    def of_pairs(x: np.ndarray, y: np.ndarray, apply: Callable) -> np.ndarray:
        wide = (z.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64) for z in (x, y))
        exact = apply(*wide)
        rounded = exact.astype(ml_dtypes.bfloat16)
        assert (rounded.astype(np.float64) == exact).all(), "nothing is rounded"
        return rounded.view(np.uint16).view(np.uint32)

    def permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
        """Four bytes of the eight of x and y."""
        both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        picks = [(selector >> np.uint32(4 * byte)).astype(np.uint64) & np.uint64(15) for byte in range(4)]
        assert all((pick < 8).all() for pick in picks), "no sign is repeated"
        found = [(both >> np.uint64(8) * pick & np.uint64(255)) << np.uint64(8 * byte) for byte, pick in enumerate(picks)]
        return sum(found, np.uint64(0)).astype(np.uint32)

    operations = {
        "mov.b32": lambda x: x,
        "shl.b32": lambda x, y: x << y,
        "shr.u32": lambda x, y: x >> y,
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "prmt.b32": permute,
        "lop3.b32": lambda x, y, z, table: (x & y) | z if (table == (0xF0 & 0xCC) | 0xAA).all() else None,
        "sub.bf16x2": partial(of_pairs, apply=np.subtract),
        "mul.rn.bf16x2": partial(of_pairs, apply=np.multiply),
    }
    for line in filter(None, map(str.strip, text.split(";"))):
        operation, target, *operands = re.split(r"[ ,]+", line)
        assert target in (*temporaries, *results)
        registers[target] = operations[operation](*map(value, operands))
    return [registers[result] for result in results]
