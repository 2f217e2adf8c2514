"""Time to the first token of prompts whose blocks are in host memory or files, against computing them."""

import statistics
import tempfile
import time
from typing import Any

from jaxllm import LLM
from scripts.tier_bench.engines import Bench, Prompt, first_token_ms, new_prompts

_SETTLED_SECONDS = 0.2
"""Files are written once none is added for so long."""
_OPEN_SECONDS = 30.0
"""A directory is listed within this time."""


def reload(bench: Bench) -> None:
    """Prompts that are in host memory, and new ones. The cache has room for one prompt of the longest length, whose blocks all have to
    leave for them, and for three."""
    for num_prompts in (1, 3):
        _reload(bench, num_prompts)


def _reload(bench: Bench, num_prompts: int) -> None:
    sizes, goals = bench.sizes, {2048: 20.0, 32768: 130.0}
    longest = max(sizes.prompts) + 256
    (llm,) = bench.engines.use({"num_gpu_blocks_override": num_prompts * longest // 16 + 2, "max_model_len": longest})
    core: Any = llm.llm_engine.core
    for length in sizes.prompts:
        computed, loaded = [], []
        for number in range(3):
            prompt, *others = new_prompts(llm, [length] + [longest - 16] * num_prompts, number)
            computed.append(first_token_ms(llm, prompt))
            for other in others:
                first_token_ms(llm, other)
            before = core.stats().num_loaded_blocks
            loaded.append(first_token_ms(llm, prompt))
            if (count := core.stats().num_loaded_blocks - before) < 0.9 * (length // 16):
                print(f"{count} blocks of {length} tokens were loaded", flush=True)
        where = f"cache of {num_prompts * longest} tokens"
        bench.rows.note(f"first token, {length} tokens computed, {where}", min(computed), "ms")
        goal = goals.get(length) if num_prompts > 1 else None
        bench.rows.note(f"first token, {length} tokens from host memory, {where}", min(loaded), "ms", goal)


def disk(bench: Bench) -> None:
    """Prompts that an engine left in a directory, on another that starts later."""
    sizes = bench.sizes
    length, blocks = sizes.far_prompt, sizes.far_prompt // 16
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 3 * blocks // 2 + 2,
        "max_model_len": length + 64,
        "kv_offloading_size": sizes.far_host_gib,
        "kv_offloading_disk_size": 40.0,
    }
    with tempfile.TemporaryDirectory() as directory:
        options["kv_offloading_disk"] = directory
        bench.engines.close()
        (llm,) = bench.engines.use(options)
        prompts = new_prompts(llm, [length] * sizes.far_repeats, 11)
        others = new_prompts(llm, [length] * 3 * sizes.far_repeats, 12)
        first_token_ms(llm, others[0])  # does not count
        began, num_written = time.perf_counter(), 0
        for prompt in (*prompts, *others[1:]):
            if num_written < blocks * (len(prompts) + 1):
                first_token_ms(llm, prompt)
                num_written = _wait_for_files(llm)
        seconds = time.perf_counter() - began
        print(f"{num_written} files were written within {seconds:.1f} s, {blocks} a prompt", flush=True)
        bench.engines.close()
        (llm,) = bench.engines.use(options)
        _measure_disk(bench, llm, prompts, new_prompts(llm, [length] * (1 + sizes.far_repeats), 13))
        bench.engines.close()


def _measure_disk(bench: Bench, llm: LLM, prompts: list[Prompt], others: list[Prompt]) -> None:
    """prompts: those in files. others: new ones, which come last: as long as an engine knows no time of a step, it loads all."""
    core: Any = llm.llm_engine.core
    deadline = time.monotonic() + _OPEN_SECONDS
    while not core.stats().used_disk_bytes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no file was found in {_OPEN_SECONDS:g} s")
        time.sleep(0.01)
    length = bench.sizes.far_prompt
    for name, field in (("files", "num_disk_reads"), ("host memory, after files", "num_loaded_blocks")):
        found = []
        for prompt in prompts:
            before = core.stats()
            ms, after = first_token_ms(llm, prompt), core.stats()
            found.append((ms, getattr(after, field) - getattr(before, field), after.num_disk_reads - before.num_disk_reads))
        ms, count, num_read = sorted(found)[len(found) // 2]
        note = f"{count} blocks of {length // 16}" + f", {num_read} of them from files" * (field != "num_disk_reads")
        bench.rows.note(f"first token, {length} tokens from {name}", ms, "ms", note=note)
        speed = count * core.stats().host_block_bytes / ms / 1e6
        bench.rows.note(f"the same, until the first token, from {name}", speed, "GB/s")
    computed = [first_token_ms(llm, prompt) for prompt in others][1:]
    bench.rows.note(f"first token, {length} tokens computed, engine with files", statistics.median(computed), "ms")


def _wait_for_files(llm: LLM) -> int:
    """Run steps until no more files are written. Returns how many were, since the engine's start."""
    core: Any = llm.llm_engine.core
    before, number = -1, 0
    while (count := core.stats().num_disk_writes) != before:
        before, number = count, number + 1
        time.sleep(_SETTLED_SECONDS)
        first_token_ms(llm, new_prompts(llm, [8], number)[0])  # less than a block
    return before
