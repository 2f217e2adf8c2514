"""Compiles a program in pieces: a few layers are one, and groups of layers that are alike share it.

XLA compiles the body of every layer anew, however alike they are, which takes a CPU seconds for each program of a deep model. A piece
is compiled once; a call of the program runs its pieces one after the other, which a step of a single request notices (docs/DESIGN.md).
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Sharding

from jaxllm.runner.shared_layers import LAYER

LAYERS_AT_ONCE = 5
"""Layers of a piece. One would be compiled a little sooner; but between pieces, threads that compute fall asleep."""
MAX_PERIOD = 8
"""Most layers after which the kinds of layers recur: 6 in Gemma 3, 4 in Qwen3-Next."""


class Pieces:
    """Compiled pieces by digest, each made once, whichever threads ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, Future[jax.stages.Compiled]] = {}

    def get(self, digest: str, make: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """The piece, made now if it is missing. Raises what `make` raises, here or in the thread that made it."""
        with self._lock:
            is_mine = digest not in self._made
            job = self._made.setdefault(digest, Future())
        if is_mine:
            try:
                job.set_result(make())
            except BaseException as error:
                with self._lock:
                    del self._made[digest]  # the next call tries again
                job.set_exception(error)
        return job.result()


class Call(NamedTuple):
    """One run of a piece. The values of a program are numbered: its flat arguments, then the results of pieces."""

    digest: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Wiring:
    """A program as calls of pieces."""

    calls: tuple[Call, ...]
    num_values: int
    results: tuple[int, ...]
    out_tree: Any

    def last_uses(self) -> Iterator[tuple[int, ...]]:
        """For each call, the values that nothing needs after it."""
        needed, dead = set(self.results), []
        for call in reversed(self.calls):
            used = {*call.inputs, *call.outputs}
            dead.append(tuple(used - needed))
            needed |= used
        return reversed(dead)


class MemoryAnalysis(NamedTuple):
    """As of `jax.stages.Compiled.memory_analysis`."""

    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


class SplitProgram:
    """A compiled program that runs in pieces. Is called like any other."""

    def __init__(self, wiring: Wiring, pieces: Mapping[str, jax.stages.Compiled]):
        self.wiring = wiring
        self.pieces = pieces
        self._runs = [
            (pieces[call.digest], call.inputs, call.outputs, dead)
            for call, dead in zip(wiring.calls, wiring.last_uses(), strict=True)
        ]

    def __call__(self, *arguments: Any) -> Any:
        values: list[Any] = jax.tree.leaves(arguments)
        values += [None] * (self.wiring.num_values - len(values))
        for piece, inputs, outputs, dead in self._runs:
            for number, value in zip(outputs, piece(*[values[number] for number in inputs]), strict=True):
                values[number] = value
            for number in dead:
                values[number] = None
        return jax.tree.unflatten(self.wiring.out_tree, [values[number] for number in self.wiring.results])

    def memory_analysis(self) -> MemoryAnalysis:
        """An upper bound: the largest temporary arrays of a piece plus the results of all."""
        sizes: list[Any] = [piece.memory_analysis() for piece in self.pieces.values()]
        return MemoryAnalysis(
            max(size.temp_size_in_bytes for size in sizes),
            sum(size.output_size_in_bytes for size in sizes),
            sum(size.alias_size_in_bytes for size in sizes),
        )


class SplitLowered:
    """A traced program, to be compiled in pieces."""

    def __init__(self, wiring: Wiring, lowered: Mapping[str, jax.stages.Lowered], pieces: Pieces):
        self._wiring = wiring
        self._lowered = lowered
        self._pieces = pieces

    def as_text(self) -> str:
        """The text of each piece, once."""
        return "\n".join(lowered.as_text() for lowered in self._lowered.values())

    def compile(self, compiler_options: Mapping[str, str | bool] | None = None) -> SplitProgram:
        # The same options for all programs with equal pieces: on a CPU they depend on the model alone.
        made = {
            digest: self._pieces.get(digest, partial(lowered.compile, compiler_options=dict(compiler_options or {})))
            for digest, lowered in self._lowered.items()
        }
        return SplitProgram(self._wiring, made)


CompiledProgram = jax.stages.Compiled | SplitProgram
Lowered = jax.stages.Lowered | SplitLowered


def split(traced: jax.stages.Traced, donated: Sequence[bool], sharding: Sharding, pieces: Pieces) -> SplitLowered | None:
    """The program in pieces; None if it has no `SharedLayers`.

    donated: of each of its flat arguments, whether the program may overwrite it. sharding: of all values.
    """
    jaxpr = traced.jaxpr.jaxpr
    sections = _sections(jaxpr.eqns)
    if not any(map(_is_layer, sections)):
        return None
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    consts = dict(zip(jaxpr.constvars, traced.jaxpr.consts, strict=True))
    numbers: dict[core.Var, int] = {var: number for number, var in enumerate(jaxpr.invars)}
    may_overwrite = list(donated)
    calls: list[Call] = []
    lowered: dict[str, jax.stages.Lowered] = {}
    digests: dict[Any, str] = {}
    for section, later in zip(sections, _needed_later(sections, jaxpr.outvars), strict=True):
        inputs, outputs = _ends(section, later, consts)
        donate = _donated(inputs, [may_overwrite[numbers[var]] and var not in later for var in inputs], outputs)
        identity = _identity(section, inputs, outputs, donate)
        if identity not in digests:
            piece = _lower(section, inputs, outputs, consts, donate, sharding, debug_info)
            digests[identity] = hashlib.sha256(piece.as_text().encode()).hexdigest()[:32]
            lowered[digests[identity]] = piece
        for var in outputs:
            numbers[var] = len(may_overwrite)
            may_overwrite.append(True)
        calls.append(Call(digests[identity], tuple(numbers[var] for var in inputs), tuple(numbers[var] for var in outputs)))
    results = tuple(numbers[var] for var in jaxpr.outvars)
    return SplitLowered(Wiring(tuple(calls), len(may_overwrite), results, traced.out_tree), lowered, pieces)


def _is_layer(section: Sequence[core.JaxprEqn]) -> bool:
    return section[0].params.get("name") == LAYER


def _sections(eqns: Sequence[core.JaxprEqn]) -> list[list[core.JaxprEqn]]:
    """Groups of layers, and what comes before, between and behind them."""
    runs = [(is_layer, list(run)) for is_layer, run in itertools.groupby(eqns, lambda eqn: _is_layer([eqn]))]
    return [section for is_layer, run in runs for section in (_groups(run) if is_layer else [run])]


def _groups(layers: list[core.JaxprEqn]) -> list[list[core.JaxprEqn]]:
    """Layers that follow each other, in groups of about LAYERS_AT_ONCE that have the same kinds of layers in the same order; before
    them the first layers of a model, if they are of other kinds."""
    kinds = [layer.params["jaxpr"] for layer in layers[:-1]]  # behind the last may be another norm
    begin, period = next(
        (begin, size)
        for begin in range(len(kinds) + 1)
        for size in range(1, MAX_PERIOD + 1)
        if kinds[begin + size :] == kinds[begin:-size]
    )
    size = period * max(1, LAYERS_AT_ONCE // period)
    groups = [layers[:begin], *(layers[start : start + size] for start in range(begin, len(layers), size))]
    return [group for group in groups if group]


def _needed_later(sections: Sequence[Sequence[core.JaxprEqn]], results: Sequence[Any]) -> Iterator[set[core.Var]]:
    """For each section, the values that are needed after it."""
    needed, found = _variables(results), []
    for section in reversed(sections):
        found.append(needed)
        needed = needed.union(*(_variables(eqn.invars) for eqn in section))
    return reversed(found)


def _variables(atoms: Sequence[Any]) -> set[core.Var]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def _ends(
    section: Sequence[core.JaxprEqn], later: set[core.Var], consts: Mapping[core.Var, Any]
) -> tuple[list[core.Var], list[core.Var]]:
    """The values that a section takes and gives. All groups of layers give what the last of them does, whether it is needed or not.

    What is given in place of a value that is taken, such as a cache, stands in the same order: XLA gives it the memory of the first value
    of its shape, and else would copy.
    """
    made = dict.fromkeys(var for eqn in section for var in eqn.outvars if not isinstance(var, core.DropVar))
    taken = dict.fromkeys(var for eqn in section for var in eqn.invars if not isinstance(var, core.Literal))
    inputs = [var for var in taken if var not in made and var not in consts]
    last = section[-1].outvars if _is_layer(section) else ()
    replaced, places = _replaced(section), {var: place for place, var in enumerate(inputs)}

    def place(var: core.Var) -> int:
        old = replaced.get(var)
        return len(places) if old is None else places.get(old, len(places))

    return inputs, sorted((var for var in made if var in later or var in last), key=place)


def _replaced(section: Sequence[core.JaxprEqn]) -> dict[core.Var, core.Var]:
    """The value that layers took in the place of one that they give: each layer's results replace its first arguments of their shapes."""
    found: dict[core.Var, core.Var] = {}
    for eqn in section:
        left = [var for var in eqn.invars if not isinstance(var, core.Literal)]
        for out in eqn.outvars:
            old = next((var for var in left if _shape(var) == _shape(out)), None)
            if old is not None:
                left.remove(old)
                found[out] = found.get(old, old)
    return found


def _donated(inputs: Sequence[core.Var], may_overwrite: Sequence[bool], outputs: Sequence[core.Var]) -> tuple[int, ...]:
    """The indices of inputs whose memory outputs of the same shape and type take."""
    left = list(map(_shape, outputs))
    donate = []
    for index, shape in enumerate(map(_shape, inputs)):
        if may_overwrite[index] and shape in left:
            left.remove(shape)
            donate.append(index)
    return tuple(donate)


def _shape(var: core.Var, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    aval: Any = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _identity(
    section: Sequence[core.JaxprEqn], inputs: Sequence[core.Var], outputs: Sequence[core.Var], donate: tuple[int, ...]
) -> Any:
    """A key that is equal for groups of layers that compute the same, and unique for any other section."""
    if not _is_layer(section):
        return id(section)
    numbers: dict[Any, int] = {var: number for number, var in enumerate(inputs)}

    def number_of(atom: Any) -> Any:
        return repr(atom) if isinstance(atom, core.Literal) else numbers.setdefault(atom, len(numbers))

    layers = [(eqn.params["jaxpr"], *map(number_of, (*eqn.invars, *eqn.outvars))) for eqn in section]
    return tuple(layers), tuple(map(number_of, outputs)), donate


def _lower(
    section: Sequence[core.JaxprEqn],
    inputs: Sequence[core.Var],
    outputs: Sequence[core.Var],
    consts: Mapping[core.Var, Any],
    donate: tuple[int, ...],
    sharding: Sharding,
    debug_info: core.DebugInfo,
) -> jax.stages.Lowered:
    own = {var: consts[var] for eqn in section for var in eqn.invars if not isinstance(var, core.Literal) and var in consts}
    effects = set().union(*(eqn.effects for eqn in section))
    jaxpr = core.Jaxpr(list(own), list(inputs), list(outputs), list(section), effects, debug_info)
    function = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(own.values())))

    def piece(*values: jax.Array) -> Any:
        return function(*values)

    shapes = [_shape(var, sharding) for var in inputs]
    # Unused values are passed too, so that a piece takes what its call lists.
    return jax.jit(piece, donate_argnums=donate, keep_unused=True, out_shardings=sharding).lower(*shapes)
