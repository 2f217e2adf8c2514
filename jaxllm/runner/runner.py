"""ModelRunner: owns weights, caches and rows on the device and dispatches steps without waiting. Does not use the scheduler."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.loaders.layout import abstract_state, delete
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import make_shards
from jaxllm.progress import SILENT, Progress
from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.consumers import Hidden, HiddenConsumer, PendingPart
from jaxllm.runner.consumers.pooling import Pooling
from jaxllm.runner.consumers.prompt_logprobs import PromptLogprobs
from jaxllm.runner.consumers.sampling import PendingTokens, Sampling
from jaxllm.runner.draft_step import DraftFunctions
from jaxllm.runner.drafter import Drafter
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.launcher import Launcher
from jaxllm.runner.layout import StepLayout, padded
from jaxllm.runner.masked_step import MaskedStep
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.peers import Peers
from jaxllm.runner.pending import LaunchingStep, PendingStep
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.programs import Programs
from jaxllm.runner.rows import NO_DECODE, LogprobsKind, Row, Rows
from jaxllm.runner.step import Caches, Params, RowArrays, Scores, StepFunctions
from jaxllm.runner.step_programs import TOKENS_PER_SHOW, UPDATES_PER_WRITE, ProgramKey, StepPrograms
from jaxllm.sampling.variants import Variant
from jaxllm.scheduler_output import SchedulerOutput
from jaxllm.start_times import StartTimes

T = TypeVar("T")

WARM_UP_RUNS = 2
"""The first run of a program loads it on the device; the second records its CUDA graphs, which all later ones launch."""

NUM_SMALL_PLACES, SMALL_PLACE_BYTES = 48, 128 << 10
"""Number and size of the places kept free for steps' inputs and results: more than all steps in flight need, each as large as
the buffer of any decode."""

MAX_THREAD_ROWS = 64
"""A thread launches steps of at most this many requests: a launch takes the host longer than planning and reading such a step,
and on a small model longer than the device. With more requests, the two threads would contend for the interpreter."""


class _Weights:
    """The weights of a model, as the flat tuple of arrays that programs take."""

    def __init__(self, model: nnx.Module, mesh: Mesh):
        self._graphdef = nnx.graphdef(model)
        self.shapes, self.structure = jax.tree.flatten(abstract_state(model, mesh))

    def merge(self, part: slice, params: Params) -> Any:
        """The model with its part of the weights of all models."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self.structure, params[part]))


@dataclass(frozen=True)
class _Forward:
    """A step whose forward pass is dispatched."""

    hidden: Hidden
    parts: list[PendingPart]
    errors: dict[str, str]


class ModelRunner:
    """Runs `SchedulerOutput`s on the device, in the order given."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: nnx.Module,
        mesh: Mesh,
        plan: MemoryPlan,
        kernels: Kernels,
        processors: tuple[Any, ...] = (),
        *,
        drafter: Drafter | None = None,
        store: ProgramStore | None = None,
        times: StartTimes | None = None,
    ):
        on_gpu = jax.default_backend() != "cpu"
        max_rows, threads = config.scheduler.max_num_seqs, config.compile.compile_threads
        assert max_rows is not None and threads is not None, "platform defaults are resolved before the runner is made"
        # Programs need shapes only, so they compile while the weights load. Weights are flattened once: walking the module tree in
        # each step would cost milliseconds.
        models = [model] if drafter is None or drafter.model is None else [model, drafter.model]
        self._weights = [_Weights(part, mesh) for part in models]
        first = [sum(len(part.shapes) for part in self._weights[:index]) for index in range(len(models) + 1)]
        merges = [partial(part.merge, slice(*first[i : i + 2])) for i, part in enumerate(self._weights)]
        self.params: tuple[jax.Array, ...] = ()
        vocab_size, max_logprobs = model_config.vocab_size, config.model.max_logprobs
        # What was drawn from is known to full sampling alone.
        full_logprobs = config.model.logprobs_mode.startswith("processed")
        functions = StepFunctions(
            merge=merges[0],
            shards=make_shards(mesh),
            cache=plan.cache,
            max_rows=max_rows,
            kernels=kernels,
            num_logprobs=vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size),
            logprobs_mode=config.model.logprobs_mode,
            processors=processors,
            drafting=None if drafter is None else DraftFunctions(drafter, merges[1:], model_config.num_layers),
        )
        num_drafts = 0 if drafter is None else drafter.num_drafts
        self.buckets = Buckets.choose(config, on_gpu=on_gpu, num_drafts=num_drafts)
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self.sampling = Sampling(
            self,
            self.buckets,
            num_rows=max_rows + 1,
            vocab_size=model_config.padded_vocab_size,
            processors=processors,
        )
        self.rows = Rows(max_rows, full_logprobs=full_logprobs)
        self.shapes = StepPrograms(
            functions=functions,
            buckets=self.buckets,
            model=model_config,
            mesh=mesh,
            params=tuple(shape for part in self._weights for shape in part.shapes),
            num_blocks=plan.num_blocks,
            max_blocks=max_blocks,
            make_state=self.sampling.new_state,
            full_logprobs=full_logprobs,
        )
        self.batches = BatchBuilder(
            self.rows,
            self.buckets,
            block_size=plan.block_size,
            max_blocks=max_blocks,
            num_groups=len(plan.cache.groups),
            num_updates=self.shapes.num_updates,
        )
        self.times = times or StartTimes()
        self.store = store
        self.programs = Programs(
            self.shapes.lower,
            threads=threads,
            compiler_options=self.shapes.compiler_options,
            store=store,
            is_storable=self.shapes.is_storable,
            times=self.times,
        )
        self.consumers: tuple[HiddenConsumer, ...] = (PromptLogprobs(self), Pooling(self, self.buckets, model_config))
        self.caches: Caches = ()
        self.row_arrays = self._new_row_arrays()
        self._spacers: list[jax.Array] = []
        """Small arrays between free places: see `_small_places`."""
        self._peers: Peers | None = None
        """Devices that exchange through each other's memory."""
        self._on_gpu, self._on_one_gpu = on_gpu, on_gpu and mesh.size == 1
        # On a CPU, launches are too cheap for a thread.
        self._launcher = Launcher() if on_gpu else None
        self.num_steps = 0
        self.dispatch_seconds = 0.0
        """Total host time of all `dispatch` calls, in seconds."""
        self.launch_seconds = 0.0
        """Total host time of all launches, inside `dispatch` or in the thread, in seconds."""

    def start_programs(self, *, rare_later: bool) -> None:
        """Start threads that load or compile all programs; with `rare_later`, the rare ones in the background while serving."""
        common, rare = [*self.shapes.common_keys(), ProgramKey("new_caches")], self.shapes.rare_keys()
        self.programs.start(common if rare_later else [*common, *rare], rare if rare_later else ())

    def start_programs_when_idle(self) -> None:
        """Start a thread that loads or compiles all programs while the engine is idle."""
        self.programs.start((), self.shapes.keys_by_use())

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        """Wait until the common programs, and with `rare` the rare ones too, are ready."""
        self.programs.wait(
            [*(self.shapes.all_keys() if rare else self.shapes.common_keys()), ProgramKey("new_caches")], progress
        )

    def work_bytes(self) -> int:
        """Temporary and output bytes per device of the largest step, read from its compiled program."""
        largest = ProgramKey("forward", self.buckets.tokens[-1])
        self.programs.compile_all([largest], SILENT)
        sizes = self.programs.get(largest).memory_analysis()
        if sizes is None:
            return 0  # this backend does not report it
        return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)

    def set_weights(self, *weights: nnx.State) -> None:
        """Set the weights of the model and of its drafter, if that has any, with the shapes and placement that they declare."""
        leaves: list[jax.Array] = []
        for state, expected in zip(weights, self._weights, strict=True):
            arrays, structure = jax.tree.flatten(state)
            assert structure == expected.structure, "weights of another model"  # type: ignore[operator]
            leaves += arrays
        for found, wanted in zip(leaves, self.shapes.params, strict=True):
            same = found.shape == wanted.shape and found.dtype == wanted.dtype
            assert same and found.sharding.is_equivalent_to(wanted.sharding, found.ndim), "a weight of another shape or place"
        self.params = tuple(leaves)

    def put_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set the weights from host arrays in the order of `params`."""
        self.params = tuple(
            jax.device_put(array, wanted.sharding) for array, wanted in zip(weights, self.shapes.params, strict=True)
        )
        jax.block_until_ready(self.params)

    def drop_weights(self) -> None:
        """Release the memory of the weights."""
        delete(self.params)
        self.params = ()

    def allocate_caches(self) -> None:
        """Allocate the KV cache, zeroed: a NaN in a masked slot would still make a sum NaN."""
        program = self.programs.get(ProgramKey("new_caches"))
        with self.times.part("cache"):
            if self._peers is None and self.shapes.workspace is not None:
                self._peers = Peers(self.shapes.mesh)
            self.caches = program()
            if self._on_gpu and not self._spacers:
                self._spacers = self._small_places()

    def _small_places(self) -> list[jax.Array]:
        """Reserve free places of SMALL_PLACE_BYTES between small arrays. Returns these arrays; the caller must keep them.

        JAX's pool then places each step's input and result there, and the step's temporary arrays at the beginning of the
        large free region: at the same addresses in every step. Before relaunching a CUDA graph, XLA writes changed addresses
        into its nodes, and nine of ten nodes of a decode read or write temporary arrays.
        """
        places, spacers = [], []
        for _ in range(NUM_SMALL_PLACES):
            places.append(self.put(np.zeros(SMALL_PLACE_BYTES // 4, np.int32)))
            spacers.append(self.put(np.zeros(1, np.int32)))
        jax.block_until_ready((places, spacers))
        delete(places)
        return spacers

    def start_over(self) -> None:
        """Free all rows and reallocate all arrays that steps change, after a failure that may have lost any of them.

        Raises the device's error if it cannot.
        """
        if self._launcher is not None:
            self._launcher.drain()
        if self._peers is not None:
            with contextlib.suppress(Exception):  # the steps' errors were reported already
                jax.block_until_ready((self.row_arrays, self.caches))
            self._peers.reset()
        self.drop_caches()
        self.row_arrays = self._new_row_arrays()
        self.allocate_caches()
        jax.block_until_ready((self.row_arrays, self.caches))

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """Raise AssertionError if any request other than `finished_ids`, whose rows the next step frees, holds a row."""
        self.rows.check_integrity()
        lost = set(self.rows.by_request) - set(finished_ids)
        assert not lost, f"rows are held by requests that are gone: {', '.join(sorted(lost))}"

    def drop_caches(self) -> None:
        """Free all rows and the arrays that steps change: the KV cache, the rows' arrays, the state of full sampling."""
        self.rows.clear()
        delete((self.caches, self.row_arrays))
        self._delete_consumers_arrays()
        self.caches = ()

    def _delete_consumers_arrays(self) -> None:
        self.sampling.delete_arrays()
        for consumer in self.consumers:
            consumer.delete_arrays()

    def _new_row_arrays(self) -> RowArrays:
        return self.put(jax.tree.map(lambda wanted: np.zeros(wanted.shape, wanted.dtype), self.shapes.rows))  # type: ignore[no-any-return]

    def warm_up(self) -> None:
        """Run the programs once on empty steps. From then on, compilations that a request waits for are counted."""
        keys = self.shapes.common_keys()
        if self._peers is None:
            for number in range(1, WARM_UP_RUNS + 1):
                with self.times.part(f"warm-up run {number}"):
                    self._run_on_nothing(keys)
        else:
            with self.times.part("warm-up runs"):
                self._peers.first_runs(partial(self._run_on_nothing, keys))
            self._peers.note(key for key in keys if self.shapes.uses_peers(key))
        self.programs.is_warm = True

    def _run_on_nothing(self, keys: Sequence[ProgramKey]) -> None:
        """Run programs on empty steps, which write nothing but trash, and wait until they are done."""
        for key in keys:
            program = self.programs.get(key)
            if key.kind == "decode":
                self._run_decode(key, self.batches.empty(self.shapes.layout(key)))
            if key.kind == "forward":
                layout = self.shapes.layout(key)
                buffer = self._send(layout, self.batches.empty(layout))
                self.caches, self.row_arrays, *_ = program(self.params, self.caches, self.row_arrays, buffer, self.workspace)
            if key.kind == "sample" and key.variant < Variant.MASKED:
                hidden_NWD, columns_NC = self.put(self.shapes.nothing_to_sample())
                self.row_arrays, *_ = program(
                    self.params, self.row_arrays, hidden_NWD, columns_NC, None, None, None, self.workspace
                )
            if key.kind == "propose":
                self.caches, self.row_arrays = program(
                    self.params, self.caches, self.row_arrays, *self.put(self.shapes.nothing_to_propose(key)), self.workspace
                )
        jax.block_until_ready((self.row_arrays, self.caches))

    @property
    def workspace(self) -> jax.Array | None:
        return None if self._peers is None else self._peers.workspace

    def program(self, key: ProgramKey) -> jax.stages.Compiled:
        """A compiled program. If devices wait for each other in kernels, its first runs happen while no other program runs."""
        program = self.programs.get(key)
        if self._peers is not None and not self._peers.knows(key):
            jax.block_until_ready((self.row_arrays, self.caches))
            if self.shapes.uses_peers(key):
                self._peers.first_runs(partial(self._run_on_nothing, [key]))
            self._peers.note([key])
        return program

    def delete_arrays(self) -> None:
        """Release all device memory, after the last program has been compiled."""
        self.programs.shutdown()
        if self._launcher is not None:
            self._launcher.shutdown()
        delete((self.params, self.caches, self.row_arrays, self._spacers))
        self._delete_consumers_arrays()
        if self._peers is not None:
            self._peers.delete_arrays()
            self._peers = None
        self.caches = ()

    def dispatch(self, plan: SchedulerOutput) -> PendingStep | LaunchingStep | MaskedStep:
        """Start a step and return at once. The device runs dispatched steps in order.

        A plan with masked requests gives a MaskedStep: call its `draw` to sample its tokens, before the next dispatch.
        """
        start = time.perf_counter()
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self.rows.remove(request_id)
        batch = self.batches.build(plan)
        pending: PendingStep | LaunchingStep | MaskedStep
        if plan.masked_request_ids:
            pending = self._dispatch_masked(batch)
        elif self._launcher is not None and batch.layout.num_rows <= MAX_THREAD_ROWS:
            pending = LaunchingStep(self._launcher.submit(partial(self._launch, batch)))
        else:
            if self._launcher is not None:
                self._launcher.drain()
            pending = self._launch(batch)
        self.num_steps += 1
        self.dispatch_seconds += time.perf_counter() - start
        return pending

    def _dispatch_masked(self, batch: Batch) -> MaskedStep:
        in_thread = self._launcher is not None and batch.layout.num_rows <= MAX_THREAD_ROWS
        forward = self._submit(partial(self._launch_forward, batch), in_thread=in_thread)

        def draw(mask_RW: np.ndarray) -> LaunchingStep:
            launched = self._submit(lambda: self._launch_sample(batch, forward.result(), mask_RW), in_thread=in_thread)
            return LaunchingStep(launched)

        return MaskedStep([row.data.request_id for row in batch.sampled], self.sampling.new_mask(batch), draw)

    def _submit(self, call: Callable[[], T], *, in_thread: bool) -> "Future[T]":
        """Run a call after all earlier launches, in the thread or in this one."""
        if self._launcher is not None and in_thread:
            return self._launcher.submit(call)
        if self._launcher is not None:
            self._launcher.drain()
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def wait(self) -> None:
        """Wait until the device has run all steps dispatched so far."""
        if self._launcher is not None:
            self._launcher.drain()
        jax.block_until_ready(self.row_arrays)

    def _launch(self, batch: Batch) -> PendingStep:
        start = time.perf_counter()
        if batch.is_decode:
            pending = self._decode(batch)
        else:
            pending = self._sample(batch, self._forward(batch), None)
        if self._on_gpu:  # a CPU's results are on the host already
            pending.start_copies()
        self.launch_seconds += time.perf_counter() - start
        return pending

    def _launch_forward(self, batch: Batch) -> _Forward:
        start = time.perf_counter()
        forward = self._forward(batch)
        self.launch_seconds += time.perf_counter() - start
        return forward

    def _launch_sample(self, batch: Batch, forward: _Forward, mask_RW: np.ndarray) -> PendingStep:
        start = time.perf_counter()
        pending = self._sample(batch, forward, mask_RW)
        if self._on_gpu:
            pending.start_copies()
        self.launch_seconds += time.perf_counter() - start
        return pending

    def _prepare(self, batch: Batch) -> dict[str, str]:
        """Send the state that the step's program relies on. Returns the requests that failed alone, with the reason."""
        if batch.extra_updates is not None:
            self._write_blocks(*batch.extra_updates)
        errors = dict(batch.errors)
        for row in batch.admitted:
            if row.needs_state:
                self.sampling.admit(row, errors)
            if self.shapes.shows_history and row.data.num_computed_tokens:
                self._show(row)
        return errors

    def _decode(self, batch: Batch) -> PendingStep:
        errors = self._prepare(batch)
        key = ProgramKey("decode", batch.layout.num_rows, batch.variant, width=batch.width)
        self.program(key)
        drawn = self._run_decode(key, batch.buffer)
        parts = [consumer.launch(work, None) for consumer, work in self._select(batch)]
        return PendingStep(drawn, [PendingTokens(batch.sampled, drawn, Scores(None, None)), *parts], errors)

    def _run_decode(self, key: ProgramKey, buffer: np.ndarray) -> jax.Array:
        sent = self._send(self.shapes.layout(key), buffer)
        self.caches, self.row_arrays, drawn = self.programs.get(key)(
            self.params, self.caches, self.row_arrays, sent, self.workspace
        )
        return drawn  # type: ignore[no-any-return]

    def _forward(self, batch: Batch) -> _Forward:
        work = self._select(batch)
        forward_key = ProgramKey("forward", batch.layout.num_tokens)
        expected = [forward_key, *([self.sampling.key(batch)] if batch.sampled else [])]
        expected += [key for consumer, part in work for key in consumer.keys(part, batch.layout.num_tokens)]
        if batch.sampled and batch.variant < NO_DECODE and batch.logprobs == LogprobsKind.NONE:
            # The next step's program, unless other requests arrive.
            num_rows, width = self.buckets.fit_decode(len(batch.sampled)), self._propose_width(batch)
            expected.append(ProgramKey("decode", num_rows, batch.variant, width=width))
        if self.shapes.functions.drafting is not None:
            expected.append(self._propose_key(batch))
        self.programs.expect(expected)
        errors = self._prepare(batch)
        forward = self.program(forward_key)
        self.caches, self.row_arrays, *results = forward(
            self.params, self.caches, self.row_arrays, self._send(batch.layout, batch.buffer), self.workspace
        )
        hidden = Hidden(*results)
        return _Forward(hidden, [consumer.launch(part, hidden) for consumer, part in work], errors)

    def _select(self, batch: Batch) -> list[tuple[HiddenConsumer, Any]]:
        """The consumers that have work in a step, with it."""
        return [(consumer, work) for consumer in self.consumers if (work := consumer.select(batch.chunks))]

    def _sample(self, batch: Batch, forward: _Forward, mask_RW: np.ndarray | None) -> PendingStep:
        hidden = forward.hidden
        tokens = [self.sampling.launch(batch, hidden, mask_RW)] if batch.sampled else []
        if hidden.for_drafter is not None:
            token_ids_T, features = hidden.for_drafter
            self.caches, self.row_arrays = self.program(self._propose_key(batch))(
                self.params,
                self.caches,
                self.row_arrays,
                hidden.hidden_TD,
                hidden.columns_NC,
                token_ids_T,
                features,
                self.workspace,
            )
        return PendingStep(tokens[0].drawn if tokens else hidden.columns_NC, [*tokens, *forward.parts], forward.errors)

    def _propose_key(self, batch: Batch) -> ProgramKey:
        """The program that shows a step to the drafter."""
        variant = min(batch.variant, Variant.RANDOM)
        return ProgramKey("propose", batch.layout.num_tokens, variant, width=self._propose_width(batch))

    def _propose_width(self, batch: Batch) -> int:
        return self.buckets.widths[-1] if batch.proposes else 1

    def _write_blocks(self, index: np.ndarray, block: np.ndarray) -> None:
        program = self.program(ProgramKey("write_blocks"))
        for first in range(0, len(index), UPDATES_PER_WRITE):
            part = slice(first, first + UPDATES_PER_WRITE)
            arrays = padded(index[part], block[part], UPDATES_PER_WRITE, padding=np.iinfo(np.int32).max)
            self.row_arrays = program(self.row_arrays, self.put(arrays))

    def _show(self, row: Row) -> None:
        """Show the cached prefix of a request to the drafter."""
        program, token_ids = self.program(ProgramKey("show")), row.data.token_ids
        for first in range(0, row.data.num_computed_tokens, TOKENS_PER_SHOW):
            part = token_ids[first : min(first + TOKENS_PER_SHOW, row.data.num_computed_tokens)]
            tokens = np.full(TOKENS_PER_SHOW, -1, np.int32)
            tokens[: len(part)] = part
            self.row_arrays = program(self.row_arrays, *self.put((np.array([row.index, first], np.int32), tokens)))

    def _send(self, layout: StepLayout, buffer: np.ndarray) -> Any:
        """A step's buffer in the form that its program takes."""
        if self._peers is not None:
            return self._peers.send(layout, buffer, self.batches.empty)
        # A program for one GPU that is called with a host array sends it in half the time of a device_put. A program for a CPU
        # would keep the array until after its results are ready, and abort a process that exits meanwhile.
        return buffer if self._on_one_gpu else self.put(buffer)

    def put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self.shapes.replicated)
