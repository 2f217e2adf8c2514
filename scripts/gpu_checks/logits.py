"""Logits of a random Llama in bfloat16 against the same weights in float32, over one layer and over all.

How far bfloat16 may be off depends on depth and weights, so it is measured: the same model in bfloat16 by plain XLA is off by some
error, and the kernels, which round at the same places or at fewer, may be off by FACTOR times as much and no more. The error is
relative to the float32 logits: of all tokens together, and of the worst token (a wrong page or mask shows in single tokens).
"""

import concurrent.futures
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.layers.row_states import StateRows
from jaxllm.runner.paged_context import GroupTable
from jaxllm.runner.places import Places, make_step
from scripts.gpu_checks import Outcome, kernels_in_use
from scripts.gpu_checks import shapes as shapes_of
from scripts.gpu_checks.shapes import LLAMA_8B
from scripts.kernels.compiling import Compiler

Tokens = tuple[jax.Array, Places]
"""Token ids, and where they are."""
FACTOR, WORST_FACTOR = 1.5, 2.0
MOST = 0.2
"""If plain XLA is off by more, the comparison is not meaningful."""
BLOCK = 16


@dataclass(frozen=True)
class Steps:
    """Prompts computed in one step, then decodes with fixed tokens, so that every model gets the same."""

    prompts: tuple[int, ...] = (200, 61, 7, 1, 17)
    num_decodes: int = 4
    num_rows: int = 8
    """Rows past the prompts are padding."""

    @property
    def width(self) -> int:
        return -(-(max(self.prompts) + self.num_decodes) // BLOCK)

    @property
    def num_blocks(self) -> int:
        return len(self.prompts) * self.width + 2

    def token_ids(self, vocab_size: int) -> list[np.ndarray]:
        """Token ids of each request: prompt and output."""
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocab_size, n + self.num_decodes).astype(np.int32) for n in self.prompts]

    def table(self) -> np.ndarray:
        blocks = np.random.default_rng(1).permutation(self.num_blocks - 1)[: len(self.prompts) * self.width] + 1
        table = np.zeros((self.num_rows, self.width), np.int32)
        table[: len(self.prompts)] = blocks.reshape(len(self.prompts), self.width)
        return table

    def prefill(self, vocab_size: int) -> Tokens:
        counts = np.zeros(self.num_rows, np.int32)
        counts[: len(self.prompts)] = self.prompts
        padded = -(-int(counts.sum()) // 16) * 16
        return self._tokens(
            vocab_size, [(row, position) for row, n in enumerate(self.prompts) for position in range(n)], padded, counts, counts
        )

    def decode(self, vocab_size: int, step: int) -> Tokens:
        counts, lengths = np.ones(self.num_rows, np.int32), np.zeros(self.num_rows, np.int32)
        lengths[: len(self.prompts)] = np.array(self.prompts) + step + 1
        places = [(row, n + step) for row, n in enumerate(self.prompts)]
        return self._tokens(vocab_size, places, self.num_rows, counts, lengths)

    def _tokens(self, vocab_size: int, places: list[tuple[int, int]], padded: int, counts: Any, lengths: Any) -> Tokens:
        """Tokens by (row, position); the rest is padding."""
        ids, table = self.token_ids(vocab_size), self.table()
        token, position, slot = (np.full(padded, fill, np.int32) for fill in (0, 0, -1))
        for i, (row, at) in enumerate(places):
            token[i], position[i] = ids[row][at], at
            slot[i] = table[row, at // BLOCK] * BLOCK + at % BLOCK
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        is_real = np.arange(padded) < len(places)
        owner = np.zeros(padded, np.int32)
        owner[: len(places)] = [row for row, _ in places]
        at = Places(
            row_T=owner,  # type: ignore[arg-type]
            owner_T=owner,  # type: ignore[arg-type]
            offset_T=np.zeros(padded, np.int32),  # type: ignore[arg-type]
            position_T=position,  # type: ignore[arg-type]
            is_real_T=is_real,  # type: ignore[arg-type]
            tables=(GroupTable(table, slot),),  # type: ignore[arg-type]
            query_start_R1=start,  # type: ignore[arg-type]
            kv_length_R=lengths.astype(np.int32),
            rows=StateRows(np.arange(self.num_rows, dtype=np.int32), lengths == counts, start),  # type: ignore[arg-type]
            num_queries=None,
        )
        return jax.tree.map(jnp.asarray, (token, at))  # type: ignore[no-any-return]


def check(*, tiny: bool) -> Iterator[Outcome]:
    """One layer, then the whole model."""
    shapes = shapes_of.tiny(LLAMA_8B) if tiny else LLAMA_8B
    steps = Steps(prompts=(20, 7, 1, 17), num_decodes=2) if tiny else Steps()
    for num_layers in (1, shapes["num_hidden_layers"]):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(shapes | {"num_hidden_layers": num_layers}))
            kernels = {} if jax.default_backend() != "cpu" else {"attention_implementation": "triton"}
            engines: tuple[dict[str, Any], ...] = (
                {"dtype": "float32", "attention_implementation": "xla"},
                {"dtype": "bfloat16", "attention_implementation": "xla"},
                {"dtype": "bfloat16", **kernels},
            )
            # Engines of one layer fit into memory together: while one compiles, another runs.
            with concurrent.futures.ThreadPoolExecutor(len(engines) if num_layers == 1 else 1) as pool:
                runs = [pool.submit(run, directory, steps, **options) for options in engines]
                exact, plain, ours = (found.result() for found in runs)
        for name in exact:
            yield compare(f"logits, {num_layers} layer{'s' * (num_layers > 1)}, {name}", exact[name], plain[name], ours[name])


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


def run(directory: str, steps: Steps, **options: Any) -> dict[str, np.ndarray]:
    """float32 logits of the prefill's tokens and of each decode's."""
    core = EngineCore(
        EngineConfig.from_options(
            model=directory,
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
        return _logits(core, steps)
    finally:
        core.shutdown()


def _logits(core: EngineCore, steps: Steps) -> dict[str, np.ndarray]:
    runner, vocab_size = core.runner, core.model_config.vocab_size
    functions = runner.shapes.functions
    # A cast there and back would be taken out by the compiler.
    rounded = jax.jit(lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), donate_argnums=0)
    runner.params = tuple(rounded(x) for x in runner.params)

    def forward(is_decode: bool, params: Any, caches: Any, tokens: Tokens) -> tuple[jax.Array, Any]:
        (token_ids, places), kept = tokens, list(caches)
        places = places._replace(num_queries=1 if is_decode else None)
        model = functions.merge(params)
        step = make_step(kept, token_ids, places, functions.cache.places, functions.kernels, functions.shards)
        return model.logits(model(step), functions.shards).astype(jnp.float32)[:, :vocab_size], tuple(kept)

    prefill, decodes = steps.prefill(vocab_size), [steps.decode(vocab_size, step) for step in range(steps.num_decodes)]
    compiler = Compiler()
    programs = [
        compiler.submit(lambda *args, kind=kind: forward(kind, *args), runner.params, runner.caches, tokens, donate=(1,))
        for kind, tokens in ((False, prefill), (True, decodes[0]))
    ]
    found = {}
    logits, runner.caches = programs[0].result()(runner.params, runner.caches, prefill)
    found[f"prefill of {sum(steps.prompts)} tokens"] = np.asarray(logits)[: sum(steps.prompts)]
    rows = []
    for tokens in decodes:
        logits, runner.caches = programs[1].result()(runner.params, runner.caches, tokens)
        rows.append(np.asarray(logits)[: len(steps.prompts)])
    found[f"{steps.num_decodes} decodes of {len(steps.prompts)} rows"] = np.concatenate(rows)
    compiler.close()
    return found
