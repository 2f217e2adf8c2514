"""Sums up where a device's time goes in many requests at once, by the steps that the scheduler plans for them. Needs no device.

usage: account_for_steps.py LENGTHS.json | 128 [--running 1024] [--step-tokens 3072]

LENGTHS.json: {"requests": [[prompt, output], …]}; 128: 1000 requests of 128 + 128 tokens. Products of a step take as long as its tokens,
padded to a program's size, need for their operations, or as its weights need to be read; attention of requests that decode takes as long
as their keys and values need to be read; norms, rope and the like a share of products. The defaults are those of an 8B model on an H200.
"""

import argparse
import bisect
import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.config import CacheOptions, EngineConfig, SchedulerOptions
from jaxllm.kernel_policy import GPU
from jaxllm.request import EngineCoreRequest, Request
from jaxllm.runner.buckets import Buckets
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput
from scripts.measuring.command_line import script_parser

Step = tuple[bool, int, int]
"""Whether all requests of a step decode, its tokens, and the tokens of context of its requests."""


def main() -> None:
    parser = script_parser(__doc__, 3)
    parser.add_argument("requests", metavar="LENGTHS.json|128")
    parser.add_argument("--running", type=int, default=1024, help="most requests in a step (default: 1024)")
    parser.add_argument("--step-tokens", type=int, default=3072, help="most tokens of a step (default: 3072)")
    parser.add_argument("--weight-gb", type=float, default=15.0, help="weights that a step reads")
    parser.add_argument("--gflop", type=float, default=16.06, help="operations of products for a token, in 10^9")
    parser.add_argument("--context-bytes", type=float, default=131072, help="keys and values of a token")
    parser.add_argument("--copy", type=float, default=3.75, help="TB/s that products read weights with")
    parser.add_argument("--attention", type=float, default=3.6, help="TB/s that attention reads with")
    parser.add_argument("--product", type=float, default=665, help="TFLOP/s of products")
    parser.add_argument("--others", type=float, default=0.05, help="what norms and the like take, as a share of products")
    args = parser.parse_args()
    is_even = args.requests == "128"
    lengths = [(128, 128)] * 1000 if is_even else json.loads(Path(args.requests).read_text(encoding="utf-8"))["requests"]
    steps = planned_steps(lengths, args.running, args.step_tokens)
    seconds = account(steps, args)
    total = sum(seconds.values())
    print(f"{len(steps)} steps, of which {sum(is_decode for is_decode, *_ in steps)} of decodes alone")
    for part, found in seconds.items():
        print(f"{part:10} {found:7.2f} s {100 * found / total:5.1f} %")
    print(f"{'sum':10} {total:7.2f} s, {sum(output for _, output in lengths) / total:.0f} output tokens/s")


def planned_steps(lengths: list[tuple[int, int]], max_running: int, step_tokens: int) -> list[Step]:
    """The steps of requests that are given at once, whose caches all have room."""
    blocks = sum(-(-(prompt + output) // 16) + 1 for prompt, output in lengths)
    longest = max(prompt + output for prompt, output in lengths)
    options = SchedulerOptions(max_num_seqs=max_running, max_num_batched_tokens=step_tokens)
    scheduler = Scheduler(
        options,
        CacheOptions(enable_prefix_caching=False),
        num_blocks=blocks + 1,
        max_model_len=longest + 1,
        token_sizes=_buckets(max_running, step_tokens).tokens,
    )
    for number, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        spec = EngineCoreRequest(
            request_id=str(number), prompt_token_ids=[5] * prompt, sampling_params=params, eos_token_ids=(0, 1)
        )
        scheduler.add_request(Request(spec))
    steps = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        steps.append(
            (plan.num_tokens == len(plan.rows), plan.num_tokens, sum(r.num_computed_tokens for r in scheduler.running))
        )
        sampled = {each.request_id for each in scheduler.running if each.num_computed_tokens >= each.num_tokens}
        result = ModelRunnerOutput({row.request_id: [7] for row in plan.rows if row.request_id in sampled})
        scheduler.update_from_output(plan, result)
    return steps


def account(steps: list[Step], args: argparse.Namespace) -> dict[str, float]:
    """Seconds of all steps by what takes them."""
    buckets = _buckets(args.running, args.step_tokens)

    def products(num_tokens: int) -> float:
        return max(num_tokens * args.gflop / args.product / 1e3, args.weight_gb / args.copy / 1e3)

    seconds: dict[str, float] = collections.defaultdict(float)
    for is_decode, num_tokens, context in steps:
        sizes = buckets.decode_rows if is_decode else buckets.tokens
        padded = products(sizes[bisect.bisect_left(sizes, num_tokens)])
        seconds["products"] += products(num_tokens)
        seconds["padding"] += padded - products(num_tokens)
        seconds["attention"] += context * args.context_bytes / args.attention / 1e12
        seconds["others"] += padded * args.others
    return seconds


def _buckets(max_running: int, step_tokens: int) -> Buckets:
    return Buckets.choose(EngineConfig.from_options(max_num_seqs=max_running, max_num_batched_tokens=step_tokens), GPU)


if __name__ == "__main__":
    main()
