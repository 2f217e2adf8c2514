"""The demo model in float32 with LoRA adapters: the device's kernels give the tokens of plain JAX, on one device and on several."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.runner.features.adapters import Adapters
from scripts.gpu_checks import Outcome, skip
from scripts.gpu_checks.tensor_parallel_traffic import full_precision
from scripts.gpu_checks.tokens import TEXT
from scripts.measuring.random_adapters import write_adapter

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 device": (1, {}),
    "2 devices": (2, {"tensor_parallel_size": 2}),
    "2 stages": (2, {"pipeline_parallel_size": 2}),
    "4 devices": (4, {"tensor_parallel_size": 4}),
}
NUM_ADAPTERS, NUM_SLOTS, RANK = 4, 2, 16
"""Fewer slots than adapters: some make room for others."""
SCALE = 0.15
"""Scale of the adapters' values: large enough that nearly every answer changes."""
Tokens = dict[str, list[list[int]]]


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Greedy and seeded requests of all adapters and of none, together."""
    with tempfile.TemporaryDirectory() as directory:
        expected = _answers(Path(directory), "reference", {}, tiny=tiny, adapted=True)
        plain = _answers(Path(directory), "reference", {}, tiny=tiny, adapted=False)
        changed = sum(a != b for kind in expected for a, b in zip(expected[kind], plain[kind], strict=True))
        count = sum(map(len, expected.values()))
        wanted = count * NUM_ADAPTERS // (NUM_ADAPTERS + 1)
        yield Outcome(
            "adapters change answers", changed > 0.8 * wanted, f"{changed} of {count} requests, {wanted} have adapters"
        )
        on_cpu = jax.default_backend() == "cpu"
        for name, (size, options) in LAYOUTS.items():
            if size > len(jax.devices()):
                yield skip(f"adapters on {name}", f"{len(jax.devices())} visible")
                continue
            kernels = "triton" if on_cpu and size == 1 else "auto"  # there interpreted
            found = _answers(Path(directory), kernels, options, tiny=tiny, adapted=True)
            equal = {kind: sum(a == b for a, b in zip(found[kind], expected[kind], strict=True)) for kind in expected}
            detail = ", ".join(f"{number} of {len(expected[kind])} {kind}" for kind, number in equal.items())
            yield Outcome(
                f"adapters, tokens on {name}",
                sum(equal.values()) == count,
                f"{detail} requests equal plain JAX on one device",
            )


def _answers(directory: Path, kernels: str, options: dict[str, Any], *, tiny: bool, adapted: bool) -> Tokens:
    count, num_tokens = (5, 4) if tiny else (30, 32)
    rng = random.Random(0)
    prompts = [" ".join(rng.choices(TEXT.split(), k=rng.randint(1, 8 if tiny else 60))) for _ in range(count)]
    fixed: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    kinds = {
        "greedy": [SamplingParams(temperature=0.0, **fixed) for _ in prompts],
        "seeded": [SamplingParams(temperature=1.0, seed=i, **fixed) for i in range(count)],
    }
    rows = 4 if tiny else 16
    with full_precision():
        llm = LLM(
            "demo",
            dtype="float32",
            attention_implementation=kernels,
            enable_lora=True,
            max_loras=NUM_SLOTS,
            max_lora_rank=RANK,
            max_num_seqs=rows,
            max_num_batched_tokens=32 if tiny else 512,
            decode_buckets=[rows],
            token_buckets=[32 if tiny else 512],
            max_model_len=64 if tiny else 256,
            num_gpu_blocks_override=33 if tiny else 513,
            warmup="lazy",
            use_progress_bar=False,
            **options,
        )
        paths = [directory / str(i) for i in range(NUM_ADAPTERS)]
        if not paths[0].exists():
            core: Any = llm.llm_engine.core
            targets = core.runner.shapes.functions.get(Adapters).adaptation.targets
            for i, path in enumerate(paths):
                write_adapter(path, targets, RANK, seed=i, scale=SCALE)
        requests = [None, *(LoRARequest(f"adapter-{i}", i + 1, str(path)) for i, path in enumerate(paths))]
        named = [requests[i % len(requests)] if adapted else None for i in range(count)]
        found: Tokens = {}
        for kind, params in kinds.items():
            outputs = llm.generate(prompts, params, lora_request=named, use_tqdm=False)
            found[kind] = [list(output.outputs[0].token_ids) for output in outputs]
        llm.llm_engine.check_integrity()
        llm.shutdown()
    return found
