"""Every way to lay an engine out over devices, in float32: the tokens of one device."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome, shapes, skip
from scripts.gpu_checks.tensor_parallel_traffic import full_precision, guarded

PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
"""What `full_precision` sets, for processes of replicas."""
Tokens = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """Options of an engine that say which devices compute what."""

    name: str
    num_devices: int
    options: dict[str, Any] = field(default_factory=dict)
    needs_experts: bool = False


MOVING_RANKS = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"step_interval": 2, "num_redundant_experts": 2},
}
DRAFTING_RANKS = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}
"""Their prompts repeat themselves."""
LAYOUTS = (
    Layout("2 replicas", 2, {"data_parallel_size": 2}),
    Layout("2 stages", 2, {"pipeline_parallel_size": 2}),
    Layout("whole experts on 2 devices", 2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, needs_experts=True),
    Layout("tokens split over 2 devices", 2, {"prefill_context_parallel_size": 2}),
    Layout("2 ranks", 2, {"data_parallel_size": 2, "enable_expert_parallel": True}, needs_experts=True),
    Layout("2 ranks whose experts move", 2, MOVING_RANKS, needs_experts=True),
    Layout("2 ranks with drafts", 2, DRAFTING_RANKS, needs_experts=True),
    Layout("2 replicas of 2 devices", 4, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    Layout("2 stages of 2 devices", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    Layout("tokens split over 4 devices", 4, {"prefill_context_parallel_size": 4}),
    Layout("tokens split over 2 times 2 devices", 4, {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}),
    Layout("4 stages", 4, {"pipeline_parallel_size": 4}),
    Layout("whole experts on 4 devices", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}, needs_experts=True),
    Layout(
        "2 ranks of 2 devices",
        4,
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        needs_experts=True,
    ),
)


def check(*, tiny: bool, deadline: float, layouts: tuple[Layout, ...] = LAYOUTS) -> Iterator[Outcome]:
    """Every layout that the visible devices allow; nothing begins after the deadline (`time.perf_counter`)."""
    num_devices = len(jax.devices())
    expected: dict[bool, Tokens] = {}
    with tempfile.TemporaryDirectory() as directory, _full_precision():
        models = write_models(Path(directory), tiny=tiny)
        for layout in layouts:
            if layout.num_devices > num_devices:
                yield skip(layout.name, f"{num_devices} visible, {layout.num_devices} needed")
                continue
            model = models[layout.needs_experts]
            if layout.needs_experts not in expected:
                alone = guarded("one device", deadline, _answer, model, {}, expected, layout.needs_experts, tiny=tiny)
                if alone.failed:
                    yield alone
                    return
            yield guarded(layout.name, deadline, _answer, model, layout.options, expected, layout.needs_experts, tiny=tiny)


def _answer(model: str, options: dict[str, Any], expected: dict[bool, Tokens], key: bool, *, tiny: bool) -> tuple[bool, str]:
    """Greedy and seeded tokens equal `expected[key]`, which the first call of a key fills."""
    found = tokens_of(model, options, tiny=tiny)
    return same(found, expected.setdefault(key, found))


def same(found: Tokens, expected: Tokens) -> tuple[bool, str]:
    """Whether two engines drew the same tokens, and for how many requests."""
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    return equal == len(expected), f"{equal} of {len(expected)} requests equal one device's"


def tokens_of(model: str, options: dict[str, Any], *, tiny: bool) -> Tokens:
    """Greedy and seeded tokens of an engine."""
    count, num_tokens = (6, 5) if tiny else (48, 24)
    prompts = [[1 + (7 * i + j) % 60 for j in range(1 + 5 * i)] for i in range(count)]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=num_tokens - i % 3, ignore_eos=True, detokenize=False)
        for i in range(count)
    ]
    llm = LLM(**engine_options(model, options, tiny=tiny))
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.shutdown()


def engine_options(model: str, options: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Options of an engine with few programs."""
    rows, num_batched = (4, 32) if tiny else (32, 512)
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_num_seqs": rows,
        "max_num_batched_tokens": num_batched,
        "decode_buckets": [rows],
        "token_buckets": [num_batched],
        "max_model_len": 64 if tiny else 512,
        "num_gpu_blocks_override": 65 if tiny else 1025,
        "warmup": "lazy",
        "use_progress_bar": False,
        **options,
    }


def write_models(directory: Path, *, tiny: bool) -> dict[bool, str]:
    """A model without experts and one with them, by whether it has them: their configs, of a few layers."""
    models = {}
    for has_experts, shape in ((False, shapes.QWEN3_0_6B), (True, shapes.QWEN3_MOE)):
        path = directory / ("experts" if has_experts else "dense")
        path.mkdir()
        # With random weights, a few layers already make every request's tokens its own.
        sizes = {**(shapes.tiny(shape) if tiny else shape), "num_hidden_layers": 4}
        (path / "config.json").write_text(json.dumps(sizes))
        models[has_experts] = str(path)
    return models


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before = os.environ.get(PRECISION)
    os.environ[PRECISION] = "highest"
    try:
        with full_precision():
            yield
    finally:
        if before is None:
            del os.environ[PRECISION]
        else:
            os.environ[PRECISION] = before
