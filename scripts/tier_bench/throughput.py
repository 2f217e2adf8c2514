"""Speed of many requests with host memory and without."""

import statistics
import time
from typing import Any

from jaxllm import LLM
from jaxllm.measuring.runs import greedy
from scripts.tier_bench.engines import Bench, empty, new_prompts, run_some_at_a_time


def never_full(bench: Bench) -> None:
    """Requests that fit the cache together: host memory is of no use and must not cost anything."""
    sizes, engines = bench.sizes, bench.engines.pair(bench.sizes.num_blocks)
    length, num_output = sizes.short
    speeds: dict[bool, list[float]] = {False: [], True: []}
    before = _num_copied(engines[True])
    for number in range(sizes.runs + 1):
        for tier in (False, True) if number % 2 else (True, False):
            empty(engines[tier])
            prompts = new_prompts(engines[tier], [length] * sizes.rows, number)
            seconds = run_some_at_a_time(engines[tier], prompts, num_output, sizes.rows)
            if number:  # the first run does not count
                speeds[tier].append(sizes.rows * (length + num_output) / seconds)
    medians = {tier: statistics.median(each) for tier, each in speeds.items()}
    for tier, each in speeds.items():
        note = f"median of {len(each)}, {min(each):.0f} to {max(each):.0f}"
        bench.rows.note(f"{sizes.rows} requests that fit the cache, {_told(tier)}", medians[tier], "tokens/s", note=note)
    ratio = 100 * medians[True] / medians[False]
    bench.rows.note("speed in a cache that is never full, with over without", ratio, "%", 99.5, more=True)
    bench.rows.note("blocks copied in a cache that is never full", _num_copied(engines[True]) - before, "blocks", 0)


def preempt(bench: Bench) -> None:
    """Requests whose prompts fit the cache and whose answers do not."""
    sizes, speeds = bench.sizes, {}
    length, num_output = sizes.long_answer
    # One block more, as one never has contents.
    engines = bench.engines.pair(sizes.quarter_blocks + 1, max_model_len=length + num_output)
    for tier, llm in engines.items():
        core: Any = llm.llm_engine.core
        prompts = new_prompts(llm, [length] * sizes.long_rows, 3)
        run_some_at_a_time(llm, prompts[:1], 2, 1)  # does not count
        before = core.stats()
        speeds[tier] = sizes.long_rows * num_output / run_some_at_a_time(llm, prompts, num_output, sizes.long_rows)
        after = core.stats()
        note = f"{after.num_preemptions - before.num_preemptions} preemptions"
        if tier:
            note += f", {_counted(before, after, loaded='num_loaded_blocks', lost='num_skipped_stores')}"
        bench.rows.note(
            f"{sizes.long_rows} requests in a quarter of their cache, {_told(tier)}", speeds[tier], "tokens/s", note=note
        )
    bench.rows.note("gain of host memory with preemptions", speeds[True] / speeds[False], "×", 1.3, more=True)


def reuse(bench: Bench) -> None:
    """Conversations in turn, whose contexts do not fit the device together."""
    speeds = {}
    for tier, llm in bench.engines.pair(bench.sizes.num_blocks).items():
        speeds[tier], note = _conversations(bench, llm)
        bench.rows.note(f"conversations, {_told(tier)}", speeds[tier], "tokens/s", note=note)
    bench.rows.note("gain of host memory", speeds[True] / speeds[False], "×", 3.0, more=True)


def _conversations(bench: Bench, llm: LLM) -> tuple[float, str]:
    """Output tokens per second, and a note."""
    sizes, core = bench.sizes, llm.llm_engine.core
    contexts: list[list[int]] = [[] for _ in range(sizes.conversations)]
    before: Any = core.stats()
    num_tokens, began = 0, time.perf_counter()
    for turn in range(sizes.turns):
        more = new_prompts(llm, [sizes.turn if turn else sizes.first] * sizes.conversations, turn)
        prompts = [{"prompt_token_ids": context + new["prompt_token_ids"]} for context, new in zip(contexts, more, strict=True)]
        outputs = llm.generate(prompts, greedy(sizes.num_output), use_tqdm=False)  # type: ignore[arg-type]
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            contexts[index] = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)
            num_tokens += sizes.num_output
    seconds, after = time.perf_counter() - began, core.stats()
    return num_tokens / seconds, _counted(before, after, loaded="num_loaded_blocks", lost="num_skipped_stores")


def no_reuse(bench: Bench) -> None:
    """Prompts that never come back."""
    sizes, speeds = bench.sizes, {}
    for tier, llm in bench.engines.pair(sizes.num_blocks).items():
        core: Any = llm.llm_engine.core
        prompts, before = new_prompts(llm, [sizes.new_prompt] * 4 * sizes.conversations, 7), core.stats()
        seconds = run_some_at_a_time(llm, prompts, sizes.num_output, sizes.new_rows)
        speeds[tier], after = len(prompts) * (sizes.new_prompt + sizes.num_output) / seconds, core.stats()
        note = _counted(before, after, stored="num_stored_blocks", lost="num_skipped_stores") if tier else ""
        bench.rows.note(f"new prompts, {_told(tier)}", speeds[tier], "tokens/s", note=note)
    bench.rows.note("speed with host memory over without", 100 * speeds[True] / speeds[False], "%", 98.0, more=True)


def _num_copied(llm: LLM) -> int:
    stats: Any = llm.llm_engine.core.stats()
    return stats.num_stored_blocks + stats.num_loaded_blocks  # type: ignore[no-any-return]


def _counted(before: Any, after: Any, **names: str) -> str:
    """How many blocks had each fate between two statistics. names: of their fields, by fate."""
    counts = {fate: getattr(after, name) - getattr(before, name) for fate, name in names.items()}
    return ", ".join(f"{count} blocks {fate}" for fate, count in counts.items())


def _told(tier: bool) -> str:
    return f"{'with' if tier else 'without'} host memory"
