"""Steps of two requests as the runner makes them, around a drafter: a paged cache, drafts that prove wrong, padding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.cache_spec import cache_layout
from jaxllm.kernel_policy import CPU
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import TENSOR, make_mesh
from jaxllm.parallel.shards import make_shards
from jaxllm.progress import SILENT
from jaxllm.runner.drafter import Drafting
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.paged_context import GroupTable, PagedContext
from pallas_kernels.span_attention import Later

NUM_ROWS, NUM_TOKENS, BLOCK_SIZE, NUM_PAGES = 3, 12, 4, 10
"""The last row is padding."""
MAX_LENGTH = BLOCK_SIZE * NUM_PAGES
XLA = Kernels(paged_attention="xla", rope_cache_write="xla", mla_attention="xla")


HiddenStates = Callable[[list[int]], tuple[np.ndarray, list[np.ndarray]]]
"""From a sequence to a model's hidden states [T, D] after the last norm, and what enters some of its layers."""


def target_hidden_states(config: ModelConfig, state: nnx.State, layers: tuple[int, ...]) -> HiddenStates:
    """Hidden states of a model, for sequences up to MAX_LENGTH."""
    graph, positions = nnx.graphdef(build_model(config)), jnp.arange(MAX_LENGTH)

    @jax.jit
    def forward(state, token_ids_T):
        step = dense_step(token_ids_T, positions)
        step.wanted_features = layers
        return nnx.merge(graph, state)(step), [step.features[layer] for layer in layers]

    def hidden_states(tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        found = forward(state, np.pad(np.array(tokens, np.int32), (0, MAX_LENGTH - len(tokens))))
        return jax.tree.map(lambda x: np.asarray(x)[: len(tokens)], found)  # type: ignore[no-any-return]

    return hidden_states


@dataclass
class Sequence:
    """A request: all tokens that proved right, the latest drawn one last."""

    tokens: list[int]
    num_computed: int = 0


@dataclass
class ByHand:
    """An engine of which only the drafter is real. Tokens are what the test says, hidden states are those of a target."""

    drafter: Any
    target: ModelConfig
    """Split over the devices."""
    target_state: nnx.State
    hidden_states: HiddenStates
    """As `target_hidden_states` returns it, with what enters the drafter's feature layers."""
    size: int = 1
    noise: np.ndarray | None = None
    """[positions, vocabulary], added to logits by `Drafting.draw`."""
    caches: list[Any] = field(default_factory=list)

    def __post_init__(self):
        rng = np.random.default_rng(1)
        self.sequences = [Sequence(rng.integers(0, 100, count).tolist()) for count in (7, 3)]
        self.mesh = make_mesh(self.size)
        self.state = self.drafter.load(self.mesh, SILENT)
        self.layout = cache_layout(self.drafter.cache_specs, block_size=BLOCK_SIZE, max_step_tokens=NUM_TOKENS)
        shape = NUM_ROWS * NUM_PAGES, BLOCK_SIZE
        # What was never written must not be read.
        place = NamedSharding(self.mesh, P(None, TENSOR))
        self.caches = [
            jnp.full((shape[0], array.num_heads, shape[1], array.width), 50.0, array.dtype, device=place)
            for array in self.layout.arrays
        ]
        pages = np.random.default_rng(0).permutation(NUM_ROWS * NUM_PAGES)
        self.page_table_RB = pages.reshape(NUM_ROWS, NUM_PAGES).astype(np.int32)
        specs = [jax.tree.map(lambda leaf: leaf.sharding.spec, state) for state in (self.state, self.target_state)]
        cache_specs = [P(None, TENSOR)] * len(self.caches)
        mapped = jax.shard_map(
            self._propose,
            mesh=self.mesh,
            in_specs=(*specs, cache_specs, P(), P()),
            out_specs=(cache_specs, P(), P()),
            check_vma=False,
        )
        self.kept = self.drafter.new_state(NUM_ROWS, MAX_LENGTH)
        self.propose = jax.jit(mapped)
        self.graphs = nnx.graphdef(self.drafter.model), nnx.graphdef(build_model(self.target))

    def compare(self, expected: Callable[[list[int]], list[int]], *, rounds: int = 3) -> None:
        """Compare the drafts of two sequences, of 7 and 3 tokens, with those that a function says follow all tokens so far: after a
        prompt in two parts, and after drafts of which some were right."""
        rng = np.random.default_rng(4)
        a, b = self.sequences
        drafts = self.step([a.tokens[:5], b.tokens], num_right=[5, 3], drawn=[None, 17])
        assert drafts[1].tolist() == expected(b.tokens)
        steps = [([a.tokens[5:], [17, 3, 4, 5]], [2, 2], [99, 6])]
        for right, drawn in (([4, 1], [11, 12]), ([1, 4], [13, 14]), ([2, 3], [15, 16]))[:rounds]:
            steps.append(([[], []], right, drawn))
        for own, right, drawn in steps:
            tokens = [part or [s.tokens[-1], *rng.integers(0, 100, 3).tolist()] for part, s in zip(own, (a, b), strict=True)]
            drafts = self.step(tokens, num_right=right, drawn=drawn)
            assert drafts.tolist() == [expected(sequence.tokens) for sequence in (a, b)]

    def step(self, tokens: list[list[int]], *, num_right: list[int], drawn: list[int | None]) -> np.ndarray:
        """A step of some tokens of each sequence, the first of which prove right. drawn: the token after these; None: the prompt goes
        on. Returns the drafts of each sequence."""
        arrays: dict[str, Any] = {
            "token_ids_T": np.zeros(NUM_TOKENS, np.int32),
            "next_ids_T": np.zeros(NUM_TOKENS, np.int32),
            "position_T": np.zeros(NUM_TOKENS, np.int32),
            "row_T": np.full(NUM_TOKENS, NUM_ROWS - 1, np.int32),
            "is_real_T": np.zeros(NUM_TOKENS, bool),
            "hidden_TD": np.zeros((NUM_TOKENS, self.target.hidden_size), np.float32),
            "features": [np.zeros((NUM_TOKENS, self.target.hidden_size), np.float32) for _ in self.drafter.feature_layers],
            "offset_T": np.zeros(NUM_TOKENS, np.int32),
            "last_R": np.zeros(NUM_ROWS, np.int32),
            "draws_R": np.zeros(NUM_ROWS, bool),
            "token_R": np.zeros(NUM_ROWS, np.int32),
            "position_R": np.zeros(NUM_ROWS, np.int32),
            "count_R": np.zeros(NUM_ROWS, np.int32),
        }
        at = 0
        for row, (own, sequence) in enumerate(zip(tokens, self.sequences, strict=True)):
            start, end = sequence.num_computed, at + len(own)
            before = sequence.tokens[:start]
            assert sequence.tokens[start : start + num_right[row]] == own[: num_right[row]][: len(sequence.tokens) - start]
            arrays["token_ids_T"][at:end] = own
            rest = own[1:] + [7]
            known = sequence.tokens[start + 1 : start + len(own) + 1]
            after = drawn[row] if drawn[row] is not None else known[len(own) - 1]
            rest[num_right[row] - 1] = after
            arrays["next_ids_T"][at:end] = rest
            arrays["position_T"][at:end] = range(start, start + len(own))
            arrays["row_T"][at:end] = row
            arrays["offset_T"][at:end] = range(len(own))
            arrays["is_real_T"][at:end] = True
            hidden, features = self.hidden_states(before + own)
            arrays["hidden_TD"][at:end] = hidden[start:]
            for wanted, feature in zip(arrays["features"], features, strict=True):
                wanted[at:end] = feature[start:]
            arrays["last_R"][row] = at + num_right[row] - 1
            arrays["count_R"][row] = len(own)
            sequence.num_computed = start + num_right[row]
            arrays["draws_R"][row] = drawn[row] is not None
            if drawn[row] is not None:
                sequence.tokens = before + own[: num_right[row]] + [after]
                arrays["token_R"][row], arrays["position_R"][row] = after, sequence.num_computed
            at = end
        arrays["start_R"] = np.array(
            [*(s.num_computed - n for s, n in zip(self.sequences, num_right, strict=True)), 0], np.int32
        )
        self.caches, self.kept, drafts = self.propose(self.state, self.target_state, self.caches, self.kept, arrays)
        return np.asarray(drafts)[:-1]

    def _propose(self, state, target_state, caches, kept, arrays):
        shards = make_shards(self.mesh, CPU)
        drafter_graph, target_graph = self.graphs
        caches = list(caches)
        count_R, start_R = arrays.pop("count_R"), arrays.pop("start_R")
        is_real_T, row_T, position_T = arrays.pop("is_real_T"), arrays["row_T"], arrays["position_T"]
        is_real_R = arrays["position_R"] > 0
        query_start_R1 = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count_R)])

        def step(ids, position, row, is_real, query_start_R1, kv_length_R, num_queries):
            page = jnp.asarray(self.page_table_RB)[row, jnp.minimum(position // BLOCK_SIZE, NUM_PAGES - 1)]
            fits = is_real & (position < MAX_LENGTH)
            slot = jnp.where(fits, page * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            context = PagedContext(
                caches=caches,
                places=self.layout.places,
                tables=[GroupTable(jnp.asarray(self.page_table_RB), slot)],
                query_start_R1=query_start_R1,
                kv_length_R=kv_length_R,
                rows=StateRows(jnp.arange(NUM_ROWS), kv_length_R == 0, None),
                num_queries=num_queries,
                kernels=XLA,
            )
            return Step(ids, position, context, shards, is_real, attend_to_latents=context.attend_to_latents)

        def same_step(ids_T, lag=0):
            begin_T = position_T - arrays["offset_T"]
            less_T, less_R = (jnp.minimum(start, lag) for start in (begin_T, start_R))
            return step(ids_T, position_T - less_T, row_T, is_real_T, query_start_R1, start_R - less_R + count_R, None)

        def decode_step(ids_R, position_R):
            row_R, starts = jnp.arange(NUM_ROWS), jnp.arange(NUM_ROWS + 1)
            is_real = is_real_R & (position_R < MAX_LENGTH)
            return step(ids_R, position_R, row_R, is_real, starts, jnp.where(is_real, position_R + 1, 0), 1)

        def run_step(token_RW, position_R, *, sees_later):
            width, row_T = token_RW.shape[1], jnp.repeat(jnp.arange(NUM_ROWS), token_RW.shape[1])
            offset_T, starts = jnp.tile(jnp.arange(width), NUM_ROWS), jnp.arange(NUM_ROWS + 1) * width
            position_T, kv_length_R = position_R[row_T] + offset_T, jnp.where(is_real_R, position_R + width, 0)
            queries = None if sees_later else width
            found = step(token_RW.reshape(-1), position_T, row_T, is_real_R[row_T], starts, kv_length_R, queries)
            if sees_later:
                found.attend.later = Later(jnp.where(is_real_R[row_T], width - 1 - offset_T, 0), width - 1)
            return found

        def draw(logits_RV, position_R):
            num_columns = logits_RV.shape[1]
            if self.noise is not None:
                noise_PV = jax.lax.dynamic_slice_in_dim(
                    jnp.asarray(self.noise), shards.index * num_columns, num_columns, axis=1
                )
                logits_RV = logits_RV + noise_PV[position_R]
            own_R = jnp.argmax(logits_RV, axis=1).astype(jnp.int32)
            return shards.likeliest(own_R, jnp.max(logits_RV, axis=1), num_columns)[0]

        drafting = Drafting(
            target=nnx.merge(target_graph, target_state),
            shards=shards,
            row_R=jnp.where(is_real_R, jnp.arange(NUM_ROWS), NUM_ROWS - 1),
            num_wanted=self.drafter.num_drafts,
            query_start_R1=query_start_R1,
            same_step=same_step,
            decode_step=decode_step,
            run_step=run_step,
            draw=draw,
            **{**arrays, "features": tuple(arrays["features"])},
        )
        kept, drafts_RK = self.drafter.propose(nnx.merge(drafter_graph, state), kept, drafting)
        return caches, kept, drafts_RK
