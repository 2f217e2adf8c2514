"""Engines over 2 and 4 devices: they start with the default memory setting, and give one device's answers in float32."""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome, engine, shapes, skip, tensor_parallel_traffic
from scripts.gpu_checks.tensor_parallel_traffic import full_precision, guarded

SIZES = (2, 4)
NUM_LAYERS = 2
Tokens = dict[str, list[list[int]]]
"""Tokens of each request, by the kind of sampling."""


def check(*, tiny: bool, deadline: float, sizes: Sequence[int] = SIZES, share: tuple[int, int] = (0, 1)) -> Iterator[Outcome]:
    """Every size that the visible devices allow; nothing begins after the deadline (`time.perf_counter`).

    share (index, number of shares): of two, the first starts engines with the default memory, the second compares answers.
    """
    starts, compares = share[0] == 0, share[0] == share[1] - 1
    num_devices = len(jax.devices())
    allowed = [size for size in sizes if size <= num_devices]
    for size in sizes if starts else ():
        if size not in allowed:
            yield skip(f"{size} devices", f"{num_devices} visible, tensor parallelism over {size} was not checked")
    if not allowed:
        return
    shape = shapes.tiny(shapes.LLAMA_8B) if tiny else shapes.LLAMA_8B
    shape = shape | {"num_hidden_layers": 1 if tiny else NUM_LAYERS}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape))
        # First, because the first engine of a process decides how much memory JAX takes.
        for size in allowed if starts else ():
            yield guarded(f"{size} devices, default start of {_title(tiny)}", deadline, _starts, directory, size, tiny=tiny)
        if starts:
            # All that the engines before had must be there again: JAX's pool is one for the process.
            name = f"{size} devices, default start again in the same process"
            yield guarded(name, deadline, _starts, directory, size, tiny=tiny)
        if compares:
            yield from _tokens(directory, _title(tiny), (1, *allowed), deadline, tiny=tiny)
            if allowed[-1] == 2:  # over four devices the demo model's two KV heads are copied
                Path(directory, "config.json").write_text(
                    json.dumps(shape | {"num_key_value_heads": 1, "num_hidden_layers": 1})
                )
                yield from _tokens(directory, "the same with one layer and one KV head", (1, 2), deadline, tiny=tiny)
            yield from tensor_parallel_traffic.check(tiny=tiny, deadline=deadline, sizes=allowed)


def _tokens(directory: str, name: str, sizes: Sequence[int], deadline: float, *, tiny: bool) -> Iterator[Outcome]:
    expected: Tokens = {}
    for size in sizes:
        found = guarded(
            f"{size} devices, float32 tokens of {name}", deadline, _equal, directory, size, tiny=tiny, expected=expected
        )
        if size > 1 or found.failed:
            yield found


def _title(tiny: bool) -> str:
    return "a toy model" if tiny else f"Llama-3.1-8B ({NUM_LAYERS} of 32 layers, default sizes)"


def _starts(directory: str, size: int, *, tiny: bool) -> tuple[bool, str]:
    """With default options, and it answers all prompts of the part `engine`."""
    load = engine.TINY if tiny else engine.FULL
    options = {**load.options, "num_gpu_blocks_override": load.num_blocks, "max_model_len": load.max_model_len} if tiny else {}
    prompts = [list(prompt) for prompt in load.prompts(64 if tiny else shapes.LLAMA_8B["vocab_size"])]
    logprobs = None if tiny else 1  # their program is the slowest to compile
    params = SamplingParams(temperature=0.0, max_tokens=load.num_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    begun = time.perf_counter()
    with _engine(directory, size, **options) as llm:
        seconds = time.perf_counter() - begun
        outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        core: Any = llm.llm_engine.core
        memory = _free_memory()
        num_tokens = core.memory_plan.num_cache_tokens
        llm.llm_engine.check_integrity()
    answers = [output.outputs[0] for output in outputs]
    whole = sum(len(answer.token_ids) == load.num_tokens for answer in answers)
    finite = all(np.isfinite(answer.cumulative_logprob or 0.0) for answer in answers)
    detail = f"started in {seconds:.0f} s with a cache of {num_tokens} tokens; {whole} of {len(prompts)} requests answered"
    return whole == len(prompts) and finite, detail + f"{'' if finite else ', some logprobs not finite'}; {memory}"


def _equal(model: str, size: int, *, tiny: bool, expected: Tokens) -> tuple[bool, str]:
    """Greedy and seeded tokens equal `expected`, which the first call fills."""
    count, num_tokens = (4, 6) if tiny else (32, 24)
    prompts = [[1 + (7 * i + j) % 60 for j in range(1 + 5 * i)] for i in range(count)]
    lengths = [num_tokens - i % 3 for i in range(count)]
    kinds = {
        "greedy": [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths],
        "seeded": [
            SamplingParams(temperature=1.0, seed=i, max_tokens=n, ignore_eos=True, detokenize=False)
            for i, n in enumerate(lengths)
        ],
    }
    rows, tokens = (4, 32) if tiny else (32, 512)
    options = {
        "dtype": "float32",
        "max_num_seqs": rows,
        "max_num_batched_tokens": tokens,
        "decode_buckets": [rows],
        "token_buckets": [tokens],
        "max_model_len": 64 if tiny else 512,
        "num_gpu_blocks_override": 33 if tiny else 1025,
        "warmup": "lazy",
    }
    found: Tokens = {}
    with full_precision(), _engine(model, size, **options) as llm:
        for kind, params in kinds.items():
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            found[kind] = [list(output.outputs[0].token_ids) for output in outputs]
    if not expected:
        expected.update(found)
    equal = {kind: sum(a == b for a, b in zip(found[kind], expected[kind], strict=True)) for kind in kinds}
    detail = ", ".join(f"{number} of {count} {kind} requests" for kind, number in equal.items())
    return all(number == count for number in equal.values()), f"{detail} equal one device's"


@contextlib.contextmanager
def _engine(model: str, size: int, **options: Any) -> Iterator[LLM]:
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(model, tensor_parallel_size=size, use_progress_bar=False, **dummy, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def _free_memory() -> str:
    """Memory of each GPU outside JAX's pool and all contexts, from the driver."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()
        free = [int(total) - int(used) for used, total in (line.split(",") for line in lines)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return "free memory unknown (no nvidia-smi)"
    return f"free outside the pool: {', '.join(f'{mib} MiB' for mib in free)}"
