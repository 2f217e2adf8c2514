"""LanesRunner: runs each step on all lanes at once, in programs that exchange tokens between them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.device_ops import DeviceOp
from jaxllm.lanes.arrays import joined, parts_of
from jaxllm.lanes.batches import alike
from jaxllm.lanes.far_lane import FarLane
from jaxllm.lanes.lane import Lane
from jaxllm.lanes.programs import JointPrograms
from jaxllm.lanes.step import LanesInFlight
from jaxllm.lanes_plan import LanesPlan
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.arrays import delete
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.runner.all_programs import AllPrograms
from jaxllm.runner.heads import Hidden, PendingPart
from jaxllm.runner.layout import StepLayout
from jaxllm.runner.ops import PlanRunner, op_runners, run_by
from jaxllm.runner.pending import StepInFlight
from jaxllm.runner.program_pool import ProgramPool
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import Caches, Params, RowArrays, Scores
from jaxllm.runner.rows import NO_DECODE, LogprobsKind
from jaxllm.runner.runner import work_bytes
from jaxllm.runner.sampling import PendingTokens
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.runner.warm_up import WARM_UP_RUNS
from jaxllm.runner.weights import Weights, WeightsSource
from jaxllm.runner.weights_holder import WeightsHolder
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import SchedulerOutput


class LanesRunner(WeightsHolder, PlanRunner):
    """An executor over lanes: `ModelRunner`'s methods, each for all of them.

    It has the weights and caches of all lanes, and the programs `forward`, `decode` and `propose`, which all lanes run together: a step
    in which one of them has a prompt is a `forward` for each, and a lane without requests computes padding. What else follows a forward
    pass each lane does alone, on its part of the results.

    With several hosts each runs the same steps, and what follows for its own lanes.
    """

    def __init__(
        self,
        lanes: Sequence[Lane | FarLane],
        shapes: JointPrograms,
        weights: Weights,
        source: WeightsSource,
        *,
        threads: int,
        store: ProgramStore | None = None,
    ):
        self.lanes, self.shapes = tuple(lane for lane in lanes if isinstance(lane, Lane)), shapes
        self._all_lanes, first = tuple(lanes), self.lanes[0]
        super().__init__(weights, source, first.times)
        self._first_lane = lanes.index(first)
        self.buckets = first.buckets
        self.joint = ProgramPool(
            shapes.lower, threads=threads, compiler_options=shapes.compiler_options, store=store, times=self.times
        )
        """Of all lanes together."""
        self.programs = AllPrograms([self.joint, *(lane.programs for lane in self.lanes)])
        self._op_runners = [runner for runner in op_runners(shapes.functions.features, self) if runner.is_joint]
        self._joint_place, self._lane_places = shapes.replicated, [lane.shapes.replicated for lane in self.lanes]
        self.caches: Caches = ()
        self._rows: RowArrays | None = None
        """What a program of all lanes has left; None: the lanes have their own."""
        for lane in self.lanes:
            lane.take_rows = self._part_rows

    # Steps

    def run_op(self, op: DeviceOp) -> list[PendingPart]:
        """See PlanRunner. Experts move between the devices of all lanes; each lane counts what its own tokens chose, and with several hosts
        the counts are those of this one's lanes."""
        if any(type(op) in runner.ops for runner in self._op_runners):
            return run_by(self._op_runners, op)
        return [part for lane in self.lanes for part in lane.run_op(op)]

    def drain(self) -> None:
        """See PlanRunner."""
        self.lanes[0].drain()

    def start_step(self, plan: SchedulerOutput) -> LanesInFlight:
        """See ModelRunner."""
        assert isinstance(plan, LanesPlan), "a plan of one lane"
        batches = [lane.batch_of(part) for lane, part in zip(self._all_lanes, plan.lanes, strict=True)]
        batches = alike(batches, [lane.batches for lane in self._all_lanes])
        own = slice(self._first_lane, self._first_lane + len(self.lanes))
        step = LanesInFlight(batches, self._first_lane, [StepInFlight(batch) for batch in batches[own]])
        launch = self._decode if step.batch.is_decode else self._forward_and_sample
        if plan.masked_request_ids:
            step.open_masks(num_words(self.shapes.model.padded_vocab_size))
            for lane, part, planned in zip(self.lanes, step.parts, plan.lanes[own], strict=True):
                part.mask_TW = lane.sampling.new_mask(part.batch) if planned.masked_request_ids else None
            step.start_sampling, launch = partial(self._start, self._sample), self._forward
        self._start(launch, step)
        return step

    def _start(self, launch: Any, step: LanesInFlight) -> None:
        """Launch a step of all lanes: on a GPU in the first lane's thread."""
        self.lanes[0].start_launch(launch, step)  # type: ignore[arg-type]

    def _decode(self, step: LanesInFlight) -> None:
        self._prepare(step)
        variant = max(batch.variant for batch in step.batches)
        key = ProgramKey("decode", step.batch.layout.num_rows, variant, width=step.width)
        (drawn,) = self._run_buffers(self.program(key), [batch.buffer for batch in step.batches])
        for lane, part, drawn_R in zip(self.lanes, step.parts, parts_of(drawn, self._lane_places), strict=True):
            others = [head.launch(work, None) for head, work in lane.select(part.batch)]
            part.done, part.parts = drawn_R, [PendingTokens(part.batch.sampled, drawn_R, Scores(None, None)), *others]

    def _forward_and_sample(self, step: LanesInFlight) -> None:
        self._forward(step)
        self._sample(step)

    def _forward(self, step: LanesInFlight) -> None:
        key = ProgramKey("forward", step.batch.layout.num_tokens)
        work_of_each = [lane.select(part.batch) for lane, part in zip(self.lanes, step.parts, strict=True)]
        self._expect(key, step, work_of_each)
        for lane, part in zip(self.lanes, step.parts, strict=True):
            lane.tokens.read(part)
        self._prepare(step)
        hidden_TD, hidden_NWD, columns_NC, *shown = self._run_buffers(
            self.program(key), [batch.buffer for batch in step.batches]
        )
        if shown:
            step.for_drafter = (hidden_TD, columns_NC, *shown[0])
        results = [parts_of(array, self._lane_places) for array in (hidden_TD, hidden_NWD, columns_NC)]
        for part, work, *arrays in zip(step.parts, work_of_each, *results, strict=True):
            part.hidden = hidden = Hidden(*arrays)
            part.parts = [head.launch(each, hidden) for head, each in work]

    def _sample(self, step: LanesInFlight) -> None:
        """Start all that takes the hidden states of a step, but for heads."""
        for lane, part in zip(self.lanes, step.parts, strict=True):
            lane.sample(part)
        if step.for_drafter is not None:
            shown, step.for_drafter = step.for_drafter, None
            self.run_on_rows(self.program(self._propose_key(step)), *shown)

    def _propose_key(self, step: LanesInFlight) -> ProgramKey:
        """The program that shows a step of all lanes to the drafter."""
        variant = min(max(batch.variant for batch in step.batches), Variant.RANDOM)
        return ProgramKey("propose", step.batch.layout.num_tokens, variant, width=step.batch.next_width)

    def _prepare(self, step: LanesInFlight) -> None:
        """Send what the step's program relies on beside its buffer."""
        for lane, part in zip(self.lanes, step.parts, strict=True):
            part.errors = lane.prepare(part.batch)

    def _run_buffers(self, program: CompiledProgram, buffers: Sequence[np.ndarray]) -> list[Any]:
        """Start the program forward or decode of all lanes with their buffers. Returns as `run_on_rows`."""
        return self.run_on_rows(program, self.put(np.concatenate(buffers)))

    def run_empty(self, program: CompiledProgram, layout: StepLayout) -> None:
        """See ModelRunner."""
        self._run_buffers(program, [lane.batches.empty(layout) for lane in self._all_lanes])

    def put(self, arrays: Any) -> Any:
        """Host arrays on the devices of all lanes."""
        return jax.tree.map(partial(put, place=self._joint_place), arrays)

    def program(self, key: ProgramKey) -> CompiledProgram:
        """A program of all lanes."""
        return self.joint.get(key)

    def run_on_rows(self, program: CompiledProgram, *arguments: Any) -> list[Any]:
        """Start a program of all lanes that changes their rows. Returns its results behind caches and rows."""
        self.caches, rows, *results = program(self.params, self.caches, self._join_rows(), *arguments, None)
        self._rows = rows
        for lane in self.lanes:
            lane.row_arrays = None  # type: ignore[assignment]
        return results

    def _join_rows(self) -> RowArrays:
        """The rows of all lanes, for a program of all."""
        if self._rows is not None:
            return self._rows
        rows = [lane.row_arrays for lane in self.lanes]
        return jax.tree.map(lambda *parts: joined(parts, self._joint_place), *rows)  # type: ignore[no-any-return]

    def _part_rows(self) -> None:
        """Give each lane its rows, for programs that it runs alone."""
        assert self._rows is not None, "the rows are nowhere"
        leaves, structure = jax.tree.flatten(self._rows)
        parts = [parts_of(leaf, self._lane_places) for leaf in leaves]
        for lane, own in zip(self.lanes, zip(*parts, strict=True), strict=True):
            lane.row_arrays = jax.tree.unflatten(structure, own)
        self._rows = None

    def _expect(self, key: ProgramKey, step: LanesInFlight, work_of_each: Sequence[Any]) -> None:
        """Before the warm-up is over, make the programs of a step and those of the next at the same time."""
        if self.joint.is_warm or key in self.joint:
            return
        batches = step.batches
        wanted = [key]
        if any(batch.sampled for batch in batches) and all(
            batch.variant < NO_DECODE and batch.logprobs == LogprobsKind.NONE for batch in batches
        ):
            num_rows = self.buckets.fit_decode(max(len(batch.sampled) for batch in batches))
            variant = max(batch.variant for batch in batches)
            wanted.append(ProgramKey("decode", num_rows, variant, width=step.batch.next_width))
        if "propose" in self.shapes.kinds:
            wanted.append(self._propose_key(step))
        self.joint.start(wanted)
        for lane, part, work in zip(self.lanes, step.parts, work_of_each, strict=True):
            lane.programs.start(lane.keys_after(part.batch, work))
        self.joint.expect(wanted)

    def start_over(self) -> None:
        """See ModelRunner."""
        self.lanes[0].drain()
        self._forget_rows()
        for lane in self._all_lanes:
            lane.start_over()
        delete(self.caches)
        self.allocate_caches()

    def _forget_rows(self) -> None:
        delete(self._rows)
        self._rows = None

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """See ModelRunner."""
        finished_ids = list(finished_ids)
        for lane in self._all_lanes:
            lane.check_idle(finished_ids)

    def wait(self) -> None:
        """Wait until the devices have run all steps dispatched so far."""
        for lane in self.lanes:
            lane.wait()

    # The start

    def start_programs(self, *, rare_later: bool) -> None:
        """See ModelRunner, as for the methods that follow."""
        self.joint.start(self.shapes.start_keys())
        for lane in self.lanes:
            lane.start_programs(rare_later=rare_later)

    def start_programs_when_idle(self) -> None:
        self.joint.start((), [*self.shapes.keys_by_use(), ProgramKey("new_caches")])
        for lane in self.lanes:
            lane.start_programs_when_idle()

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        self.joint.wait(self.shapes.start_keys(), progress)
        for lane in self.lanes:
            lane.wait_for_programs(progress, rare=rare)

    def work_bytes(self) -> int:
        return work_bytes(self.joint, ProgramKey("forward", self.buckets.tokens[-1]))

    def set_params(self, params: Params) -> None:
        """Have programs take these, those of each lane its part of them."""
        super().set_params(params)
        parts = [self._parts_of_weight(index, joint) for index, joint in enumerate(params)]
        for number, lane in enumerate(self.lanes):
            lane.set_params(tuple(of_lanes[number] for of_lanes in parts))

    def replace_params(self, changed: Mapping[int, jax.Array]) -> None:
        """See WeightsHolder. The same for the parts of each lane."""
        super().replace_params(changed)
        parts = {index: self._parts_of_weight(index, joint) for index, joint in changed.items()}
        for number, lane in enumerate(self.lanes):
            lane.replace_params({index: of_lanes[number] for index, of_lanes in parts.items()})

    def _parts_of_weight(self, index: int, joint: jax.Array) -> list[jax.Array]:
        shapes = [lane.weights.shapes[index] for lane in self.lanes]
        return parts_of(joint, [shape.sharding for shape in shapes], shapes[0].shape)

    def allocate_caches(self) -> None:
        program = self.program(ProgramKey("new_caches"))
        with self.times.part("cache"):
            self.caches = program()
            jax.block_until_ready(self.caches)  # raises if a device cannot allocate its part
        for lane in self.lanes:
            lane.allocate_caches()

    def warm_up(self) -> None:
        for number in range(1, WARM_UP_RUNS + 1):
            with self.times.part(f"warm-up run {number}"):
                for key in self.shapes.common_keys():
                    self.shapes.kind_of(key).run_on_nothing(self, key, self.program(key))
                jax.block_until_ready((self._rows, self.caches))
        self.joint.is_warm = True
        for lane in self.lanes:
            lane.warm_up()

    def run_new_program(self) -> bool:
        """There is none: the programs of all lanes run at the start."""
        return False

    def drop_caches(self) -> None:
        self._forget_rows()
        for lane in self._all_lanes:
            lane.drop_caches()
        delete(self.caches)
        self.caches = ()

    def stage(self, handle: int, data: np.ndarray) -> None:
        """See Executor."""
        for lane in self.lanes:
            lane.stage(handle, data)

    # Any time

    @property
    def launch_seconds(self) -> float:
        return self.lanes[0].launch_seconds

    def foresee(self, params: SamplingParams, pooling: PoolingParams | None, *, is_masked: bool) -> None:
        """See ModelRunner. Any lane may get the request."""
        for lane in self.lanes:
            lane.foresee(params, pooling, is_masked=is_masked)

    def close(self) -> None:
        self.programs.shutdown()
        for lane in self.lanes:  # the first ends the launches of all
            lane.close()
        self._forget_rows()
        delete((self.params, self.caches))
        self.memory("drop", "copies")
        self.caches = ()
