"""ModelRunner: owns weights, caches and rows on the device and dispatches steps without waiting. Does not use the scheduler."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.device_ops import DeviceOp
from jaxllm.foreseen import NOTHING_AWAITED, Foreseen, Needs, StepLimit
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import put, spans_hosts
from jaxllm.parallel.arrays import delete
from jaxllm.parallel.exchange import make_exchange
from jaxllm.parallel.shards import make_shards
from jaxllm.parallel.topology import Topology
from jaxllm.progress import SILENT, Progress
from jaxllm.runner import warm_up
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.drafter import Drafter
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.features import make_features, weights_of_features
from jaxllm.runner.heads import Head, Hidden, PendingPart
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import StepLayout
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.ops import PlanRunner, op_runners, run_by
from jaxllm.runner.peers import Peers
from jaxllm.runner.pending import StepInFlight
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.program_pool import ProgramPool
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import Wanted
from jaxllm.runner.programs.write_blocks import NO_UPDATE, updates_of
from jaxllm.runner.rank_batches import RankBatches
from jaxllm.runner.row_arrays import Caches, RowArrays, Scores
from jaxllm.runner.rows import NO_DECODE, LogprobsKind, Rows
from jaxllm.runner.sampling import PendingTokens, Sampling
from jaxllm.runner.shared_layers import traces_alike_once
from jaxllm.runner.small_places import reserve_small_places
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.runner.step import StepFunctions
from jaxllm.runner.step_feature import FeatureParts, WeightsPart
from jaxllm.runner.step_programs import StepPrograms
from jaxllm.runner.token_split import TokenSplit
from jaxllm.runner.weights import Weights, WeightsSource, merge_for
from jaxllm.runner.weights_holder import WeightsHolder
from jaxllm.scheduler_output import SchedulerOutput
from jaxllm.start_times import StartTimes
from jaxllm.worker_thread import WorkerThread

LARGE_ROW_ARRAY_BYTES = 1 << 24
"""Row arrays from this size on are zeroed on the devices."""
MAX_THREAD_ROWS = 64
"""A thread launches steps of at most this many requests: a launch takes the host longer than planning and reading such a step,
and on a small model longer than the device. With more requests, the two threads would contend for the interpreter."""


class ModelRunner(WeightsHolder, PlanRunner):
    """Runs `SchedulerOutput`s on the device, in the order given.

    With data-parallel ranks (`Ranks`) each program is one of all of them, and a step has a batch of each: one in which a rank has a prompt
    is a `forward` for all, and a rank without requests computes padding.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: CausalLM,
        mesh: Mesh,
        plan: MemoryPlan,
        kernels: Kernels,
        policy: KernelPolicy,
        processors: tuple[Any, ...] = (),
        *,
        drafter: Drafter | None = None,
        adaptation: Adaptation | None = None,
        store: ProgramStore | None = None,
        times: StartTimes | None = None,
        token_split: TokenSplit | None = None,
    ):
        """token_split: the devices of the mesh that split tokens."""
        on_gpu = jax.default_backend() != "cpu"
        max_rows, threads = config.scheduler.max_num_seqs, config.compile.compile_threads
        assert max_rows is not None and threads is not None, "platform defaults are resolved before the runner is made"
        of_features = weights_of_features(config, model_config, model)
        beside = {"drafter": drafter, "adaptation": adaptation, **of_features}
        source = WeightsSource(config, model_config, model, mesh, beside)
        # Programs need shapes only, so they compile while the weights load.
        super().__init__(Weights(source.models, mesh), source, times or StartTimes())
        functions = self._new_functions(plan, kernels, policy, processors, token_split)
        # Only full sampling knows the distribution that was sampled from.
        full_logprobs = config.model.logprobs_mode.startswith("processed")
        self.buckets = Buckets.choose(config, policy, num_drafts=functions.latest.width - 1, proposes=functions.latest.proposes)
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self.sampling = Sampling(
            self,
            num_rows=max_rows + 1,
            vocab_size=model_config.padded_vocab_size,
            processors=processors,
        )
        self.shapes = StepPrograms(
            functions=functions,
            buckets=self.buckets,
            model=model_config,
            mesh=mesh,
            params=self.weights.shapes,
            num_blocks=plan.num_blocks,
            max_blocks=max_blocks,
            layers=model.layers,
            make_state=self.sampling.new_state,
            full_logprobs=full_logprobs,
            in_pieces=bool(config.compile.share_layers),
        )
        self.ranks = self.shapes.ranks
        parallel = config.parallel
        self._has_stand_ins = (
            config.compile.warmup == "background"
            and functions.latest.width == 1
            and parallel.pipeline_parallel_size == parallel.num_ranks == 1
            and not spans_hosts(mesh)
        )
        """Whether any larger program stands in for one that is missing, and requests wait until there is one. Several hosts must choose
        alike, whatever each has compiled; the programs of drafters come in pairs, those of a pipeline one for each stage."""
        self._starts_with_few = self._has_stand_ins and Topology.of(parallel).num_devices == 1
        """Whether a start waits for few programs, which stand in for the others."""
        self._has_all_programs = False
        new_builder = partial(
            BatchBuilder,
            buckets=self.buckets,
            block_size=plan.block_size,
            max_blocks=max_blocks,
            num_groups=len(plan.cache.groups),
            num_updates=self.shapes.num_updates,
            choice=self._new_choice(config),
        )
        new_rows = partial(Rows, max_rows, full_logprobs=full_logprobs, inputs=self.shapes.inputs)
        self.batches = RankBatches([new_builder(new_rows()) for _ in range(self.ranks.num)])
        self.store = store
        self.programs = ProgramPool(
            self.shapes.lower,
            threads=threads,
            compiler_options=self.shapes.compiler_options,
            store=store,
            is_storable=self.shapes.is_storable,
            times=self.times,
        )
        heads = (feature.head(self) for feature in functions.features)
        self.heads: tuple[Head, ...] = tuple(head for head in heads if head is not None)
        self.tokens = functions.latest.on_host(self)
        self.op_runners = op_runners(functions.features, self)
        self._spans_hosts, self._put = spans_hosts(mesh), partial(put, place=self.shapes.replicated)
        self.caches: Caches = ()
        self.row_arrays = self._new_row_arrays()
        self._spacers: list[jax.Array] = []
        """Small arrays between free places: see `small_places`."""
        self.peers: Peers | None = None
        """Devices that exchange through each other's memory."""
        self._on_gpu, self._on_one_gpu = on_gpu, on_gpu and mesh.size == 1
        # On a CPU, launches are too cheap for a thread, but for those in pieces, which wait for each piece.
        self._launcher = WorkerThread("launch") if on_gpu or config.compile.share_layers else None
        self._max_thread_rows = MAX_THREAD_ROWS
        self.enter: Callable[[Batch], tuple[jax.Array, ...]] = lambda batch: ()
        """Runs earlier stages of a pipeline. Returns what they leave, on the devices of this one; nothing if there are none."""
        self.on_sampled: Callable[[jax.Array], Any] = lambda last_token_N: None
        """Called with the last token of each row, whenever a step has sampled some."""
        self._never_run: list[ProgramKey] = []
        """Common programs that `warm_up` left out."""
        self.launch_seconds = 0.0
        """Total host time of all launches, inside `start_step` or in the thread, in seconds."""

    def _new_functions(
        self,
        plan: MemoryPlan,
        kernels: Kernels,
        policy: KernelPolicy,
        processors: tuple[Any, ...],
        token_split: TokenSplit | None,
    ) -> StepFunctions:
        """The functions that the programs of steps compute."""
        source, merges = self._source, self.weights.merges
        config, model_config = source.config, source.model_config
        max_rows, vocab_size, max_logprobs = config.scheduler.max_num_seqs, model_config.vocab_size, config.model.max_logprobs
        assert max_rows is not None
        parts = FeatureParts(
            config,
            model_config,
            source.model,
            kernels,
            policy,
            weights=dict(zip(source.named_models, map(WeightsPart, merges, self.weights.parts), strict=True)),
            max_len=-(-plan.max_model_len // plan.block_size) * plan.block_size,
            beside=source.beside,
            token_split=token_split,
        )
        return StepFunctions(
            merge=partial(merge_for, kernels, merges[0]),
            shards=make_shards(source.mesh, policy),
            cache=plan.cache,
            max_rows=max_rows,
            kernels=kernels,
            policy=policy,
            num_logprobs=vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size),
            logprobs_mode=config.model.logprobs_mode,
            processors=processors,
            features=make_features(parts),
            exchange=make_exchange(source.mesh, policy),
            share_layers=traces_alike_once(config, on_gpu=jax.default_backend() != "cpu"),
        )

    def _new_choice(self, config: EngineConfig) -> ProgramChoice | None:
        """Choice of the programs of steps. Where none is compiled ahead, one that shares layers may stand in for the next smaller, which
        is then compiled when nothing runs. None with data-parallel ranks: the largest batch chooses, whatever is there."""
        if self.ranks.num > 1:
            return None
        compile_ = config.compile
        is_ahead = compile_.warmup in ("all", "background")

        def ask(key: ProgramKey) -> None:
            if is_ahead or self.shapes.kind_of(key).is_hurried:
                self.programs.hurry([key])
            else:
                self.programs.start((), [key])

        return ProgramChoice(
            self.buckets,
            is_there=lambda key: key in self.programs,
            ask=ask,
            reach=None if self._has_stand_ins else 1 if compile_.share_layers else 0,
        )

    @property
    def _start_keys(self) -> list[ProgramKey]:
        """The programs that a start waits for."""
        return self.shapes.first_keys() if self._starts_with_few else self.shapes.start_keys()

    def start_programs(self, *, rare_later: bool) -> None:
        """Start threads that load or compile all programs: first those that a start waits for; with `rare_later`, the rare ones in the
        background while serving."""
        first, rare = self._start_keys, self.shapes.rare_keys()
        others = self.shapes.keys_after_first() if self._starts_with_few else []
        if rare_later:
            self.programs.start(first, rare, later=others)
        else:
            self.programs.start([*first, *others, *rare])

    def start_programs_when_idle(self) -> None:
        """Start a thread that loads or compiles all programs while the engine is idle."""
        self.programs.start((), self.shapes.keys_by_use())

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        """Wait until the programs that a start waits for, or with `rare` all programs, are ready."""
        self.programs.wait([*self.shapes.start_keys(), *self.shapes.rare_keys()] if rare else self._start_keys, progress)

    def foresee(self, needs: Needs) -> Foreseen:
        """See Executor."""
        if not self.programs.is_warm or self._has_all_programs:
            return NOTHING_AWAITED
        if not self.programs.num_queued:
            self._has_all_programs = all(key in self.programs for key in self.shapes.all_keys())
        wanted = self.shapes.wanted_by(needs)
        found = self._awaited(wanted) if self._has_stand_ins else NOTHING_AWAITED
        if self.programs.num_queued:
            missing = [key for key in self.shapes.keys_of(wanted) if key not in self.programs]
            if missing:
                self.programs.hurry(missing)
        return found

    def _awaited(self, wanted: Wanted) -> Foreseen:
        """Programs that such a request waits for. Has them made."""
        missing = [keys[0] for keys in self.shapes.awaited_keys(wanted) if not any(key in self.programs for key in keys)]
        awaited, limit = {key.described: self.programs.want(key) for key in missing}, None
        largest = ProgramKey("forward", self.buckets.tokens[-1], features=wanted.features)
        if wanted.features and largest not in self.programs:
            will_be_ready = (key.size for key in missing if key._replace(size=largest.size) == largest)
            most = max((*self.ready_sizes(largest, self.buckets.tokens), *will_be_ready))
            limit = StepLimit(most, self.programs.want(largest))
        return Foreseen(awaited, limit)

    def ready_sizes(self, key: ProgramKey, sizes: Sequence[int]) -> tuple[int, ...]:
        """Filters `sizes`: those of which the key's program is there, if larger programs may stand in for others; or else all."""
        return tuple(size for size in sizes if not self._has_stand_ins or key._replace(size=size) in self.programs)

    def work_bytes(self) -> int:
        """Temporary and output bytes per device of the largest step, read from its compiled program."""
        num_tokens = self.buckets.tokens[-1]
        largest = ProgramKey("forward", num_tokens, features=self.shapes.inputs.common(num_tokens))
        self.programs.compile_all([largest], SILENT)
        sizes = self.programs.get(largest).memory_analysis()
        if sizes is None:  # the backend does not report them
            return 0
        return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)

    def stage(self, handle: int, data: np.ndarray) -> None:
        """See Executor."""
        for runner in self.op_runners:
            runner.stage(handle, data)

    def op_runner(self, kind: type[DeviceOp]) -> Any:
        """The OpRunner of a kind of operations; None if there is none."""
        return next((runner for runner in self.op_runners if kind in runner.ops), None)

    def run_op(self, op: DeviceOp) -> list[PendingPart]:
        """See PlanRunner."""
        return run_by(self.op_runners, op)

    def finish_ops(self) -> None:
        """See PlanRunner."""
        for runner in self.op_runners:
            runner.before_step(())

    def begin_ops(self) -> None:
        """See DeviceRunner."""
        for runner in self.op_runners:
            runner.begin()

    def take_weights(self, other: Self) -> None:
        """See DeviceRunner."""
        super().take_weights(other)
        for runner, same in zip(self.op_runners, other.op_runners, strict=True):
            runner.take_over(same)

    def allocate_caches(self) -> None:
        """Allocate the KV cache, zeroed: a NaN in a masked slot would still make a sum NaN."""
        program = self.programs.get(ProgramKey("new_caches"))
        with self.times.part("cache"):
            if self.peers is None and self.shapes.workspace is not None:
                self.peers = Peers(self.shapes.mesh)
            self.caches = program()
            jax.block_until_ready(self.caches)  # raises if a device cannot allocate its part
            for runner in self.op_runners:
                runner.allocate()
            if self._on_gpu and not self._spacers:
                self._spacers = reserve_small_places(partial(put, place=self.shapes.everywhere))

    def start_over(self) -> None:
        """Free all rows and reallocate all arrays that steps change, after a failure that may have lost any of them.

        Raises the device's error if it cannot.
        """
        self.drain()
        if self.peers is not None:
            with contextlib.suppress(Exception):  # the steps' errors were reported already
                jax.block_until_ready((self.row_arrays, self.caches))
            self.peers.reset()
        self.drop_caches()
        for runner in self.op_runners:
            runner.replace_lost()
        self.row_arrays = self._new_row_arrays()
        self.allocate_caches()
        jax.block_until_ready((self.row_arrays, self.caches))

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """Raise AssertionError if any request other than `finished_ids`, whose rows the next step frees, holds a row."""
        self.batches.check_idle(finished_ids)

    def drop_caches(self) -> None:
        """Free all rows and the arrays that steps change: the KV cache, the rows' arrays, the state of full sampling."""
        self.batches.clear()
        for runner in self.op_runners:
            runner.release()
        delete((self.caches, self.row_arrays))
        self.caches = ()
        self.sampling.delete_arrays()
        for head in self.heads:
            head.delete_arrays()

    def _new_row_arrays(self) -> RowArrays:
        """Zeroed. Large ones are made on the devices, small ones take less time to send than a program to compile."""
        wanted, structure = jax.tree.flatten(self.shapes.rows)
        is_large = [math.prod(x.shape) * x.dtype.itemsize >= LARGE_ROW_ARRAY_BYTES for x in wanted]
        small = iter(self.put([np.zeros(x.shape, x.dtype) for x, large in zip(wanted, is_large, strict=True) if not large]))
        made = [
            _zeros(x.shape, x.dtype, x.sharding)() if large else next(small) for x, large in zip(wanted, is_large, strict=True)
        ]
        return jax.tree.unflatten(structure, made)  # type: ignore[no-any-return]

    def warm_up(self) -> None:
        """Run the common programs that a start waits for on empty steps. From then on, compilations that requests wait for are counted."""
        common, first = self.shapes.common_keys(), set(self._start_keys)
        warm_up.run_common(self, [key for key in common if key in first])
        self._never_run = [key for key in common if key not in first]
        self.programs.is_warm = True
        self.programs.begin_later()

    def run_new_program(self) -> bool:
        """Run a common program that was made after the start on empty steps, as `warm_up` does. Returns whether there was one."""
        key = next((key for key in self._never_run if key in self.programs), None)
        if key is None:
            return False
        self._never_run.remove(key)
        self.drain()
        for _ in range(warm_up.WARM_UP_RUNS):
            warm_up.run_on_nothing(self, [key])
        return True

    @property
    def inputs(self) -> FeatureInputs:
        return self.shapes.inputs

    @property
    def workspace(self) -> jax.Array | None:
        return None if self.peers is None else self.peers.workspace

    def program(self, key: ProgramKey) -> CompiledProgram:
        """A compiled program. If devices wait for each other in kernels, its first runs happen while no other program runs."""
        program = self.programs.get(key)
        if self.peers is not None and not self.peers.knows(key):
            jax.block_until_ready((self.row_arrays, self.caches))
            if self.shapes.uses_peers(key):
                self.peers.first_runs(partial(warm_up.run_on_nothing, self, [key]))
            self.peers.note([key])
        return program

    def close(self) -> None:
        """Release all device memory, after the last program has been compiled."""
        self.programs.shutdown()
        if self._launcher is not None:
            self._launcher.shutdown()
        self.drop_caches()
        delete((self.params, self._spacers))
        for runner in self.op_runners:
            runner.delete_arrays()
        self.memory("drop", "copies")
        if self.peers is not None:
            self.peers.delete_arrays()
            self.peers = None

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of each rank."""
        return self.batches.rows

    def start_step(self, plan: SchedulerOutput) -> StepInFlight:
        """Start a step and return at once. The device runs dispatched steps in order.

        A plan with masked requests needs the step's `sample`, before the next dispatch, to sample its tokens.
        """
        step = StepInFlight(self.batches.apply(plan))
        if plan.masked_request_ids:
            step.mask_TW, step.start_sampling = self.sampling.new_mask(step.batches), partial(self._start_launch, self._sample)
            self._start_launch(self._forward, step)
        else:
            self._start_launch(self._forward_and_sample if step.batch.samples_apart else self._decode, step)
        return step

    def launch_in_thread(self) -> None:
        """Have the thread launch every step from now on: a launch may wait for other hosts."""
        self._launcher, self._max_thread_rows = self._launcher or WorkerThread("launch"), self.buckets.max_rows

    def _start_launch(self, launch: Callable[[StepInFlight], None], step: StepInFlight) -> None:
        """Launch a step, or a part of it, after all earlier launches: in the thread or in this one."""
        if self._launcher is None:
            self._launch(launch, step)
        elif step.batch.layout.num_rows <= self._max_thread_rows:
            step.launches.append(self._launcher.submit(partial(self._launch, launch, step)))
        else:
            self._launcher.drain()
            self._launch(launch, step)

    def _launch(self, launch: Callable[[StepInFlight], None], step: StepInFlight) -> None:
        start = time.perf_counter()
        launch(step)
        if self._on_gpu and step.done:  # a CPU's results are on the host already
            step.start_copies()
        self.launch_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the device has run all steps dispatched so far."""
        self.drain()
        jax.block_until_ready(self.row_arrays)

    def drain(self) -> None:
        """Wait until every launch in the thread has run, including failed ones."""
        if self._launcher is not None:
            self._launcher.drain()

    def prepare(self, batches: Sequence[Batch]) -> dict[str, str]:
        """Send the state that the step's program relies on. Returns the requests that failed alone, with the reason."""
        self._prepare_layers(batches)
        self.tokens.admit(batches)
        return {request_id: reason for batch in batches for request_id, reason in batch.errors.items()}

    def _decode(self, step: StepInFlight) -> None:
        batch = step.batch
        step.errors = self.prepare(step.batches)
        key = ProgramKey("decode", batch.layout.num_rows, batch.variant, width=batch.width, features=batch.features)
        program = self.program(key)
        (drawn,) = self._run_step(program, batch.layout, _buffers(step.batches), self.enter(batch))
        self.on_sampled(self.row_arrays.last_token_N)
        parts = [part for head, work in self._select(step.batches) for part in head.launch(work, None)]
        tokens = self.sampling.pending(step.batches, drawn, Scores(None, None))
        step.done, step.parts = [part.drawn for part in tokens], [*tokens, *parts]

    def _run_step(
        self, program: CompiledProgram, layout: StepLayout, buffers: Sequence[np.ndarray], entering: tuple[jax.Array, ...]
    ) -> list[Any]:
        """Start a program forward or decode with the buffers of a step. Returns its results behind caches and rows.

        entering: what an earlier stage of a pipeline has computed; nothing without stages."""
        sent = self.send(layout, self.ranks.joined(buffers))
        self.caches, self.row_arrays, *results = program(
            self.params, self.caches, self.row_arrays, sent, self.workspace, *entering
        )
        return results

    def run_empty(self, program: CompiledProgram, layout: StepLayout) -> None:
        """Start a program that computes layers on a step without requests."""
        entering = self.put(tuple(np.zeros(x.shape, x.dtype) for x in self.shapes.entering(layout)))
        self._run_step(program, layout, self.batches.empty(layout), entering)

    def run_on_rows(self, program: CompiledProgram, *arguments: Any) -> list[Any]:
        """Start a program that changes caches and rows. Returns its results behind them."""
        self.caches, self.row_arrays, *results = program(self.params, self.caches, self.row_arrays, *arguments, self.workspace)
        return results

    def pass_on(self, batch: Batch, entering: tuple[jax.Array, ...]) -> jax.Array:
        """Start a step on a stage that others follow. Returns what enters the next stage, on the devices of this one."""
        kind, size = ("decode", batch.layout.num_rows) if batch.is_decode else ("forward", batch.layout.num_tokens)
        self._prepare_layers([batch])
        # Adapters may change nothing on the stage that made the batch.
        inputs = self.shapes.inputs
        needed = inputs.needed(batch.layout.views(batch.buffer).columns_RC, slice(None), batch.chunks)
        program = self.program(ProgramKey(kind, size, features=inputs.of_mixed(needed)))
        (leaving_TD,) = self._run_step(program, batch.layout, [batch.buffer], entering)
        return leaving_TD  # type: ignore[no-any-return]

    def take_tokens(self, last_token_N: jax.Array) -> None:
        """Set the last token of each row, for the steps that follow."""
        self.row_arrays = self.row_arrays._replace(last_token_N=last_token_N)

    def _forward_and_sample(self, step: StepInFlight) -> None:
        self._forward(step)
        self._sample(step)

    def _forward(self, step: StepInFlight) -> None:
        batch = step.batch
        work = self._select(step.batches)
        forward_key = self._forward_key(batch)
        needed, likely = [forward_key, *self._keys_after(batch, work)], []
        if any(row.needs_state for each in step.batches for row in each.admitted):
            needed += [ProgramKey("new_state"), ProgramKey("admit")]
        if batch.sample_rows and batch.variant < NO_DECODE and batch.logprobs == LogprobsKind.NONE:
            # The next step's program, unless other requests arrive.
            num_rows, width = self.buckets.fit_decode(max(len(each.sampled) for each in step.batches)), batch.next_width
            features = self.shapes.inputs.in_decodes(batch.features)
            likely.append(ProgramKey("decode", num_rows, batch.variant, width=width, features=features))
        needed += self.tokens.keys(step)
        self.programs.expect(needed, likely)
        self.tokens.read(step)
        step.errors = self.prepare(step.batches)
        forward = self.program(forward_key)
        step.hidden = hidden = Hidden(*self._run_step(forward, batch.layout, _buffers(step.batches), self.enter(batch)))
        step.parts = [part for head, of_ranks in work for part in head.launch(of_ranks, hidden)]

    def _forward_key(self, batch: Batch) -> ProgramKey:
        """The program that computes the hidden states of a step."""
        kind, size = ("forward_rows", batch.layout.num_rows) if batch.is_decode else ("forward", batch.layout.num_tokens)
        return ProgramKey(kind, size, features=batch.features)

    def _select(self, batches: Sequence[Batch]) -> list[tuple[Head, list[Any]]]:
        """The heads that have work in a step, with that of each rank."""
        work = ((head, [head.select(batch.chunks) for batch in batches]) for head in self.heads)
        return [(head, of_ranks) for head, of_ranks in work if any(of_ranks)]

    def _keys_after(self, batch: Batch, work: Sequence[tuple[Head, list[Any]]]) -> list[ProgramKey]:
        """The programs that take the hidden states of a step that `forward` computes."""
        sampled = [self.sampling.key(batch)] if batch.sample_rows else []
        return [*sampled, *(key for head, part in work for key in head.keys(part, batch.layout.num_tokens))]

    def _sample(self, step: StepInFlight) -> None:
        """Start all that takes the hidden states of a step, but for heads."""
        batch, hidden = step.batch, step.take_hidden()
        tokens: list[PendingTokens] = []
        self.sampling.admit(step.batches, step.errors)  # while the device computes the forward pass
        if batch.sample_rows:
            tokens = self.sampling.launch(step.batches, hidden, step.mask_TW)
            self.on_sampled(self.row_arrays.last_token_N)
        self.tokens.follow(step, hidden)
        step.done = [part.drawn for part in tokens] or self.ranks.split(hidden.columns_NC)
        step.parts = [*tokens, *step.parts]

    def _prepare_layers(self, batches: Sequence[Batch]) -> None:
        """Send the state that the layers of a step rely on."""
        self._write_blocks(batches)
        for runner in self.op_runners:
            runner.before_step(batches)

    def _write_blocks(self, batches: Sequence[Batch]) -> None:
        """Write the new blocks that the buffers have no room for."""
        if all(batch.extra_updates is None for batch in batches):
            return
        program = self.program(ProgramKey("write_blocks"))
        for (update_2U,) in self.ranks.rounds(list(map(updates_of, batches)), (NO_UPDATE,)):
            self.row_arrays = program(self.row_arrays, self.put(update_2U))

    def send(self, layout: StepLayout, buffer: np.ndarray) -> Any:
        """A step's buffer in the form that its program takes."""
        if self.peers is not None:
            return self.peers.send(layout, buffer, self.batches.builders[0].empty)
        return self.argument(buffer)

    def argument(self, array: np.ndarray, place: Any = None) -> Any:
        """A host array in the form that a program takes soonest. place: its sharding; None: it is the same on each device."""
        # A program for one GPU that is called with a host array sends it in half the time of a device_put. A program for a CPU
        # would keep the array until after its results are ready, and abort a process that exits meanwhile.
        if self._on_one_gpu:
            return array
        return self.put(array) if place is None else jax.device_put(array, place)

    def put(self, arrays: Any) -> Any:
        return jax.tree.map(self._put, arrays) if self._spans_hosts else jax.device_put(arrays, self.shapes.replicated)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[[], jax.Array]:
    """A program that makes a zeroed array on the devices."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)


def _buffers(batches: Sequence[Batch]) -> list[np.ndarray]:
    return [batch.buffer for batch in batches]
