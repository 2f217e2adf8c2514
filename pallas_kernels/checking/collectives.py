"""Collectives between real devices against NumPy: single calls of many shapes, and a long chain that mixes all kinds.

python -m pallas_kernels.checking.collectives [--devices 4] [--implementation peer]       a line per case; exit status 0 if all hold
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import collectives
from pallas_kernels.checking.check import Fault
from pallas_kernels.checking.compiling import first_line
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.collectives import exchange, peer, reference

EPS = 1e-5
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Bound of errors of what is normed, relative to the largest value; sums by "peer" are exact, those of XLA within this too."""
CYCLES = 25
"""Cycles of a chain; each has eight collectives."""
REPEATS = 5
"""Runs of each program whose results are compared bit by bit."""
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class Single:
    """One call. shape: of the argument on one device."""

    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    num_shots: int | None = None
    has_residual: bool = True

    def __str__(self) -> str:
        shots = "" if self.num_shots is None else f", {self.num_shots} shots"
        plain = "" if self.op != "all_reduce_norm" or self.has_residual else ", no residual"
        return f"{self.op} {list(self.shape)} {self.dtype}{shots}{plain}"


def singles(num_devices: int) -> list[Single]:
    """Odd and even numbers of rows, widths that fill the threads and that do not, both ways of adding up."""
    rows = ((1, 4096, 1), (16, 4096, 1), (13, 5120, 1), (64, 8192, 1), (64, 8192, 2), (129, 2048, 2), (256, 4096, 2))
    found = [
        Single(op, (tokens, width), num_shots=shots)
        for op in ("all_reduce_norm", "all_reduce")
        for tokens, width, shots in rows
    ]
    found += [
        Single(op, (tokens, 4096), "float32", shots)
        for op in ("all_reduce_norm", "all_reduce")
        for tokens, shots in ((3, 1), (33, 2))
    ]
    found += [Single("all_reduce_norm", (7, 1024), num_shots=shots, has_residual=False) for shots in (1, 2)]
    found += [
        Single("all_gather", shape, dtype) for shape, dtype in (((64, 2), "int32"), ((1,), "float32"), ((5000,), "uint32"))
    ]
    return [*found, *(Single("all_to_all", (num_devices, rows, 32064), "float32") for rows in (1, 16))]


@dataclass(frozen=True)
class Shapes:
    """Shapes that an engine's steps exchange."""

    num_devices: int
    width: int
    """Width of the model."""
    dtype: str
    vocab_size: int
    """Columns of the logits, on all devices together."""


def singles_at_start(shapes: Shapes) -> list[Single]:
    """The calls of an engine with these shapes, few and small enough for every start."""
    sums = [Single("all_reduce_norm", (rows, shapes.width), shapes.dtype, shots) for rows, shots in ((8, 1), (129, 2))]
    logits = Single("all_to_all", (shapes.num_devices, 2, shapes.vocab_size // shapes.num_devices), "float32")
    return [*sums, Single("all_gather", (8, 2), "int32"), logits]


def check(
    mesh: Mesh, *, implementation: str = "peer", cases: Sequence[Single] | None = None, cycles: int = CYCLES
) -> Iterator[tuple[str, Fault | None]]:
    """The name of each case and its faults. Ends after a wait that was given up.

    cases: None for all single calls and a chain of so many cycles.
    """
    communicator = collectives.Communicator(mesh) if implementation == "peer" else None
    size = mesh.size
    runs: list[tuple[str, Callable[[], _Run]]] = [
        (str(case), functools.partial(_single, mesh, case, implementation))
        for case in (singles(size) if cases is None else cases)
    ]
    if implementation == "peer" and cases is None:  # XLA adds up in another order, so that a chain leads elsewhere
        runs += [(f"chain of {8 * cycles} calls", functools.partial(_chain, mesh, cycles))]
    for name, make in runs:
        try:
            fault = _fault(make(), communicator)
        except Exception as error:  # compilers and drivers raise many types
            fault = Fault(first_line(error), error)
        yield name, fault
        if communicator is not None and communicator.failed():
            yield "waiting", Fault(f"a wait was given up in {name}, or before it")
            return
    if communicator is not None:
        communicator.close()


def check_giving_up(mesh: Mesh) -> Fault | None:
    """Whether a device that waits for one that does not answer gives up after a time, tells all, and works again after a reset.

    Takes `exchange.WAIT_SECONDS`.
    """
    communicator = collectives.Communicator(mesh)
    options: dict[str, Any] = {"axis": mesh.axis_names[0], "implementation": "peer"}

    def call(workspace: Any, x: Any) -> Any:
        everything = collectives.all_gather(x, **options, workspace=workspace)
        return everything, collectives.status(everything, **options, workspace=workspace)

    given = np.arange(2 * mesh.size, dtype=np.int32).reshape(mesh.size, 2)
    program, (x,) = mapped(mesh, call, 1), put(mesh, given)
    communicator.first_runs(lambda: program(communicator.workspace, x))
    communicator.set_waiting(False, ranks=[mesh.size - 1])
    begun = time.perf_counter()
    first = np.asarray(program(communicator.workspace, x)[1])[0, 0]
    seconds = time.perf_counter() - begun
    if first != exchange.FAILED or set(communicator.states()) != {exchange.FAILED}:
        return Fault(f"the first device says {first} after {seconds:.1f} s, all devices {communicator.states()}")
    if not 0.9 < seconds / exchange.WAIT_SECONDS < 1.5:
        return Fault(f"a wait took {seconds:.1f} s, not {exchange.WAIT_SECONDS:g}")
    communicator.reset()
    found, states = map(np.asarray, program(communicator.workspace, x))
    communicator.close()
    is_right = all(same_bits(part, given) for part in found) and not states.any()
    return None if is_right else Fault("after a reset, what is gathered is wrong")


@dataclass(frozen=True)
class _Run:
    """A program of (workspace, arrays), its arrays, and what is wrong with its results."""

    program: Callable[..., Any]
    arrays: tuple[Any, ...]
    problem: Callable[[Any], str | None]
    """Says what is wrong with results in NumPy, each with the devices as first dimension."""


def _fault(run: _Run, communicator: "collectives.Communicator | None") -> Fault | None:
    workspace = None if communicator is None else communicator.workspace
    call = functools.partial(run.program, workspace, *run.arrays)
    if communicator is not None:
        communicator.first_runs(call)
    results = [jax.tree.map(np.asarray, found) for found in [call() for _ in range(REPEATS)]]
    if (problem := run.problem(results[0])) is not None:
        return Fault(problem)
    for found in results[1:]:
        if not all(same_bits(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(results[0]), strict=True)):
            return Fault("two runs give different bits")
    return None


def mapped(mesh: Mesh, function: Callable[..., Any], num_arrays: int) -> Callable[..., Any]:
    """A program of (workspace or None, arrays) whose parts per device `function` sees, without the dimension of devices."""
    (axis,) = mesh.axis_names

    def local(workspace: Any, *arrays: Any) -> Any:
        results = function(workspace, *(array[0] for array in arrays))
        return jax.tree.map(lambda result: result[None], results)

    spec = PartitionSpec(axis)
    specs = (spec,) * (num_arrays + 1)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))


def put(mesh: Mesh, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """Arrays whose first dimension is that of devices."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return tuple(jax.device_put(array, sharding) for array in arrays)


def _single(mesh: Mesh, case: Single, implementation: str) -> _Run:
    size, normals = mesh.size, Normals()
    dtype = jnp.dtype(case.dtype)
    if case.op == "all_gather":
        words = np.random.default_rng(0).integers(0, 2**32, (size, *case.shape), np.uint32)
        words.reshape(size, -1)[:, :1] = 0xFFFFFFFF
        arrays: tuple[np.ndarray, ...] = (words.view(dtype),)
    else:
        arrays = (normals.of(dtype, size, *case.shape),)
    if case.op == "all_reduce_norm":
        weight, residual = normals.of(dtype, case.shape[1]), normals.of(dtype, *case.shape)
        arrays += tuple(np.repeat(array[None], size, 0) for array in (weight, residual)[: 1 + case.has_residual])
    axis = mesh.axis_names[0]

    def call(workspace: Any, x: Any, weight: Any = None, residual: Any = None) -> Any:
        shots = {} if implementation == "xla" or case.num_shots is None else {"num_shots": case.num_shots}
        module: Any = peer if shots else collectives
        options: dict[str, Any] = shots or {"implementation": implementation}
        options |= {"axis": axis, "workspace": workspace}
        if case.op == "all_reduce_norm":
            return module.all_reduce_norm(x, residual, weight, EPS, **options)
        return (getattr(module, case.op)(x, **options),)

    problem = functools.partial(_single_problem, case, arrays, implementation == "peer")
    return _Run(mapped(mesh, call, len(arrays)), put(mesh, *arrays), problem)


def _single_problem(case: Single, arrays: Sequence[np.ndarray], is_exact: bool, results: Sequence[np.ndarray]) -> str | None:
    if case.op == "all_gather":
        return None if all(same_bits(found, arrays[0]) for found in results[0]) else "bits were changed"
    if case.op == "all_to_all":
        return None if same_bits(results[0], np.ascontiguousarray(reference.all_to_all(arrays[0]))) else "bits were changed"
    if case.op == "all_reduce":
        return _sum_problem(results[0], reference.all_reduce(arrays[0]), is_exact)
    weight, residual = arrays[1][0], arrays[2][0] if case.has_residual else None
    h, y = reference.all_reduce_norm(arrays[0], residual, weight, EPS)
    return _sum_problem(results[0], h, is_exact) or _norm_problem(results[1], y)


def _sum_problem(found: np.ndarray, expected: np.ndarray, is_exact: bool) -> str | None:
    if not all(same_bits(each, found[0]) for each in found):
        return "devices have different bits"
    if is_exact and not same_bits(found[0], expected):
        return f"{np.count_nonzero(found[0] != expected)} of {expected.size} sums are not those in rank order"
    return None if is_exact else _off(found[0], expected)


def _norm_problem(found: np.ndarray, expected: np.ndarray) -> str | None:
    if not all(same_bits(each, found[0]) for each in found):
        return "devices have different bits of what is normed"
    return _off(found[0], expected)


def _off(found: np.ndarray, expected: np.ndarray) -> str | None:
    wide = expected.astype(np.float64)
    error, allowed = np.abs(found.astype(np.float64) - wide).max() / np.abs(wide).max(), TOLERANCE[expected.dtype.name]
    return None if error <= allowed else f"error {error:.2g}, allowed {allowed:.2g}"


# A chain. What is between the collectives is exact in any order of its operations, so that NumPy follows it to the last bit.


def _chain(mesh: Mesh, cycles: int) -> _Run:
    size, normals, rng = mesh.size, Normals(), np.random.default_rng(1)
    shape = (6 * size, 1024)
    dtype = jnp.dtype("bfloat16")
    h, noise, weight = normals.of(dtype, *shape), normals.of(dtype, *shape), normals.of(dtype, shape[1])
    scales = (rng.choice([-1.0, 1.0], (size, *shape)) * rng.choice([0.125, 0.25], (size, *shape))).astype(dtype)
    ranks = np.arange(size, dtype=np.uint32)[:, None]

    def all_cycles(workspace: Any, h: Any, *constants: Any) -> Any:
        options: dict[str, Any] = {"axis": mesh.axis_names[0], "workspace": workspace}
        calls = (
            lambda shots, x: peer.all_reduce(x, **options, num_shots=shots),
            lambda shots, x, residual, weight: peer.all_reduce_norm(x, residual, weight, EPS, **options, num_shots=shots),
            functools.partial(peer.all_to_all, **options),
            functools.partial(peer.all_gather, **options),
        )

        @jax.jit
        def cycle(h: Any) -> Any:  # traced once
            return _cycle(jnp, h, constants, calls)

        kept = []
        for _ in range(cycles):
            h, results = cycle(h)
            kept.append(results)
        return kept

    arrays = (*(np.repeat(array[None], size, 0) for array in (h, noise, weight)), scales, ranks)
    return _Run(mapped(mesh, all_cycles, 5), put(mesh, *arrays), functools.partial(_chain_problem, arrays, cycles))


def _cycle(
    xp: Any, h: Any, constants: Sequence[Any], calls: Sequence[Callable[..., Any]]
) -> tuple[Any, tuple[list, list, list]]:
    """The next h, and (sums, what is normed, what was exchanged)."""
    noise, weight, scale, rank = constants
    reduce, reduce_norm, to_all, gather = calls
    rows, width = h.shape[-2:]
    lead = h.shape[:-2]  # the devices, in NumPy
    size = rows // 6
    first = reduce(1, h * scale)
    second, normed = reduce_norm(1, first * scale, first, weight)
    wide = (*lead, rows // 2, 2 * width)
    third = reduce(2, (second * scale).reshape(wide)).reshape(h.shape)
    fourth, normed_too = reduce_norm(2, third * scale, None, weight)
    power = xp.asarray(1 << rank, np.float32).reshape(*lead, 1, 1)
    sent = fourth.astype(np.float32).reshape(*lead, size, -1) * power
    got = to_all(sent)
    fifth = reduce(2, got.reshape(h.shape) * scale.astype(np.float32))
    words = fifth[..., :4, :32].view(np.uint32) ^ (rank.reshape(*lead, 1, 1) * np.uint32(_GOLDEN))
    gathered = gather(words)
    is_odd = (gathered.reshape(*lead, -1).sum(axis=-1, dtype=np.uint32) & np.uint32(1)).reshape(*lead, 1, 1)
    last = reduce(1, xp.where(is_odd == 1, -scale, scale) * fifth.astype(h.dtype))
    following = (last * np.asarray(0.5, h.dtype) + noise).astype(h.dtype)
    return following, ([first, second, third, fourth, fifth, last], [normed, normed_too], [got, gathered])


def _chain_problem(arrays: Sequence[np.ndarray], cycles: int, results: Any) -> str | None:
    h, *constants = arrays

    def everywhere(array: np.ndarray) -> np.ndarray:
        return np.repeat(array[None], len(h), 0)

    def reduce_norm(shots: int, x: np.ndarray, residual: np.ndarray | None, weight: np.ndarray) -> tuple[np.ndarray, ...]:
        found = reference.all_reduce_norm(x, None if residual is None else residual[0], weight[0], EPS)
        return everywhere(found[0]), everywhere(found[1])

    calls: tuple[Callable[..., Any], ...] = (
        lambda shots, x: everywhere(reference.all_reduce(x)),
        reduce_norm,
        lambda x: np.ascontiguousarray(reference.all_to_all(x)),
        everywhere,
    )
    for number in range(cycles):
        h, (sums, normed, exchanged) = _cycle(np, h, constants, calls)
        pairs = [zip(*pair, strict=True) for pair in zip(results[number], (sums, normed, exchanged), strict=True)]
        problems = [
            *(_sum_problem(found, right[0], True) for found, right in pairs[0]),
            *(_norm_problem(found, right[0]) for found, right in pairs[1]),
            *(None if same_bits(found, right) else "other bits were exchanged" for found, right in pairs[2]),
        ]
        for i, problem in enumerate(problems):
            if problem is not None:
                return f"cycle {number}, result {i}: {problem}"
    return None


def _print(name: str, fault: Fault | None) -> None:
    print(f"{'ok  ' if fault is None else 'FAIL'} {name}" + (f": {fault.text}" if fault else ""), flush=True)


def main() -> None:
    """Check this machine's devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=len(jax.devices()), help="the first so many")
    parser.add_argument("--implementation", default="peer", choices=sorted(collectives.IMPLEMENTATIONS))
    parser.add_argument("--giving-up", action="store_true", help="also wait for a device that does not answer: half a minute")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="of the chain")
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("devices",), axis_types=(AxisType.Auto,))
    failed = 0
    for name, fault in check(mesh, implementation=args.implementation, cycles=args.cycles):
        failed += fault is not None
        _print(name, fault)
    if args.giving_up:
        fault = check_giving_up(mesh)
        failed += fault is not None
        _print("a wait that is given up", fault)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
