"""Experts that move between devices, as a feature of the step: which slot each expert is in, and how experts move."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import EngineConfig
from jaxllm.device_ops import MoveExperts
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.axes import num_parts
from jaxllm.parallel.topology import Topology
from jaxllm.runner.expert_placement import ROUNDS, Tables, moving_bytes
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.runner.step_feature import FeatureParts, StepFeature, StepRun

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class ExpertSlots(StepFeature):
    """Where the experts of an engine, or of one stage of a pipeline, are among all weights."""

    names: tuple[str, ...]
    """Names of the layers' mixtures, in the order of `leaves`."""
    leaves: dict[int, tuple[int, ...]]
    """By layer with a mixture, its arrays over slots, by their index among all weights."""
    tables: slice
    """The tables among all weights, in the same order."""
    merge: Callable[[tuple[jax.Array, ...]], Tables]
    """All weights -> the tables."""

    @classmethod
    def of(cls, config: ModelConfig, model: nnx.Module, tables: slice, merge: Callable[..., Tables]) -> "ExpertSlots":
        """The slots of a model whose weights come first among all."""
        leaves: dict[int, tuple[int, ...]] = {}
        for index, (path, variable) in enumerate(parameters(model)):
            if "split_experts" in axes_of(variable):
                layer = int(path[1])
                leaves[layer] = (*leaves.get(layer, ()), index)
        mixtures = {layer: part for layer in leaves if isinstance(part := config.layers[layer].mlp, MoE)}
        return cls(tuple(part.module(config.layer_name(i)) for i, part in mixtures.items()), leaves, tables, merge)

    def programs(self) -> Sequence[ProgramKind]:
        return [MoveProgram(self)]

    def op_runner(self, device: Any) -> "ExpertMover":
        return ExpertMover(device, self)

    def before(self, run: StepRun) -> None:
        run.step.slots = self.slots(run.params)

    def table_of(self, layer: int) -> int:
        """The index of a layer's table among all weights."""
        return self.tables.start + list(self.leaves).index(layer)

    def slots(self, params: tuple[jax.Array, ...]) -> Callable[[str, jax.Array, int | jax.Array], jax.Array]:
        """See `Step.slots`."""
        tables = dict(zip(self.names, self.merge(params).tables, strict=True))

        def slots(name: str, expert_Tk: jax.Array, start: int | jax.Array) -> jax.Array:
            return slots_of(tables[name][...], expert_Tk, start)

        return slots

    def move(
        self, axes: str | tuple[str, ...], old: tuple[jax.Array, ...], new: tuple[jax.Array, ...], moves_2RN: jax.Array
    ) -> tuple[jax.Array, ...]:
        """`new`, a layer's arrays on this device, with the experts of these rounds. In round r device n gets what is in the slot
        moves[0, r, n] of `old`, counted over all devices, and writes it to its own slot moves[1, r, n]; a slot that it does not have
        means no move.

        So slots may be exchanged, in whatever order. Each round has two experts for each device in memory. The number of rounds is
        static: the host would be asked whether there is another one, and wait for the device to know.

        axes: of the mesh, over which slots are split.
        """
        num_slots, rank = len(old[0]), jax.lax.axis_index(axes)

        def move(wanted_N: jax.Array, target: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            # Each device offers each what that wants, and takes the offer of the one that has it.
            offers = jax.lax.all_to_all(old[wanted_N % num_slots], axes, 0, 0, tiled=True)
            return new.at[target].set(offers[wanted_N[rank] // num_slots], mode="drop")

        def one_round(number: jax.Array, moved: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            wanted_N, target_N = moves_2RN[0, number], moves_2RN[1, number]
            return tuple(map(partial(move, wanted_N, target_N[rank]), old, moved))

        return jax.lax.fori_loop(0, moves_2RN.shape[1], one_round, new)


class MoveProgram(ProgramKind):
    """See `ExpertSlots.move`."""

    name = "move_experts"

    def __init__(self, slots: ExpertSlots):
        self.slots = slots

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return dict.fromkeys(self.key(programs, layer) for layer in self.slots.leaves)

    def key(self, programs: "StepPrograms", layer: int) -> ProgramKey:
        """The program that moves a layer's experts: its size is the first layer with arrays of these shapes."""

        def shapes(layer: int) -> list[Any]:
            return [(programs.params[leaf].shape, programs.params[leaf].dtype) for leaf in self.slots.leaves[layer]]

        return ProgramKey(self.name, next(other for other in self.slots.leaves if shapes(other) == shapes(layer)))

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        arrays = tuple(programs.params[leaf] for leaf in self.slots.leaves[key.size])
        out = tuple(array.sharding for array in arrays)
        no_moves = self.no_moves(programs, key.size)
        moves = jax.ShapeDtypeStruct(no_moves.shape, jnp.int32, sharding=programs.everywhere)
        # Nothing is donated: the steps in flight read the arrays, and a failure must not lose them.
        return programs.lower_on_each(partial(self.slots.move, out[0].spec[0]), (arrays, arrays, moves), out, donate=())

    def no_moves(self, programs: "StepPrograms", layer: int) -> np.ndarray:
        """The plan of as many rounds of moves as one run of the program has, in which a layer's experts stay where they are."""
        num_devices = num_parts(("split_experts",), programs.mesh.shape)
        moves_2RN = np.zeros((2, ROUNDS, num_devices), np.int32)
        moves_2RN[1] = programs.params[self.slots.leaves[layer][0]].shape[0] // num_devices
        return moves_2RN

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        runner.replace_params(self.moved(runner, key.size, self.no_moves(runner.shapes, key.size)))

    def moved(self, runner: Any, layer: int, moves_2RN: np.ndarray) -> dict[int, jax.Array]:
        """Start the moves of a layer. Returns the new weights by their index among all, at once."""
        where, shapes = self.slots.leaves[layer], runner.shapes
        program, no_moves_2RN = runner.program(self.key(shapes, layer)), self.no_moves(shapes, layer)
        old = new = tuple(runner.params[index] for index in where)
        for first in range(0, moves_2RN.shape[1], ROUNDS):
            rounds_2RN, part = no_moves_2RN.copy(), moves_2RN[:, first : first + ROUNDS]
            rounds_2RN[:, : part.shape[1]] = part
            new = program(old, new, put(rounds_2RN, shapes.everywhere))
        return dict(zip(where, new, strict=True))


class ExpertMover(OpRunner):
    """Moves experts. Layers of other stages of a pipeline are left to these."""

    ops = (MoveExperts,)

    def __init__(self, runner: Any, slots: ExpertSlots):
        self._runner, self._slots, self._program = runner, slots, MoveProgram(slots)

    def run(self, op: MoveExperts) -> None:
        if op.layer in self._slots.leaves:
            changed = self._program.moved(self._runner, op.layer, np.array(op.moves, np.int32))
            changed[self._slots.table_of(op.layer)] = put(np.array(op.table, np.int32), self._runner.shapes.everywhere)
            self._runner.replace_params(changed)


def slots_of(table_EC: jax.Array, expert_Tk: jax.Array, start: int | jax.Array) -> jax.Array:
    """The slots of experts: of several copies, tokens take one after the other, by their numbers from `start` on."""
    token_T1 = start + jnp.arange(len(expert_Tk), dtype=jnp.int32)[:, None]
    expert = jnp.maximum(expert_Tk, 0)
    slot_Tk = table_EC[expert, 1 + token_T1 % table_EC[expert, 0]]
    return jnp.where(expert_Tk < 0, -1, slot_Tk)


def weights(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> Tables | None:
    """The tables of a model's mixtures, if their experts move."""
    return Tables.of(config.parallel, model_config, model.layers)


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Temporary bytes on each device while the experts of a layer move."""
    return moving_bytes(model, Topology.of(config.parallel).expert) if config.parallel.enable_eplb else 0


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines whose experts move."""
    tables = parts.weights.get("expert_slots")
    return None if tables is None else ExpertSlots.of(parts.model_config, parts.model, tables.part, tables.merge)
