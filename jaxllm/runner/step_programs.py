"""The programs of one engine by key: their shapes, shardings and donations, and how each is traced."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cache_spec import CacheArray, CacheLayout, StateArray
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import spans_hosts
from jaxllm.parallel.axes import num_parts
from jaxllm.parallel.mesh import CONTEXT, TENSOR, context_size, tensor_size
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.expert_placement import ROUNDS
from jaxllm.runner.features.adapters import Adapters
from jaxllm.runner.features.drafts.step import Drafts
from jaxllm.runner.features.expert_counts import ExpertCounts
from jaxllm.runner.features.expert_slots import ExpertSlots
from jaxllm.runner.layout import NUM_ROW_COLUMNS, Column, StepLayout, decode_layout, mixed_layout
from jaxllm.runner.pooling_step import POOL_COLUMNS, add_up, pool
from jaxllm.runner.row_arrays import Caches, RowArrays
from jaxllm.runner.rows import NO_DECODE, LogprobsKind, sampled_by
from jaxllm.runner.split_program import Lowered, Pieces, split
from jaxllm.runner.step import StepFunctions
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.state import SamplingState, admit
from jaxllm.sampling.variants import Variant, needs_state
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxllm.scheduler_output import NO_ADAPTER
from pallas_kernels import collectives
from pallas_kernels.cache_write.bits import bits_type

_MAX_TRITON_ROWS = 16
"""Up to here XLA may multiply with Triton kernels of its own, which for 8 rows are the fastest."""
UPDATES_PER_WRITE = 1024
"""Block-table entries that one `write_blocks` sets."""
TOKENS_PER_SHOW = 1024
"""Tokens of a cached prefix that one `show` shows to the drafter."""


_FIRST_SIZES = {"forward": (128, 1024), "decode": (8, 64), "sample": (8,)}
"""Beside the largest: sizes of the programs that a start waits for, if those are few."""


class ProgramKey(NamedTuple):
    """Which program. `size` is tokens for forward, propose, prompt_logprobs and add_up, rows for decode, forward_rows, sample and
    pool."""

    kind: str
    size: int = 0
    variant: Variant = Variant.GREEDY
    logprobs: LogprobsKind = LogprobsKind.NONE
    width: int = 1
    """Tokens that a row may sample; in propose, 1 if no drafts are wanted."""
    adapted: bool = False
    """Whether rows may have adapters."""


@dataclass(frozen=True)
class StepPrograms:
    """Traces programs for arrays of these shapes."""

    functions: StepFunctions
    buckets: Buckets
    model: ModelConfig
    mesh: Mesh
    params: tuple[jax.ShapeDtypeStruct, ...]
    num_blocks: int
    max_blocks: int
    """Per request and group of layers."""
    layers: range
    """Those that are computed here: all, or those of a stage of a pipeline."""
    make_state: Callable[[], SamplingState]
    full_logprobs: bool
    """Whether full sampling alone reports logprobs."""
    in_pieces: bool = False
    """Whether programs whose layers share functions are compiled in pieces."""
    pieces: Pieces = field(default_factory=Pieces)
    """Of these."""

    @property
    def cache(self) -> CacheLayout:
        return self.functions.cache

    @property
    def num_updates(self) -> int:
        """Most new blocks of a row in a decode, in all groups of layers."""
        most_tokens = self.functions.latest.width + self.functions.latest.num_lookahead
        return len(self.cache.groups) * -(-most_tokens // self.cache.block_size)

    @property
    def is_first(self) -> bool:
        """Whether no stage of a pipeline comes before."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage follows: tokens are sampled here, and vectors pooled."""
        return self.layers.stop == self.model.num_layers

    @property
    def _drafts(self) -> Drafts | None:
        return self.functions.find(Drafts)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def everywhere(self) -> NamedSharding:
        """The same on all devices, also of several lanes."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_heads(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, TENSOR))

    @property
    def by_heads_and_slots(self) -> NamedSharding:
        """Of arrays [blocks, heads, slots of a block, width]: devices that split tokens have some slots of each block."""
        if context_size(self.mesh) == 1:
            return self.by_heads
        return NamedSharding(self.mesh, PartitionSpec(None, TENSOR, CONTEXT))

    def all_keys(self) -> list[ProgramKey]:
        """Every program that traffic can reach."""
        return [*self.common_keys(), *self.rare_keys()]

    def keys_by_use(self) -> list[ProgramKey]:
        """Every program, what the first requests need first: common ones before rare ones, few tokens and rows before many."""
        return [*sorted(self.common_keys(), key=lambda key: key.size), *self.rare_keys()]

    def start_keys(self) -> list[ProgramKey]:
        """Every common program, and what allocates the caches."""
        return [*self.common_keys(), ProgramKey("new_caches")]

    def first_keys(self) -> list[ProgramKey]:
        """Those of `start_keys` that can run every common step, if not each in the fastest way (`ProgramChoice`)."""
        sizes = {"forward": self.buckets.tokens, "decode": self.buckets.decode_rows, "sample": self.buckets.sample_rows}
        first = {kind: {_fit(sizes[kind], size) for size in _FIRST_SIZES[kind]} | {sizes[kind][-1]} for kind in sizes}

        def is_first(key: ProgramKey) -> bool:
            return key.kind not in first or (
                key.size in first[key.kind] and (key.kind == "forward" or key.variant > Variant.GREEDY)
            )

        return list(filter(is_first, self.start_keys()))

    def keys_after_first(self) -> list[ProgramKey]:
        """The others: few tokens and rows before many, and last what `first_keys` does about as fast, greedy draws."""
        first = set(self.first_keys())
        others = (key for key in self.start_keys() if key not in first)
        return sorted(others, key=lambda key: (key.kind != "forward" and key.variant == Variant.GREEDY, key.size))

    def keys_of(self, params: SamplingParams, pooling: PoolingParams | None, *, is_masked: bool) -> list[ProgramKey]:
        """The rare programs that the steps of such a request may run, small ones first."""
        variant, logprobs = sampled_by(params, full_logprobs=self.full_logprobs, is_masked=is_masked)
        is_apart = variant >= NO_DECODE or logprobs != LogprobsKind.NONE
        if pooling is None and not is_apart and params.prompt_logprobs is None:
            return []
        needed = {
            "forward_rows": is_apart,
            "drafts": is_masked,
            "new_state": needs_state(params),
            "admit": needs_state(params),
            "prompt_logprobs": params.prompt_logprobs is not None,
        }

        def is_needed(key: ProgramKey) -> bool:
            if pooling is not None:
                return key.kind in ("pool", "add_up")
            return (key.variant, key.logprobs) == (variant, logprobs) if key.kind == "sample" else needed.get(key.kind, False)

        return sorted(filter(is_needed, self.rare_keys()), key=lambda key: key.size)

    def common_keys(self) -> list[ProgramKey]:
        """What almost every request needs, the slowest to compile first."""
        buckets, simple = self.buckets, (Variant.GREEDY, Variant.RANDOM)
        adapted, adapted_heads = self.adapted_steps, self._adapted_heads
        forward = [ProgramKey("forward", size, adapted=has) for size in reversed(buckets.tokens) for has in adapted]
        writes = [
            ProgramKey("write_blocks"),
            *([ProgramKey("write_adapter")] if self.has_adapters else []),
            *self.experts_keys(),
        ]
        if not self.is_last:
            decode_rows = reversed(buckets.decode_rows if self.model.generates else ())
            return [*forward, *(ProgramKey("decode", size, adapted=has) for size in decode_rows for has in adapted), *writes]
        if not self.model.generates:
            return [*forward, *self._pooling_keys(), *writes]
        return [
            *forward,
            *(
                ProgramKey("decode", size, variant, width=width, adapted=has)
                for size in reversed(buckets.decode_rows)
                for variant in simple
                for width in buckets.widths_of(size)
                for has in adapted
            ),
            *(
                ProgramKey("sample", size, variant, width=width, adapted=has)
                for size in reversed(buckets.sample_rows)
                for variant in simple
                for width in buckets.widths_of(size)
                for has in adapted_heads
            ),
            *(
                ProgramKey("propose", size, variant, width=width)
                for size in reversed(buckets.tokens)
                for variant in simple
                for width in buckets.widths
                if self._drafts is not None
            ),
            *([ProgramKey("show")] if self.shows_history else []),
            *writes,
        ]

    def experts_keys(self) -> list[ProgramKey]:
        """What reads the tokens of experts, if they are counted, and what moves experts, if they move."""
        takes = [] if self.functions.find(ExpertCounts) is None else [ProgramKey("take_expert_tokens")]
        placing = self.functions.find(ExpertSlots)
        return takes if placing is None else [*takes, *dict.fromkeys(map(self.moving_key, placing.leaves))]

    def moving_key(self, layer: int) -> ProgramKey:
        """The program that moves a layer's experts: its size is the first layer with arrays of these shapes."""
        placing = self.functions.get(ExpertSlots)
        shapes = {
            i: [(self.params[leaf].shape, self.params[leaf].dtype) for leaf in leaves] for i, leaves in placing.leaves.items()
        }
        return ProgramKey("move_experts", next(i for i in shapes if shapes[i] == shapes[layer]))

    @property
    def shows_history(self) -> bool:
        """Whether the drafter must be shown the tokens of cached prefixes."""
        drafting = self._drafts
        return drafting is not None and drafting.drafter.needs_history

    def rare_keys(self) -> list[ProgramKey]:
        """What only some requests ask for: grammars, the full sampler, logprobs, vectors."""
        buckets, adapted_heads = self.buckets, self._adapted_heads
        if not self.model.generates or not self.is_last:
            return []
        return [
            *(ProgramKey("forward_rows", size, adapted=has) for size in buckets.rows_apart for has in self.adapted_steps),
            *(
                ProgramKey("sample", size, Variant.MASKED, width=width, adapted=has)
                for size in buckets.sample_rows
                for width in buckets.widths_of(size)
                for has in adapted_heads
            ),
            *(
                ProgramKey("sample", size, variant, kind, width, has)
                for size in buckets.sample_rows
                for variant in (Variant.RANDOM, Variant.MASKED)
                for kind in (LogprobsKind.TOP, LogprobsKind.NAMED)
                for width in buckets.widths_of(size)
                for has in adapted_heads
                if not self.full_logprobs
            ),
            *([] if self._drafts is None else [ProgramKey("drafts")]),
            *self._pooling_keys(),
            ProgramKey("new_state"),
            ProgramKey("admit"),
            *(
                ProgramKey("sample", size, Variant.FULL, kind, width, has)
                for size in buckets.sample_rows
                for kind in LogprobsKind
                for width in buckets.widths_of(size)
                for has in adapted_heads
            ),
            *(ProgramKey("prompt_logprobs", size, adapted=has) for size in buckets.tokens for has in adapted_heads),
        ]

    @property
    def has_adapters(self) -> bool:
        """Whether adapters may change what is computed here."""
        return self.functions.find(Adapters) is not None

    @property
    def adapted_steps(self) -> tuple[bool, ...]:
        """The values of `adapted` of programs that run layers."""
        return (False, True) if self.has_adapters else (False,)

    @property
    def adapts_logits(self) -> bool:
        """Whether adapters change logits not only by the hidden states."""
        adapters = self.functions.find(Adapters)
        return adapters is not None and adapters.changes_logits

    @property
    def _adapted_heads(self) -> tuple[bool, ...]:
        """The values of `adapted` of programs that compute logits of hidden states."""
        return (False, True) if self.adapts_logits else (False,)

    def _pooling_keys(self) -> list[ProgramKey]:
        """What makes one vector of a prompt. Vectors of tokens need no program: their hidden states are read as they are."""
        is_mean = self.model.pooling.pooling_type == "mean"
        sums = [ProgramKey("add_up", size) for size in self.buckets.tokens] if is_mean else []
        return [*sums, *(ProgramKey("pool", size) for size in self.buckets.sample_rows)]

    def is_storable(self, key: ProgramKey) -> bool:
        """Whether another process may use the program: not if a custom logits processor is compiled into it or shapes its state."""
        has_processors = key.variant == Variant.FULL or key.kind in ("new_state", "admit")
        return not (self.functions.processors and has_processors)

    def uses_peers(self, key: ProgramKey) -> bool:
        """Whether devices wait for each other inside the program's kernels. Its first runs must then be silent
        (`Communicator.first_runs`), so those are the programs of every engine, which are there before the first request."""
        is_early = key.variant < Variant.MASKED and key.logprobs == LogprobsKind.NONE
        return self.workspace is not None and (
            key.kind in ("forward", "forward_rows", "decode", "propose") or (key.kind == "sample" and is_early)
        )

    def nothing_to_sample(self) -> tuple[np.ndarray, np.ndarray]:
        """hidden_NWD and columns_NC of a step without requests."""
        columns_NC = np.zeros((self.buckets.max_rows, NUM_ROW_COLUMNS), np.int32)
        columns_NC[:, [Column.ROW, Column.TOKEN_ROW]] = self.buckets.max_rows
        columns_NC[:, Column.ADAPTER] = NO_ADAPTER
        return np.zeros(self._sampled_shape, jnp.dtype(self.model.dtype)), columns_NC

    def nothing_to_propose(self, key: ProgramKey) -> tuple[Any, ...]:
        """What `propose` takes of a step without requests."""
        assert self._drafts is not None
        hidden_TD = np.zeros((key.size, self.model.hidden_size), jnp.dtype(self.model.dtype))
        features = (hidden_TD,) * len(self._drafts.drafter.feature_layers)
        return hidden_TD, self.nothing_to_sample()[1], np.zeros(key.size, np.int32), features

    @property
    def _sampled_shape(self) -> tuple[int, int, int]:
        return self.buckets.max_rows, self.buckets.widths[-1], self.model.hidden_size

    def layout(self, key: ProgramKey) -> StepLayout:
        """The step buffer of a program that computes layers."""
        if key.kind in ("decode", "forward_rows"):
            return decode_layout(key.size, self.num_updates)
        return mixed_layout(key.size, self.buckets.rows_for_tokens(key.size), self.cache.block_size, len(self.cache.groups))

    def compiler_options(self, key: ProgramKey) -> dict[str, str | bool]:
        """XLA's compiler options for a program.

        Products of more than a few rows go to cuBLAS alone: it adds the residual in passing, and a Triton product, which is
        chosen by timing beside other work, is now and then far slower (13 ms instead of 0.4 for the head at 256 rows, measured).
        All-reduces that are left to XLA go to NCCL: XLA's own kernel for them keeps buffers outside of JAX's memory pool for
        each all-reduce of each program (13 GiB with the programs of Llama-3.1-8B, measured), for which nothing is left, and is
        no faster.
        Products of the same input are not merged: XLA would copy the weights of both side by side in every step. In a large step of
        several devices one run of tokens is multiplied while another is added up (`Shards.num_runs`): XLA must not merge these
        products either, and must look for what it can compute during an all-reduce.
        What adapters change does not depend on the product that it is added to: on one device, nodes of a CUDA graph that do not
        depend on each other run beside each other.
        """
        if self.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
            return {}
        options: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "0"}
        if key.size > _MAX_TRITON_ROWS:
            options["xla_gpu_enable_triton_gemm"] = False
        if self.mesh.size > 1 and key.kind == "forward":
            options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if self.mesh.size > 1 and jax.__version_info__ >= (0, 11):
            options["xla_gpu_experimental_use_collective_kernels"] = ""
        if spans_hosts(self.mesh):
            # Hosts that share this work wait for each other, and may compile different programs at a time.
            options["xla_gpu_shard_autotuning"] = False
        if key.adapted and self.mesh.size == 1:
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        return options

    def lower(self, key: ProgramKey) -> Lowered:
        """Trace one program."""
        return getattr(self, f"_lower_{key.kind}")(key)

    def _lower_on_each(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], out: Any, *, donate: tuple[int, ...]
    ) -> Lowered:
        """Trace a function that each device runs on its own parts of the arrays. out: shardings of the results."""
        if self.mesh.size > 1:
            in_specs = jax.tree.map(lambda argument: argument.sharding.spec, arguments)
            out_specs = jax.tree.map(lambda sharding: sharding.spec, out)
            function = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        traced = jax.jit(function, donate_argnums=donate, out_shardings=out).trace(*arguments)
        if self.in_pieces:
            donated = [index in donate for index, argument in enumerate(arguments) for _ in jax.tree.leaves(argument)]
            if (in_pieces := split(traced, donated, self.replicated, self.pieces)) is not None:
                return in_pieces
        return traced.lower()

    def step_arguments(self, layout: StepLayout) -> tuple[Any, ...]:
        """What the programs forward and decode take, but for what enters a later stage of a pipeline."""
        return self.params, self._caches, self.rows, self._buffer(layout), self.workspace

    def entering(self, layout: StepLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What they take besides: of a later stage the sum of embedding and all earlier layers, [T, D]."""
        return () if self.is_first else (self._shape((layout.num_tokens, self.model.hidden_size), self.model.dtype),)

    def _lower_pass_on(self, key: ProgramKey) -> Lowered:
        layout, width = self.layout(key), 1 if key.kind == "decode" else None
        arguments = (*self.step_arguments(layout), *self.entering(layout))
        out = (self._cache_shardings, self.replicated, self.replicated)
        return self._lower_on_each(partial(self.functions.pass_on, layout, width, key.adapted), arguments, out, donate=(1, 2))

    def _lower_forward(self, key: ProgramKey) -> Lowered:
        if not self.is_last:
            return self._lower_pass_on(key)
        layout, same = self.layout(key), self.replicated
        arguments = (*self.step_arguments(layout), *self.entering(layout))
        out = (self._cache_shardings, same, same, same, same, *([same] if self._drafts is not None else []))
        return self._lower_on_each(partial(self.functions.forward, layout, key.adapted), arguments, out, donate=(1, 2))

    def _lower_forward_rows(self, key: ProgramKey) -> Lowered:
        layout, same = self.layout(key), self.replicated
        arguments = (*self.step_arguments(layout), *self.entering(layout))
        out = (self._cache_shardings, same, same, same, same)
        return self._lower_on_each(partial(self.functions.forward_rows, layout, key.adapted), arguments, out, donate=(1, 2))

    def _lower_decode(self, key: ProgramKey) -> Lowered:
        if not self.is_last:
            return self._lower_pass_on(key)
        layout, same = self.layout(key), self.replicated
        arguments = (*self.step_arguments(layout), *self.entering(layout))
        out = (self._cache_shardings, same, same)
        return self._lower_on_each(
            partial(self.functions.decode, layout, key.variant, key.width, key.adapted), arguments, out, donate=(1, 2)
        )

    def _lower_sample(self, key: ProgramKey) -> Lowered:
        max_rows = self.buckets.max_rows
        state = self._state if key.variant == Variant.FULL else None
        named_ids = self._ints(key.size, MAX_LOGPROB_TOKEN_IDS) if key.logprobs == LogprobsKind.NAMED else None
        mask = (
            self._ints(key.size * key.width, num_words(self.model.padded_vocab_size)) if key.variant >= Variant.MASKED else None
        )
        function = partial(self.functions.sample, key.size, key.variant, key.logprobs, key.width, key.adapted)
        hidden_NWD = self._shape(self._sampled_shape, self.model.dtype)
        columns_NC = self._ints(max_rows, NUM_ROW_COLUMNS)
        arguments = (self.params, self.rows, hidden_NWD, columns_NC, state, named_ids, mask, self.workspace)
        return self._lower_on_each(function, arguments, self.replicated, donate=(1, 4))

    def _lower_propose(self, key: ProgramKey) -> Lowered:
        assert self._drafts is not None
        hidden_TD = self._shape((key.size, self.model.hidden_size), self.model.dtype)
        features = (hidden_TD,) * len(self._drafts.drafter.feature_layers)
        columns_NC = self._ints(self.buckets.max_rows, NUM_ROW_COLUMNS)
        step = (hidden_TD, columns_NC, self._ints(key.size), features)
        arguments = (self.params, self._caches, self.rows, *step, self.workspace)
        function = partial(self._drafts.propose_apart, self.functions, key.size, key.variant, key.width)
        return self._lower_on_each(function, arguments, (self._cache_shardings, self.replicated), donate=(1, 2))

    def _lower_prompt_logprobs(self, key: ProgramKey) -> Lowered:
        hidden_TD = self._shape((key.size, self.model.hidden_size), self.model.dtype)
        adapter_slot = self._ints() if key.adapted else None
        arguments = (self.params, hidden_TD, self._ints(2, self.buckets.scored_positions), adapter_slot)
        return self._lower_on_each(self.functions.prompt_logprobs, arguments, self.replicated, donate=())

    def _lower_pool(self, key: ProgramKey) -> jax.stages.Lowered:
        is_mean = self.model.pooling.pooling_type == "mean"
        sums = self._shape((self.buckets.max_rows, self.model.hidden_size), jnp.float32)
        source = sums if is_mean else self._shape(self._sampled_shape, self.model.dtype)
        return jax.jit(pool, out_shardings=self.replicated).lower(source, self._ints(key.size, POOL_COLUMNS))

    def _lower_add_up(self, key: ProgramKey) -> jax.stages.Lowered:
        num_rows, width = self.buckets.max_rows, self.model.hidden_size
        sums_ND, hidden_TD = self._shape((num_rows, width), jnp.float32), self._shape((key.size, width), self.model.dtype)
        program = jax.jit(add_up, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(sums_ND, hidden_TD, self._ints(key.size + num_rows))

    def _lower_write_blocks(self, key: ProgramKey) -> jax.stages.Lowered:
        program = jax.jit(self.functions.write_blocks, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(self.rows, self._ints(2, UPDATES_PER_WRITE))

    def _lower_take_expert_tokens(self, key: ProgramKey) -> jax.stages.Lowered:
        program = jax.jit(self.functions.get(ExpertCounts).take, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(self.rows)

    def _lower_move_experts(self, key: ProgramKey) -> Lowered:
        placing = self.functions.get(ExpertSlots)
        arrays = tuple(self.params[leaf] for leaf in placing.leaves[key.size])
        out = tuple(array.sharding for array in arrays)
        moves = jax.ShapeDtypeStruct(self.no_moves(key.size).shape, jnp.int32, sharding=self.everywhere)
        # Nothing is donated: the steps in flight read the arrays, and a failure must not lose them.
        return self._lower_on_each(partial(placing.move, out[0].spec[0]), (arrays, arrays, moves), out, donate=())

    def no_moves(self, layer: int) -> np.ndarray:
        """The plan of as many rounds of moves as one run of the program has, in which a layer's experts stay where they are."""
        placing, num_devices = self.functions.get(ExpertSlots), num_parts(("split_experts",), self.mesh.shape)
        moves_2RN = np.zeros((2, ROUNDS, num_devices), np.int32)
        moves_2RN[1] = self.params[placing.leaves[layer][0]].shape[0] // num_devices
        return moves_2RN

    def _lower_write_adapter(self, key: ProgramKey) -> Lowered:
        adapting = self.functions.get(Adapters)
        arrays = self.params[adapting.part]
        out = tuple(array.sharding for array in arrays)
        return self._lower_on_each(adapting.write, (arrays, self.packed_adapter, self._ints()), out, donate=(0,))

    @property
    def packed_adapter(self) -> jax.ShapeDtypeStruct:
        """One adapter: each device's part of its arrays, one after the other."""
        adaptation = self.functions.get(Adapters).adaptation
        by_device = NamedSharding(self.mesh, PartitionSpec(TENSOR))
        return jax.ShapeDtypeStruct(
            (tensor_size(self.mesh), adaptation.packed_size), jnp.dtype(adaptation.dtype), sharding=by_device
        )

    def _lower_show(self, key: ProgramKey) -> jax.stages.Lowered:
        drafting = self._drafts
        assert drafting is not None
        program = jax.jit(drafting.show, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(self.rows, self._ints(2), self._ints(TOKENS_PER_SHOW))

    def _lower_drafts(self, key: ProgramKey) -> jax.stages.Lowered:
        """A copy, which stays when the next program takes the rows."""
        return jax.jit(jnp.copy, out_shardings=self.replicated).lower(self.rows.drafts.draft_NK)

    def _lower_new_state(self, key: ProgramKey) -> jax.stages.Lowered:
        return jax.jit(self.make_state, out_shardings=self.replicated).lower()

    def _lower_new_caches(self, key: ProgramKey) -> jax.stages.Lowered:
        def make_caches() -> Caches:
            return tuple(jnp.zeros(cache.shape, cache.dtype) for cache in self._caches)

        return jax.jit(make_caches, out_shardings=self._cache_shardings).lower()

    def _lower_admit(self, key: ProgramKey) -> jax.stages.Lowered:
        num_words = sum(math.prod(array.shape[1:]) for array in jax.tree.leaves(self._state))
        program = jax.jit(admit, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(self._state, self._ints(), self._ints(num_words))

    @property
    def workspace(self) -> jax.ShapeDtypeStruct | None:
        """What the devices exchange through; None if that is left to XLA."""
        if tensor_size(self.mesh) == 1 or self.functions.kernels.collectives == "xla":
            return None
        shape = (tensor_size(self.mesh), collectives.WORKSPACE_BYTES // 4)
        return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=NamedSharding(self.mesh, PartitionSpec(TENSOR)))

    @property
    def _state(self) -> Any:
        return jax.tree.map(lambda x: self._shape(x.shape, x.dtype), jax.eval_shape(self.make_state))

    @property
    def _caches(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        as_bits = self.mesh.devices.flat[0].platform == "cpu" and not self.functions.kernels.interpret

        def blocks(array: CacheArray) -> jax.ShapeDtypeStruct:
            shape = (self.num_blocks, array.num_heads, self.cache.block_size, array.width)
            dtype = jnp.dtype(array.dtype)
            return jax.ShapeDtypeStruct(shape, bits_type(dtype) if as_bits else dtype, sharding=self.by_heads_and_slots)

        def rows(array: StateArray) -> jax.ShapeDtypeStruct:
            shape = (self.buckets.max_rows + 1, array.num_heads, *array.shape)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=self.by_heads)

        return (*map(blocks, self.cache.arrays), *map(rows, self.cache.states))

    @property
    def _cache_shardings(self) -> tuple[NamedSharding, ...]:
        return (self.by_heads_and_slots,) * len(self.cache.arrays) + (self.by_heads,) * len(self.cache.states)

    @property
    def rows(self) -> Any:
        num_rows = self.buckets.max_rows + 1
        table = self._ints(num_rows, len(self.cache.groups) * self.max_blocks)
        parts: dict[str, Any] = {}
        for feature in (self.functions.latest, *self.functions.features):
            parts |= feature.row_arrays(num_rows)
        parts = jax.tree.map(lambda x: self._shape(x.shape, x.dtype), parts)
        return RowArrays(self._ints(num_rows), table, **parts)  # type: ignore[arg-type]

    def _buffer(self, layout: StepLayout) -> jax.ShapeDtypeStruct:
        """A step's buffer; of devices that exchange through their memory the first has it, and gives it to the others."""
        if self.workspace is None:
            return self._ints(layout.size)
        return jax.ShapeDtypeStruct((tensor_size(self.mesh), layout.size), jnp.int32, sharding=self.workspace.sharding)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._shape(shape, jnp.int32)

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)


def _fit(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of the sizes that holds what is wanted, or the largest."""
    return next((size for size in sizes if size >= wanted), sizes[-1])
