"""Times the host's part of a decode step without a model: python scripts/bench_host.py

schedule: Scheduler.schedule · build: BatchBuilder.build · update: Scheduler.update_from_output, with --publish also changes of
the prefix cache · text: OutputProcessor.process with the demo model's tokenizer, apart. "step" is schedule + build + update.
"""

import argparse
import gc
import statistics
import time
from typing import NamedTuple

from jaxllm.config import CacheOptions, EngineConfig, SchedulerOptions
from jaxllm.hub import DEMO, resolve_model
from jaxllm.kernel_policy import GPU
from jaxllm.request import EngineCoreRequest, Request
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.rows import Rows
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.output_processor import OutputProcessor
from jaxllm.text.tokenizer import load_tokenizer


class Times(NamedTuple):
    """Milliseconds of a step."""

    schedule: float
    build: float
    update: float
    text: float
    total: float
    """Without output processing."""
    best_total: float
    """Total of the fastest step: what a machine without other work would show."""


def step_times(num_running: int, num_waiting: int, prompt_len: int, num_steps: int, *, publish: bool = False) -> Times:
    """Median times while `num_running` requests decode and `num_waiting` wait."""
    options = SchedulerOptions(max_num_seqs=num_running, max_num_batched_tokens=8192)
    blocks_per_request = (prompt_len + num_steps) // 16 + 2
    scheduler = Scheduler(
        options,
        CacheOptions(enable_prefix_caching=True),
        num_blocks=num_running * blocks_per_request * 2,
        max_model_len=1 << 20,
    )
    if publish:
        scheduler.publish_cache_events()
    params = SamplingParams(max_tokens=num_steps + 16, temperature=0.7, top_p=0.9, seed=1)
    processor = OutputProcessor(load_tokenizer(resolve_model(DEMO), name=DEMO))
    for i in range(num_running + num_waiting):
        spec = EngineCoreRequest(
            request_id=f"request-{i}", prompt_token_ids=[i % 4096] * prompt_len, sampling_params=params, eos_token_ids=(0, 1)
        )
        scheduler.add_request(Request(spec))
        processor.add(ParentRequest(spec.request_id, spec.request_id, None, spec.prompt_token_ids, params, [spec], time.time()))
    engine = EngineConfig.from_options(max_num_seqs=num_running, max_num_batched_tokens=8192)
    rows = Rows(num_running)
    builder = BatchBuilder(rows, Buckets.choose(engine, GPU), block_size=16, max_blocks=blocks_per_request)
    gc.collect()
    gc.freeze()
    schedule_seconds, build_seconds, update_seconds, text_seconds = [], [], [], []
    num_decode_steps = 0
    while num_decode_steps < num_steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            rows.remove(request_id)
        builder.build(plan)
        built = time.perf_counter()
        done = {r.request_id for r in scheduler.running if r.num_computed_tokens >= r.num_tokens}
        result = ModelRunnerOutput({row.request_id: [7] for row in plan.rows if row.request_id in done})
        updating = time.perf_counter()
        outputs = scheduler.update_from_output(plan, result)
        scheduler.take_cache_events()
        updated = time.perf_counter()
        processor.process(outputs)
        processed = time.perf_counter()
        if plan.num_tokens == len(plan.rows) - len(plan.new_requests) == num_running:
            schedule_seconds.append(scheduled - start)
            build_seconds.append(built - scheduled)
            update_seconds.append(updated - updating)
            text_seconds.append(processed - updated)
            num_decode_steps += 1
    totals = [sum(pair) for pair in zip(schedule_seconds, build_seconds, update_seconds, strict=True)]
    parts = (schedule_seconds, build_seconds, update_seconds, text_seconds, totals)
    medians = (statistics.median(seconds) for seconds in parts)
    return Times(*(1e3 * seconds for seconds in (*medians, min(totals))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--prompt-len", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--publish", action="store_true", help="also publish what is in the prefix cache, as replicas do")
    arguments = parser.parse_args()
    print("running  waiting  schedule ms  build ms  update ms  step ms  best step ms  text ms")
    for num_waiting in arguments.waiting:
        for num_running in arguments.running:
            times = step_times(num_running, num_waiting, arguments.prompt_len, arguments.steps, publish=arguments.publish)
            print(
                f"{num_running:7}  {num_waiting:7}  {times.schedule:11.3f}  {times.build:8.3f}  {times.update:9.3f}  "
                f"{times.total:7.3f}  {times.best_total:12.3f}  {times.text:8.3f}"
            )


if __name__ == "__main__":
    main()
