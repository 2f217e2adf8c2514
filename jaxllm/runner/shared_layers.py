"""Traces the layers of a model that are alike as calls of one function, which is traced and lowered once for all of them.

On a CPU, `split_program` also compiles it once. XLA inlines the calls of a whole program before all else: what it makes for a GPU is the
same as of layers that were traced one by one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.layers.decoder import AnyNorm, DecoderBlock, Run
from jaxllm.layers.norm import Normalization
from jaxllm.layers.parameters import parameters
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LatentAttention
from jaxllm.parallel.topology import Topology
from jaxllm.runner.paged_context import GroupTable, PagedContext

LAYER = "decoder_layer"
"""The name of these functions in a trace."""

MIN_LAYERS = 8
"""With fewer layers, a model's programs are compiled whole by default."""


def shares_layers(config: EngineConfig, model: ModelConfig, *, on_gpu: bool) -> bool:
    """Whether an engine's programs share layers. Raises ConfigError if that is asked for where it cannot be."""
    asked, topology = config.compile.share_layers, Topology.of(config.parallel)
    is_possible = not on_gpu and topology.num_devices == 1
    if asked and not is_possible:
        where = "a GPU" if on_gpu else f"{topology.num_devices} devices"
        raise ConfigError(
            f"share_layers is set, but only programs for one CPU device run in pieces, and these are for {where}; leave it out"
        )
    return is_possible and model.num_layers >= MIN_LAYERS if asked is None else asked


def traces_alike_once(config: EngineConfig, *, on_gpu: bool) -> bool:
    """Whether layers that are alike become calls of one function, in pieces or in a whole program. Several devices trace each layer."""
    return bool(config.compile.share_layers) or (on_gpu and Topology.of(config.parallel).num_devices == 1)


@dataclass
class SharedLayers:
    """Calls the layers of one step: see `Step.call_layer`. Layers share a function if parts, weights with their formats and caches are
    alike."""

    context: PagedContext
    """Context of the step."""
    _functions: "dict[Hashable, _Traced]" = field(default_factory=dict)

    def __call__(self, block: DecoderBlock, next_norm: AnyNorm, runs: Sequence[Run], step: Step) -> list[Run]:
        if step.tells_layers_apart:
            return block(runs, next_norm, step)
        graph, state = nnx.split((block, next_norm))
        weights, structure = jax.tree.flatten(state)
        place = self.context.places[block.layer]
        indices = [index for layer in block.kept_layers for index in self.context.places[layer].arrays]
        kept = [self.context.caches[index] for index in indices]
        table = None if place.group is None else self.context.tables[place.group]
        norm = replace(next_norm.norm, name="") if isinstance(next_norm, Normalization) else None
        takes_choice, chooses = _choices(block)
        chosen_TK = self.context.chosen_TK if takes_choice else None
        formats = tuple(variable.get_metadata("format") for _, variable in parameters(state))
        kinds = map(_kinds, (state, runs, kept, table, chosen_TK))
        key = (block.parts, norm, next_norm.before_quantized, formats, place.view, *kinds)
        if key not in self._functions:
            # The first layer stands for all: its number only says where its caches and its table are.
            def layer(
                weights: list[Any],
                runs: list[Run],
                kept: list[jax.Array],
                table: GroupTable | None,
                chosen_TK: jax.Array | None,
            ) -> tuple[list[Run], list[jax.Array], jax.Array | None]:
                block, next_norm = nnx.merge(graph, jax.tree.unflatten(structure, weights))
                caches = dict(zip(indices, kept, strict=True))
                tables = {} if place.group is None or table is None else {place.group: table}
                context = replace(self.context, caches=caches, tables=tables, chosen_TK=chosen_TK)
                runs = block(runs, next_norm, step.over(context))
                return runs, [caches[index] for index in indices], context.chosen_TK if chooses else None

            self._functions[key] = _Traced.of(layer, weights, list(runs), kept, table, chosen_TK)
        new_runs, kept, chosen_TK = self._functions[key](weights, list(runs), kept, table, chosen_TK)
        self.context.chosen_TK = chosen_TK if chooses else self.context.chosen_TK
        for index, array in zip(indices, kept, strict=True):
            self.context.caches[index] = array
        return new_runs  # type: ignore[no-any-return]


def _choices(block: DecoderBlock) -> tuple[bool, bool]:
    """Whether a layer takes the choice of tokens of one before it, and whether it makes one."""
    part = block.parts.attention
    if not isinstance(part, LatentAttention):
        return False, False
    return part.top_k is not None and part.index is None, part.index is not None


@dataclass(frozen=True)
class _Traced:
    """A function that is traced once, although it closes over values of the trace around it."""

    function: Callable[..., Any]
    closed_over: list[Any]
    """These values, which it takes before its arguments."""
    out_tree: Any

    @classmethod
    def of(cls, function: Callable[..., Any], *arguments: Any) -> "_Traced":
        closed, out_shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        jaxpr = closed.jaxpr
        debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        evaluate = core.jaxpr_as_fun(
            core.ClosedJaxpr(core.Jaxpr([], inputs, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, debug_info), [])
        )

        def decoder_layer(*values: jax.Array) -> list[jax.Array]:
            return evaluate(*values)  # type: ignore[no-any-return]

        assert decoder_layer.__name__ == LAYER
        return cls(jax.jit(decoder_layer), closed.consts, jax.tree.structure(out_shape))

    def __call__(self, *arguments: Any) -> Any:
        return jax.tree.unflatten(self.out_tree, self.function(*self.closed_over, *jax.tree.leaves(arguments)))


def _kinds(arrays: Any) -> tuple[tuple[str, str], ...]:
    """Name, shape and type of each array of a tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    return tuple((jax.tree_util.keystr(path), str(jax.typeof(leaf))) for path, leaf in leaves)
