"""The programs of one engine by key: which there are, and the shapes, shardings and donations of their arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cache_spec import CacheArray, CacheLayout, StateArray
from jaxllm.foreseen import Needs
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.across_hosts import spans_hosts
from jaxllm.parallel.mesh import CONTEXT, TENSOR, context_size, tensor_size
from jaxllm.parallel.ranks import Ranks
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.layout import Column, StepLayout
from jaxllm.runner.programs.decode import Decode
from jaxllm.runner.programs.forward import Forward
from jaxllm.runner.programs.forward_rows import ForwardRows
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.programs.new_caches import NewCaches
from jaxllm.runner.programs.pass_on import PassOnDecode, PassOnMixed
from jaxllm.runner.programs.sample import Sample
from jaxllm.runner.programs.sampling_state import Admit, NewState
from jaxllm.runner.programs.write_blocks import WriteBlocks
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.split_program import Lowered, Pieces, split
from jaxllm.runner.step import StepFunctions
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.variants import Variant
from jaxllm.scheduler_output import NO_ADAPTER
from pallas_kernels import collectives
from pallas_kernels.cache_write.bits import bits_type

_CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
"""XLA's for a CPU whose products widen weights in registers: with AVX-512, its default of 256 bits takes a fifth longer for them."""


@cache
def _is_known(option: str, value: str | bool) -> bool:
    """Whether this XLA has a compiler option; it refuses programs with others."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


@dataclass(frozen=True)
class StepPrograms:
    """Traces programs for arrays of these shapes.

    With data-parallel ranks each program is one of all ranks, which takes and returns joint arrays (`Ranks`): a step takes as long as
    its slowest rank in any case.
    """

    functions: StepFunctions
    buckets: Buckets
    model: ModelConfig
    mesh: Mesh
    params: tuple[jax.ShapeDtypeStruct, ...]
    num_blocks: int
    max_blocks: int
    """Per request and group of layers."""
    layers: range
    """Layers that are computed here: all, or those of a stage of a pipeline."""
    make_state: Callable[[], SamplingState]
    full_logprobs: bool
    """Whether full sampling alone reports logprobs."""
    in_pieces: bool = False
    """Whether programs whose layers share functions are compiled in pieces."""
    pieces: Pieces = field(default_factory=Pieces)
    """The compiled pieces of these programs."""

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

    @cached_property
    def ranks(self) -> Ranks:
        """The data-parallel ranks of the mesh."""
        return Ranks(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """Replicated on all devices of a rank."""
        return NamedSharding(self.mesh, PartitionSpec() if self.ranks.axis is None else PartitionSpec(self.ranks.axis))

    @property
    def everywhere(self) -> NamedSharding:
        """Replicated on all devices of all ranks."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_heads(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.ranks.axis, TENSOR))

    @property
    def by_heads_and_slots(self) -> NamedSharding:
        """Sharding of arrays [blocks, heads, slots of a block, width]: devices that split tokens have some slots of each block."""
        if context_size(self.mesh) == 1:
            return self.by_heads
        return NamedSharding(self.mesh, PartitionSpec(self.ranks.axis, TENSOR, CONTEXT))

    @cached_property
    def kinds(self) -> dict[str, ProgramKind]:
        """The kinds of programs by name: those that compute layers, those of features, and those that every engine has."""
        layers: list[ProgramKind] = [PassOnMixed(), PassOnDecode()]
        if self.is_last:
            sampled = [ForwardRows(), Decode(), Sample(), NewState(), Admit()] if self.model.generates else []
            layers = [Forward(), *sampled]
        own = [kind for feature in self.functions.features for kind in feature.programs()]
        return {kind.name: kind for kind in (*layers, *own, WriteBlocks(), NewCaches())}

    def kind_of(self, key: ProgramKey) -> ProgramKind:
        return self.kinds[key.kind]

    def all_keys(self) -> list[ProgramKey]:
        """Every program that traffic can reach."""
        return [*self.common_keys(), *self.rare_keys()]

    def keys_by_use(self) -> list[ProgramKey]:
        """Every program, what the first requests need first: common ones before rare ones, few tokens and rows before many."""
        return [*sorted(self.common_keys(), key=lambda key: key.size), *self.rare_keys()]

    def start_keys(self) -> list[ProgramKey]:
        """Every common program, and what the start itself runs."""
        return [*self.common_keys(), *(key for kind in self.kinds.values() for key in kind.at_start(self))]

    def first_keys(self) -> list[ProgramKey]:
        """The programs of `start_keys` that can run every common step, if not each in the fastest way (`ProgramChoice`)."""
        return [key for key in self.start_keys() if self.kind_of(key).is_first(self, key)]

    def keys_after_first(self) -> list[ProgramKey]:
        """The others: few tokens and rows before many, and last what `first_keys` does about as fast, greedy draws."""
        first = set(self.first_keys())
        others = (key for key in self.start_keys() if key not in first)
        return sorted(others, key=lambda key: (self.kind_of(key).draws and key.variant == Variant.GREEDY, key.size))

    def wanted_by(self, needs: Needs) -> Wanted:
        """The programs that such a request needs."""
        wanted, items = Wanted.of(needs, full_logprobs=self.full_logprobs), needs.items
        if not items:
            return wanted
        num_tokens = self.buckets.fit_tokens(min(items[-1].end, self.buckets.tokens[-1]))
        return replace(wanted, items=items, features=self.inputs.of_items(items), num_tokens=num_tokens)

    def awaited_keys(self, wanted: Wanted) -> list[Sequence[ProgramKey]]:
        """Programs that such a request waits for before it runs: one of each sequence (`ProgramKind.awaited`)."""
        return [keys for kind in self.kinds.values() for keys in kind.awaited(self, wanted)]

    def keys_of(self, wanted: Wanted) -> list[ProgramKey]:
        """The rare programs that the steps of such a request may run, small ones first."""
        found = (key for key in self.rare_keys() if self.kind_of(key).is_needed(key, wanted))
        return sorted(found, key=lambda key: key.size)

    def common_keys(self) -> list[ProgramKey]:
        """Programs that almost every request needs, the slowest to compile first."""
        return [key for kind in self.kinds.values() for key in kind.common(self)]

    def rare_keys(self) -> list[ProgramKey]:
        """Programs that only some requests need: grammars, the full sampler, logprobs, vectors."""
        found = ((kind.rank(key), key) for kind in self.kinds.values() for key in kind.rare(self))
        return [key for _, key in sorted(found, key=lambda ranked: ranked[0])]

    @property
    def inputs(self) -> FeatureInputs:
        """The needs of the features."""
        return self.functions.inputs

    def is_storable(self, key: ProgramKey) -> bool:
        """Whether another process may use the program."""
        return self.kind_of(key).is_storable(self, key)

    def uses_peers(self, key: ProgramKey) -> bool:
        """Whether devices wait for each other inside the program's kernels. Its first runs must then be silent
        (`Communicator.first_runs`), so those are the programs of every engine, which are there before the first request."""
        return self.workspace is not None and self.kind_of(key).uses_peers(key)

    def nothing_to_sample(self) -> tuple[np.ndarray, np.ndarray]:
        """hidden_NWD and columns_NC of a step without requests, of all ranks."""
        columns_NC = np.zeros((self.buckets.max_rows, self.inputs.num_columns), np.int32)
        columns_NC[:, [Column.ROW, Column.TOKEN_ROW]] = self.buckets.max_rows
        columns_NC[:, Column.ADAPTER] = NO_ADAPTER
        hidden_NWD = np.zeros(self.sampled_shape, jnp.dtype(self.model.dtype))
        return self.ranks.repeated(hidden_NWD), self.ranks.repeated(columns_NC)

    @property
    def sampled_shape(self) -> tuple[int, int, int]:
        return self.buckets.max_rows, self.buckets.widths[-1], self.model.hidden_size

    def compiler_options(self, key: ProgramKey) -> dict[str, str | bool]:
        """XLA's compiler options for a program.

        The policy has those that depend on the program's size.
        All-reduces that are left to XLA go to NCCL: XLA's own kernel for them keeps buffers outside of JAX's memory pool for
        each all-reduce of each program (13 GiB with the programs of Llama-3.1-8B, measured), for which nothing is left, and is
        no faster.
        Products of the same input are not merged: XLA would copy the weights of both side by side in every step. Nor must those be
        that are multiplied while others are added up (`Shards.num_runs`).
        """
        if self.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
            wanted = _CPU_OPTIONS if self.model.widens_in_products else {}
            return {option: value for option, value in wanted.items() if _is_known(option, value)}
        options = {"xla_gpu_dot_merger_threshold_mb": "0", **self.buckets.policy.compiler_options(key.size)}
        if self.mesh.size > 1 and jax.__version_info__ >= (0, 11):
            options["xla_gpu_experimental_use_collective_kernels"] = ""
        if spans_hosts(self.mesh):
            # Hosts that share this work wait for each other, and may compile different programs at a time.
            options["xla_gpu_shard_autotuning"] = False
        for feature in self.functions.features:
            options |= feature.compiler_options(self.mesh, key)
        return options | self.kind_of(key).compiler_options(self, key)

    def lower(self, key: ProgramKey) -> Lowered:
        """Trace one program."""
        return self.kind_of(key).lower(self, key)

    def lower_on_each(
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

    def lower_on_ranks(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], *, donate: tuple[int, ...] = ()
    ) -> Lowered:
        """Trace a function that needs no mesh: all devices of a rank compute the same."""
        if self.ranks.num > 1:
            return self.lower_on_each(function, arguments, self.replicated, donate=donate)
        return jax.jit(function, donate_argnums=donate, out_shardings=self.replicated).lower(*arguments)

    def step_arguments(self, layout: StepLayout) -> tuple[Any, ...]:
        """Arguments of the programs forward and decode, except for those that enter a later stage of a pipeline."""
        return self.params, self.caches, self.rows, self._buffer(layout), self.workspace

    def entering(self, layout: StepLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Further arguments of a later stage: the sum of embedding and all earlier layers, [T, D]."""
        return () if self.is_first else (self.shape((layout.num_tokens, self.model.hidden_size), self.model.dtype),)

    @property
    def workspace(self) -> jax.ShapeDtypeStruct | None:
        """The workspace that the devices exchange through; None if XLA exchanges."""
        if tensor_size(self.mesh) == 1 or self.functions.kernels.collectives == "xla":
            return None
        shape = (tensor_size(self.mesh), collectives.WORKSPACE_BYTES // 4)
        return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=NamedSharding(self.mesh, PartitionSpec(TENSOR)))

    @property
    def sampling_state(self) -> Any:
        return jax.tree.map(lambda x: self.shape(x.shape, x.dtype), jax.eval_shape(self.make_state))

    @property
    def caches(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        as_bits = self.mesh.devices.flat[0].platform == "cpu" and not self.functions.kernels.interpret

        def blocks(array: CacheArray) -> jax.ShapeDtypeStruct:
            shape = self.ranks.shape((self.num_blocks, array.num_heads, self.cache.block_size, array.width))
            dtype = jnp.dtype(array.dtype)
            return jax.ShapeDtypeStruct(shape, bits_type(dtype) if as_bits else dtype, sharding=self.by_heads_and_slots)

        def rows(array: StateArray) -> jax.ShapeDtypeStruct:
            shape = self.ranks.shape((self.buckets.num_rows, array.num_heads, *array.shape))
            return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=self.by_heads)

        return (*map(blocks, self.cache.arrays), *map(rows, self.cache.states))

    @property
    def cache_shardings(self) -> tuple[NamedSharding, ...]:
        return (self.by_heads_and_slots,) * len(self.cache.arrays) + (self.by_heads,) * len(self.cache.states)

    @property
    def rows(self) -> Any:
        num_rows = self.buckets.num_rows
        table = self.ints(num_rows, len(self.cache.groups) * self.max_blocks)
        parts: dict[str, Any] = {}
        for feature in self.functions.features:
            parts |= feature.row_arrays(self.buckets)
        parts = jax.tree.map(lambda x: self.shape(x.shape, x.dtype), parts)
        return RowArrays(self.ints(num_rows), table, parts)  # type: ignore[arg-type]

    def _buffer(self, layout: StepLayout) -> jax.ShapeDtypeStruct:
        """A step's buffer; of devices that exchange through their memory the first has it, and gives it to the others."""
        if self.workspace is None:
            return self.ints(layout.size)
        return jax.ShapeDtypeStruct((tensor_size(self.mesh), layout.size), jnp.int32, sharding=self.workspace.sharding)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.shape(shape, jnp.int32)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """A joint array that has this shape in each rank."""
        return jax.ShapeDtypeStruct(self.ranks.shape(shape), dtype, sharding=self.replicated)
