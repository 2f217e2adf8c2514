"""Which kernel computes a collective of given shapes: its PTX, its grid, its operands and results. Imports no JAX kernels."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pallas_kernels.collectives import bodies, control
from pallas_kernels.collectives.arithmetic import ITEMSIZE, scratch_words
from pallas_kernels.collectives.exchange import MAX_DEVICES
from pallas_kernels.collectives.plans import MAX_CTAS, MAX_THREADS, VECTOR_BYTES, Plan, plan_rows, plan_vectors

MAX_ONE_SHOT_BYTES = {2: 4 << 20, 3: 1 << 20, 4: 512 << 10}
"""By number of devices: up to so many bytes of x, sending all to all is faster than two shots."""
_MAX_ONE_SHOT_BYTES = 256 << 10
"""With more devices."""


@dataclass(frozen=True)
class Program:
    """A kernel that runs one block of PTX."""

    name: str
    text: str
    ctas: int
    threads: int
    operands: tuple[str, ...]
    """In the order of the block's: first what is read, then the results, then "scratch" if there is any."""
    results: dict[str, tuple[tuple[int, ...], str]] = field(hash=False)
    """Shape and dtype of each."""
    scratch_words: int = 0
    """Of shared memory, 32 bits each."""


def all_reduce(
    shape: Sequence[int],
    dtype: str,
    num_devices: int,
    *,
    has_residual: bool = False,
    eps: float | None = None,
    num_shots: int | None = None,
) -> Program | None:
    """x [T, D] summed over devices; with eps the RMS norm of rows too. None if no kernel takes it.

    num_shots: 1, each device sends all to all; 2, each adds up a part and sends that; None: the faster of those that take it.
    """
    return _all_reduce(tuple(shape), str(dtype), num_devices, has_residual, eps, num_shots)


@functools.cache
def _all_reduce(
    shape: tuple[int, ...], dtype: str, num_devices: int, has_residual: bool, eps: float | None, num_shots: int | None
) -> Program | None:
    num_bytes = math.prod(shape) * ITEMSIZE.get(dtype, 0)
    row_bytes = shape[-1] * ITEMSIZE.get(dtype, 0)
    is_row_whole = row_bytes % VECTOR_BYTES == 0
    if not _takes(num_devices, num_bytes) or (eps is not None and not (is_row_whole and len(shape) == 2)):
        return None
    is_small = num_bytes <= MAX_ONE_SHOT_BYTES.get(num_devices, _MAX_ONE_SHOT_BYTES)
    for shots in (num_shots,) if num_shots else (1, 2) if is_small else (2, 1):
        sizes = {"group": num_devices, "phases": 2} if shots == 2 else {}
        if eps is None:
            plan = plan_vectors(num_bytes // VECTOR_BYTES, num_devices=num_devices, **sizes)
        else:
            plan = plan_rows(shape[0], row_bytes // VECTOR_BYTES, num_devices=num_devices, **sizes)
        if plan is not None:
            return reduction(plan, shots, shape, dtype, num_devices, has_residual, eps)
    return None


def reduction(
    plan: Plan, shots: int, shape: tuple[int, ...], dtype: str, num_devices: int, has_residual: bool, eps: float | None
) -> Program:
    """An all-reduce by a plan; with eps its rows are those of x."""
    norms = eps is not None
    operands = ["workspace", "x", *["residual"] * has_residual, *["weight"] * norms, "out", *["normed", "scratch"] * norms]
    body = bodies.one_shot if shots == 1 else bodies.two_shot
    return Program(
        f"all_reduce{'_norm' * norms}_{shots}_{'x'.join(map(str, shape))}_{num_devices}",
        body(operands, plan, num_devices=num_devices, dtype=dtype, eps=eps or 0.0),
        plan.ctas,
        plan.threads,
        tuple(operands),
        {"out": (shape, dtype)} | ({"normed": (shape, dtype)} if norms else {}),
        scratch_words(plan.groups * plan.group) if norms else 0,
    )


@functools.cache
def all_gather(shape: tuple[int, ...], dtype: str, num_devices: int) -> Program | None:
    """Arrays of 32-bit words of any bits to every device; None if no kernel takes it."""
    num_words = math.prod(shape)
    threads = 128 if num_words <= 128 * MAX_CTAS else MAX_THREADS
    ctas = -(-num_words // threads)
    if dtype not in ("int32", "uint32", "float32") or not 1 <= ctas <= MAX_CTAS or not 2 <= num_devices <= MAX_DEVICES:
        return None
    operands = ("workspace", "x", "out")
    text = bodies.gather(operands, num_words, num_devices=num_devices, threads=threads)
    return Program(
        f"all_gather_{num_words}_{num_devices}", text, ctas, threads, operands, {"out": ((num_devices, *shape), dtype)}
    )


@functools.cache
def all_to_all(shape: tuple[int, ...], dtype: str, num_devices: int) -> Program | None:
    """x [n, ...]: a slice for each device, float32 or bfloat16; None if no kernel takes it."""
    num_bytes = math.prod(shape[1:]) * ITEMSIZE.get(dtype, 0)
    if not _takes(num_devices, num_bytes) or shape[0] != num_devices:
        return None
    plan = plan_vectors(num_bytes // VECTOR_BYTES, num_devices=num_devices)
    return None if plan is None else exchange_of_slices(plan, shape, dtype, num_devices)


def exchange_of_slices(plan: Plan, shape: tuple[int, ...], dtype: str, num_devices: int) -> Program:
    """An all-to-all by a plan of one slice."""
    operands = ("workspace", "x", "out")
    text = bodies.to_all(operands, plan, num_devices=num_devices)
    name = f"all_to_all_{'x'.join(map(str, shape))}"
    return Program(name, text, plan.ctas, plan.threads, operands, {"out": (shape, dtype)})


def _takes(num_devices: int, num_bytes: int) -> bool:
    return 2 <= num_devices <= MAX_DEVICES and num_bytes > 0 and num_bytes % VECTOR_BYTES == 0


@functools.cache
def status() -> Program:
    """The state of the own device, after some array is there."""
    operands = ("workspace", "after", "out")
    return Program("collectives_status", control.read_state(operands), 1, 128, operands, {"out": ((1,), "int32")})


@functools.cache
def write_header() -> Program:
    """Writes a header of `exchange.HEADER_WORDS` words into the workspace."""
    operands = ("workspace", "header", "out")
    return Program("collectives_header", control.write_header(operands), 1, 128, operands, {"out": ((1,), "int32")})


@functools.cache
def clear() -> Program:
    """Empties all slots and sets all counters to 0."""
    operands = ("workspace", "out")
    text = control.clear(operands, ctas=MAX_CTAS, threads=MAX_THREADS)
    return Program("collectives_clear", text, MAX_CTAS, MAX_THREADS, operands, {"out": ((1,), "int32")})
