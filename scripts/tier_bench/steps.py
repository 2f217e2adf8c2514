"""Cost of copies and tiers: copies alone, steps with copies, and host time of steps without any."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from jaxllm.device_ops import CopyBlocks
from jaxllm.measuring.runs import SETTLING_STEPS, decoding, greedy
from scripts.tier_bench.copies import Copies
from scripts.tier_bench.engines import Bench, empty, new_prompts, without_tiers

GOAL_SPEED = 30.0
"""GB/s of copies with which a step may take a tenth longer."""


def copies(bench: Bench) -> None:
    """Each operation alone, on an idle engine."""
    (llm,) = bench.engines.use({"num_gpu_blocks_override": bench.sizes.num_blocks})
    made = Copies(llm)
    batch_bytes = made.size * made.copier.block_bytes
    note = f"{made.size} blocks of {made.copier.block_bytes / 2**20:.2f} MiB"
    for name, ops, goal in (
        ("device to host", made.gathers, 44.0),
        ("host to device", made.loads, 44.0),
    ):
        seconds, inside = zip(*(made.time(ops()) for _ in range(bench.sizes.repeats)), strict=True)
        median, within = statistics.median(seconds), statistics.median(inside)
        told = f"{note}, {1e3 * median:.2f} ms"
        bench.rows.note(f"{name}, one batch", batch_bytes / median / 1e9, "GB/s", goal, more=True, note=told)
        if within:
            bench.rows.note(f"{name}, the transfer in it", batch_bytes / within / 1e9, "GB/s")
    for name, run in (("device to host", made.pipelined_stores), ("reload", made.pipelined_loads)):
        began = time.perf_counter()
        count = run(bench.sizes.repeats * made.copier.num_staging)
        speed = count * batch_bytes / (time.perf_counter() - began) / 1e9
        bench.rows.note(f"{name}, batches in a row", speed, "GB/s", 44.0, more=True)
    made.close()


def beside(bench: Bench) -> None:
    """Decodes alone, with stores and with loads: as many as the bus takes, and as many as the goal asks for."""
    sizes = bench.sizes
    (llm,) = bench.engines.use({})
    made = Copies(llm)
    prompts = new_prompts(llm, [sizes.context] * sizes.rows, 0)
    batch_bytes, alone = made.size * made.copier.block_bytes, 0.0
    kinds: list[tuple[str, Callable[[], CopyBlocks] | None, float | None]] = [
        ("nothing", None, None),
        ("stores", made.gathers, None),
        ("loads", made.loads, None),
        (f"stores at {GOAL_SPEED:.0f} GB/s", made.gathers, GOAL_SPEED),
        (f"loads at {GOAL_SPEED:.0f} GB/s", made.loads, GOAL_SPEED),
    ]
    for name, begin, speed in kinds:
        made.forget()
        with decoding(llm.llm_engine, prompts, [greedy(sizes.num_steps + 64)] * sizes.rows) as step:
            seconds, num_copies, num_begun, first_at = [], 0, 0, time.perf_counter()
            for _ in range(sizes.num_steps):
                began = time.perf_counter()
                most = None if speed is None else 1 + int((began - first_at) * speed * 1e9 / batch_bytes) - num_begun
                over, new = made.go_on(begin, most)
                num_copies, num_begun = num_copies + over, num_begun + new
                step()
                seconds.append(time.perf_counter() - began)
        total, ordered = sum(seconds), sorted(seconds)
        mean, tail = 1e3 * total / len(seconds), 1e3 * ordered[int(0.99 * (len(ordered) - 1))]
        alone = alone or mean
        goal = 1.1 * alone if speed else None
        bench.rows.note(f"step of {sizes.rows} decodes, {name}", mean, "ms", goal, note=f"p99 {tail:.2f} ms")
        if begin:
            goal = GOAL_SPEED if name == "loads" else None
            bench.rows.note(f"{name} meanwhile", num_copies * batch_bytes / total / 1e9, "GB/s", goal, more=True)
    made.close()


def launch(bench: Bench) -> None:
    """Host time of decode steps with the engine's tier and without it, in turn; nothing is copied. One engine makes both: the times of two
    that have none differ by as much as a tier costs."""
    sizes = bench.sizes
    (llm,) = bench.engines.use({"num_gpu_blocks_override": sizes.num_blocks})
    empty(llm)
    core: Any = llm.llm_engine.core
    num_steps = 2 * sizes.stretches * (sizes.stretch_steps + SETTLING_STEPS) + SETTLING_STEPS
    # A request whose prompt is computed early decodes during the others' prompts.
    params = [greedy(min(num_steps + 64, sizes.max_model_len - sizes.launch_context))] * sizes.rows
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    prompts = new_prompts(llm, [sizes.launch_context] * sizes.rows, 1)
    with decoding(llm.llm_engine, prompts, params) as step:
        before = core.stats().num_stored_blocks
        for number in range(sizes.stretches):
            for tier in (False, True) if number % 2 else (True, False):
                with nullcontext() if tier else without_tiers(llm):
                    for _ in range(SETTLING_STEPS):  # those in flight were planned the other way
                        step()
                    found[tier] += [_host_microseconds(core, step) for _ in range(sizes.stretch_steps)]
        num_copied = core.stats().num_stored_blocks - before
    medians = {tier: [statistics.median(each) for each in zip(*times, strict=True)] for tier, times in found.items()}
    for tier, (whole, started) in medians.items():
        note = f"of that {started:.1f} µs to start it; median of {len(found[tier])}"
        name = f"host time of a step of {sizes.rows} decodes, {'with' if tier else 'without'} host memory"
        bench.rows.note(name, whole, "µs", note=note)
    whole, started = (with_tier - without for with_tier, without in zip(medians[True], medians[False], strict=True))
    note = f"of that {started:.1f} µs to start it" + f"; {num_copied} blocks were copied meanwhile" * bool(num_copied)
    bench.rows.note("host time that host memory adds to a decode step", whole, "µs", 5.0, note=note)


def _host_microseconds(core: Any, step: Callable[[], Any]) -> tuple[float, float]:
    """Host time of a step: of all, without the wait for the device, and of starting it on the device."""
    runner, loop = core.runner, core.loop
    waited, started, began = loop.wait_seconds, runner.dispatch_seconds, time.perf_counter()
    step()
    whole = time.perf_counter() - began - (loop.wait_seconds - waited)
    return 1e6 * whole, 1e6 * (runner.dispatch_seconds - started)
