"""Logits of a random Llama in bfloat16 against the same weights in float32: over one layer, over all, and over one with weights in 4 and
8 bits.

How far bfloat16 may be off depends on depth and weights, so it is measured: the same model in bfloat16 by plain XLA is off by some
error, and the kernels, which round at the same places or at fewer, may be off by FACTOR times as much and no more. The error is
relative to the float32 logits: of all tokens together, and of the worst token (a wrong page or mask shows in single tokens).
"""

import concurrent.futures
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.kernel_verdicts import OpReport
from jaxllm.layers.row_states import StateRows
from jaxllm.runner.paged_context import GroupTable
from jaxllm.runner.places import Places, make_step
from pallas_kernels.span_attention import Later
from scripts.gpu_checks import Outcome, kernels_in_use
from scripts.gpu_checks import shapes as shapes_of
from scripts.gpu_checks.shapes import LLAMA_8B
from scripts.kernels.compiling import Compiler

FACTOR, WORST_FACTOR = 1.5, 2.0
MOST = 0.2
"""If plain XLA is off by more, the comparison is not meaningful."""
BLOCK = 16


class Batch(NamedTuple):
    """The tokens of a step; those past `count` are padding."""

    token_ids_T: jax.Array
    places: Places
    later: Later | None
    count: int


@dataclass(frozen=True)
class Steps:
    """Prompts computed in one step or two, then decodes with fixed tokens, so that every model gets the same."""

    prompts: tuple[int, ...] = (200, 61, 7, 1, 17)
    num_decodes: int = 4
    num_rows: int = 8
    """Rows past the prompts are padding."""
    first: tuple[int, ...] = ()
    """How many tokens of each prompt a first step computes; empty: all."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """Row, first position and length of spans whose tokens see each other, each within a step."""
    num_groups: int = 1
    """Groups of layers, each with separate blocks."""

    @property
    def width(self) -> int:
        return -(-(max(self.prompts) + self.num_decodes) // BLOCK)

    @property
    def num_blocks(self) -> int:
        return self.num_groups * len(self.prompts) * self.width + 2

    def token_ids(self, vocab_size: int) -> list[np.ndarray]:
        """Token ids of each request: prompt and output."""
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocab_size, n + self.num_decodes).astype(np.int32) for n in self.prompts]

    def tables(self) -> np.ndarray:
        """The blocks of each row in each group: [groups, rows, width]."""
        shape = (self.num_groups, len(self.prompts), self.width)
        blocks = np.random.default_rng(1).permutation(self.num_blocks - 1)[: math.prod(shape)] + 1
        tables = np.zeros((self.num_groups, self.num_rows, self.width), np.int32)
        tables[:, : len(self.prompts)] = blocks.reshape(shape)
        return tables

    def batches(self, vocab_size: int) -> dict[str, list[Batch]]:
        """Steps in their order; those of a name have equal shapes."""
        whole, none, found = self.prompts, (0,) * len(self.prompts), {}
        if self.first:
            found[f"the first {sum(self.first)} tokens"] = [self._of_prompts(vocab_size, none, self.first)]
        rest = sum(whole) - sum(self.first)
        title = f"the {rest} tokens behind them" if self.first else f"prefill of {rest} tokens"
        found[title] = [self._of_prompts(vocab_size, self.first or none, whole)]
        decodes = [self._decode(vocab_size, step) for step in range(self.num_decodes)]
        return {**found, f"{self.num_decodes} decodes of {len(whole)} rows": decodes}

    def _of_prompts(self, vocab_size: int, begin: Sequence[int], end: Sequence[int]) -> Batch:
        counts, lengths = np.zeros((2, self.num_rows), np.int32)
        counts[: len(end)] = np.array(end) - np.array(begin)
        lengths[: len(end)] = np.where(counts[: len(end)] > 0, end, 0)
        padded = -(-int(counts.sum()) // 16) * 16
        places = [(row, position) for row in range(len(end)) for position in range(begin[row], end[row])]
        return self._batch(vocab_size, places, padded, counts, lengths)

    def _decode(self, vocab_size: int, step: int) -> Batch:
        counts, lengths = np.ones(self.num_rows, np.int32), np.zeros(self.num_rows, np.int32)
        lengths[: len(self.prompts)] = np.array(self.prompts) + step + 1
        places = [(row, n + step) for row, n in enumerate(self.prompts)]
        return self._batch(vocab_size, places, self.num_rows, counts, lengths, num_queries=1)

    def _batch(
        self,
        vocab_size: int,
        places: Sequence[tuple[int, int]],
        padded: int,
        counts: np.ndarray,
        lengths: np.ndarray,
        num_queries: int | None = None,
    ) -> Batch:
        """Tokens by (row, position); the rest is padding."""
        ids, tables = self.token_ids(vocab_size), self.tables()
        token, position, later = np.zeros((3, padded), np.int32)
        slots = np.full((self.num_groups, padded), -1, np.int32)
        for i, (row, at) in enumerate(places):
            token[i], position[i] = ids[row][at], at
            slots[:, i] = tables[:, row, at // BLOCK] * BLOCK + at % BLOCK
            later[i] = sum(
                start + count - 1 - at for owner, start, count in self.spans if owner == row and start <= at < start + count
            )
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        is_real = np.arange(padded) < len(places)
        owner = np.zeros(padded, np.int32)
        owner[: len(places)] = [row for row, _ in places]
        found = Places(
            row_T=owner,  # type: ignore[arg-type]
            owner_T=owner,  # type: ignore[arg-type]
            offset_T=np.zeros(padded, np.int32),  # type: ignore[arg-type]
            position_T=position,  # type: ignore[arg-type]
            is_real_T=is_real,  # type: ignore[arg-type]
            tables=tuple(map(GroupTable, tables, slots)),  # type: ignore[arg-type]
            query_start_R1=start,  # type: ignore[arg-type]
            kv_length_R=lengths.astype(np.int32),  # type: ignore[arg-type]
            rows=StateRows(np.arange(self.num_rows, dtype=np.int32), lengths == counts, start),  # type: ignore[arg-type]
            num_queries=None,
        )
        token_ids, found, later_T = jax.tree.map(jnp.asarray, (token, found, later))
        most = max((count for _, _, count in self.spans), default=1) - 1
        seen = Later(later_T, most) if most and num_queries is None else None
        return Batch(token_ids, found._replace(num_queries=num_queries), seen, len(places))


def check(*, tiny: bool) -> Iterator[Outcome]:
    """One layer, then the whole model; then one layer with each kind of quantised weights, and with quantised experts."""
    shapes = shapes_of.tiny(LLAMA_8B) if tiny else LLAMA_8B
    one = shapes | {"num_hidden_layers": 1}
    yield from _check_model("1 layer", one, tiny=tiny)
    yield from _check_model(f"{shapes['num_hidden_layers']} layers", shapes, tiny=tiny)
    for number in shapes_of.NUMBERS:
        yield from _check_model(f"1 layer in {number}", shapes_of.quantized(one, number), tiny=tiny)
    # Every token chooses all experts: rounding cannot change its choice.
    mixture = shapes_of.tiny(shapes_of.QWEN3_MOE) if tiny else shapes_of.QWEN3_MOE
    mixture |= {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 4}
    for number in ("int4", shapes_of.FP8_BLOCKS):
        yield from _check_model(f"1 layer of experts in {number}", shapes_of.quantized(mixture, number), tiny=tiny)


def _check_model(name: str, shapes: shapes_of.Shapes, *, tiny: bool) -> Iterator[Outcome]:
    steps = Steps(prompts=(20, 7, 1, 17), num_decodes=2) if tiny else Steps()
    kernels = {} if jax.default_backend() != "cpu" else {"attention_implementation": "triton"}
    if "quantization_config" in shapes and not kernels:
        kernels = {"attention_implementation": "mosaic"}  # names kernels, so that unverified ones run too
    # Random weights are those of the form that they are stored in, so all engines have the same.
    stored = {"dequantize": False} if "quantization_config" in shapes else {}
    engines: tuple[dict[str, Any], ...] = (
        {"dtype": "float32", "attention_implementation": "xla", **stored},
        {"dtype": "bfloat16", "attention_implementation": "xla", **stored},
        {"dtype": "bfloat16", **kernels, **stored},
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shapes))
        # Engines of one layer fit into memory together: while one compiles, another runs.
        with concurrent.futures.ThreadPoolExecutor(len(engines) if shapes["num_hidden_layers"] == 1 else 1) as pool:
            runs = [pool.submit(run, directory, steps, **options) for options in engines]
            exact, plain, ours = (found.result() for found in runs)
    if "quantization_config" in shapes:
        yield kernels_in_use(f"logits, {name}", ours.kernels)
    for step in exact.logits:
        yield compare(f"logits, {name}, {step}", exact.logits[step], plain.logits[step], ours.logits[step])


def compare(name: str, exact: np.ndarray, plain: np.ndarray, ours: np.ndarray) -> Outcome:
    """Whether ours is at most FACTOR times as far from exact as plain is."""
    (plain_error, plain_worst), (error, worst) = errors(exact, plain), errors(exact, ours)
    passed = error <= FACTOR * plain_error + 1e-6 and worst <= WORST_FACTOR * plain_worst + 1e-6 and plain_error < MOST
    detail = (
        f"relative error {error:.2e} (plain XLA {plain_error:.2e}, allowed x{FACTOR}), "
        f"worst token {worst:.2e} (plain {plain_worst:.2e}, allowed x{WORST_FACTOR:g})"
    )
    return Outcome(name, passed, detail)


def errors(exact: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    """Relative errors of [tokens, vocabulary]: of all, and of the worst token."""
    off, size = np.linalg.norm(got - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    return float(np.linalg.norm(off) / np.linalg.norm(size)), float((off / size).max())


class Found(NamedTuple):
    """Logits of an engine, and the implementation that it chose for each op."""

    logits: dict[str, np.ndarray]
    """float32 [tokens, vocabulary], by the steps' names."""
    kernels: Mapping[str, OpReport]


def run(
    directory: str | Path, steps: Steps, *, before: Callable[[EngineCore], dict[str, np.ndarray]] | None = None, **options: Any
) -> Found:
    """Logits of the steps' tokens. before: runs before the steps, when the weights are rounded; what it finds comes first."""
    core = EngineCore(
        EngineConfig.from_options(
            model=str(directory),
            load_format="dummy",
            max_num_seqs=steps.num_rows,
            max_num_batched_tokens=512,
            max_model_len=steps.width * BLOCK,
            num_gpu_blocks_override=steps.num_blocks,
            block_size=BLOCK,
            warmup="lazy",
            use_progress_bar=False,
            **options,
        )
    )
    try:
        used = kernels_in_use("logits", core.kernels)
        if used.failed:
            raise RuntimeError(used.detail)
        runner = core.runner
        # A cast there and back would be taken out by the compiler.
        rounded = jax.jit(lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), donate_argnums=0)
        runner.params = tuple(rounded(x) if x.dtype in ("float32", "bfloat16") else x for x in runner.params)
        found = before(core) if before is not None else {}
        return Found({**found, **_logits(core, steps)}, dict(core.kernels))
    finally:
        core.shutdown()


def _logits(core: EngineCore, steps: Steps) -> dict[str, np.ndarray]:
    runner, vocab_size = core.runner, core.model_config.vocab_size
    functions = runner.shapes.functions

    def forward(num_queries: int | None, params: Any, caches: Any, token_ids: Any, places: Places, later: Any) -> Any:
        kept = list(caches)
        model, places = functions.merge(params), places._replace(num_queries=num_queries)
        step = make_step(
            kept, token_ids, places, functions.cache.places, functions.kernels, functions.shards, policy=functions.policy
        )
        step.attend.later = later
        return model.logits(model(step), functions.shards).astype(jnp.float32)[:, :vocab_size], tuple(kept)

    def inputs(batch: Batch) -> tuple[Any, Places, Later | None]:
        return batch.token_ids_T, batch.places._replace(num_queries=None), batch.later

    batches, compiler, found = steps.batches(vocab_size), Compiler(), {}
    programs = {
        name: compiler.submit(
            partial(forward, first.places.num_queries), runner.params, runner.caches, *inputs(first), donate=(1,)
        )
        for name, (first, *_) in batches.items()
    }
    for name, of_name in batches.items():
        rows = []
        for batch in of_name:
            logits, runner.caches = programs[name].result()(runner.params, runner.caches, *inputs(batch))
            rows.append(np.asarray(logits)[: batch.count])
        found[name] = np.concatenate(rows)
    compiler.close()
    return found
