"""Measures a long prompt on one device and on several that split its tokens (--prefill-context-parallel-size), with dummy weights.

    python scripts/bench_context.py --model DIRECTORY --sizes 1,4 --prompt-len 131072

Time to the first token of one prompt when nothing else runs, in chunks of max_num_prefill_tokens, and the time of a step in which so
many requests of that length decode. Every size runs in a separate process. On a machine without GPUs set JAX_NUM_CPU_DEVICES.

Options of the engine follow as name=value, such as max_num_batched_tokens=8192 or tensor_parallel_size=2.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.measuring.command_line import engine_option, script_parser

REPEATS = 3


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Times of one size, in seconds."""
    from jaxllm import LLM
    from jaxllm.measuring.runs import random_prompts, time_first_token
    from scripts.measuring.steps import time_steps

    given = dict(arguments.options)
    options = {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True, "use_progress_bar": False}
    options |= {"max_model_len": arguments.prompt_len + arguments.steps + 64, "max_num_seqs": 8}
    options |= {"prefill_context_parallel_size": arguments.size, **given}
    llm = LLM(model=arguments.model, **options)
    engine = llm.llm_engine
    engine.finish_compiling()
    config: Any = engine.core
    chunk = config.config.scheduler.max_step_tokens

    def first_token(seed: int) -> float:
        """Seconds until a request has a token."""
        return time_first_token(engine, *random_prompts([arguments.prompt_len], engine.model_config.vocab_size, seed))

    try:
        firsts = [first_token(seed) for seed in range(1 + REPEATS)]
        prompts = random_prompts([arguments.prompt_len] * arguments.rows, engine.model_config.vocab_size, seed=1 + REPEATS)
        step = time_steps(engine, prompts, arguments.steps, engine.max_model_len - arguments.prompt_len).ms_per_step / 1e3
        num_tokens = config.memory_plan.num_cache_tokens
        return {"chunk": chunk, "first_token": min(firsts[1:]), "step": step, "cache_tokens": num_tokens}
    finally:
        llm.shutdown()


def main() -> None:
    """Measure and print."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with config.json")
    parser.add_argument("--sizes", default="1,2,4", help="values of prefill_context_parallel_size, the first to compare with")
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", type=engine_option, metavar="name=value")
    arguments = parser.parse_args()
    if arguments.size is not None:
        print(json.dumps(measure(arguments)))
        return
    first: dict[str, float] = {}
    for size in map(int, arguments.sizes.split(",")):
        ran = subprocess.run([sys.executable, *sys.argv, "--size", str(size)], stdout=subprocess.PIPE, text=True)
        if ran.returncode:
            sys.exit(f"size {size} failed, see above")
        found = json.loads(ran.stdout.splitlines()[-1])
        first = first or found
        rate = arguments.prompt_len / found["first_token"]
        print(
            f"{size} x: first token of {arguments.prompt_len} after {1e3 * found['first_token']:.0f} ms ({rate:.0f} tokens/s, chunks of "
            f"{found['chunk']}), {first['first_token'] / found['first_token']:.2f} times as fast; a step of {arguments.rows} "
            f"{1e3 * found['step']:.2f} ms, {first['step'] / found['step']:.2f} times; cache {found['cache_tokens']} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
