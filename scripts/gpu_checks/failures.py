"""The demo model in float32: failed steps and sleep change no token, and sleep gives the memory back."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import LLM, SamplingParams
from jaxllm.device_errors import Failure, kind_of
from jaxllm.engine.fault_points import injected
from scripts.gpu_checks import Outcome

SMALLEST_BYTES = 1 << 20


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Seeded requests whose steps fail: by injection and (on a GPU) from a real lack of memory."""
    count, num_tokens = (3, 6) if tiny else (32, 64)
    prompts = [[1 + (7 * i + j) % 500 for j in range(4 + i)] for i in range(count)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True) for i in range(count)]
    rows, tokens = (4, 32) if tiny else (32, 512)
    llm = LLM(
        "demo",
        dtype="float32",
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        decode_buckets=[rows],
        token_buckets=[tokens],
        max_model_len=64 if tiny else 512,
        num_gpu_blocks_override=33 if tiny else 1025,
        warmup="lazy",
        use_progress_bar=False,
    )
    core: Any = llm.llm_engine.core

    def run() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    def compared(name: str, found: list[list[int]], more: str = "", *, passed: bool = True) -> Outcome:
        llm.llm_engine.check_integrity()
        equal = sum(a == b for a, b in zip(found, expected, strict=True))
        return Outcome(name, passed and equal == count, f"{equal} of {count} requests equal{more}")

    expected = run()
    with injected("step:3:oom,result:7:oom,draw:2:oom"):
        yield compared("injected out of memory", run())
    if jax.default_backend() != "cpu":
        with no_memory(core, jax.devices()[0]) as errors:
            found = run()
        yield compared("real out of memory", found, f" after {len(errors)} failed steps", passed=is_out_of_memory(errors))
    for level in (1, 2):
        before = _bytes_in_use()
        llm.sleep(level)
        asleep = _bytes_in_use()
        llm.wake_up()
        yield compared(
            f"sleep at level {level}",
            run(),
            f", {before >> 20} MiB in use before, {asleep >> 20} asleep",
            passed=asleep < before or not before,
        )
    llm.shutdown()


@contextlib.contextmanager
def no_memory(core: Any, device: jax.Device) -> Iterator[list[Exception]]:
    """Takes a device's memory from an engine until its first step fails. Gives the errors of the steps that failed."""
    recover, hog, errors = core._failures.recover, _all_memory(device), list[Exception]()

    def recovering(loop: Any, error: Exception) -> Any:
        errors.append(error)
        hog.clear()
        return recover(loop, error)

    core._failures.recover = recovering
    try:
        yield errors
    finally:
        core._failures.recover = recover
        hog.clear()


def is_out_of_memory(errors: Sequence[Exception]) -> bool:
    """Whether steps failed, all of them for lack of memory."""
    return bool(errors) and all(kind_of(error) is Failure.OUT_OF_MEMORY for error in errors)


def _all_memory(device: jax.Device) -> list[jax.Array]:
    """Arrays that take nearly all memory left in the device's pool. Avoids sizes that cannot fit: XLA waits 10 s for each."""
    arrays, size = [], 1 << 36
    while size >= SMALLEST_BYTES:
        stats = device.memory_stats()
        try:
            if size <= stats["bytes_limit"] - stats["bytes_in_use"]:
                arrays.append(jax.block_until_ready(jnp.zeros(size, jnp.int8, device=device)))
                continue
        except jax.errors.JaxRuntimeError:  # the rest is fragmented
            pass
        size //= 2
    return arrays


def _bytes_in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    return 0 if stats is None else stats["bytes_in_use"]
