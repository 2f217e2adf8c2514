"""Prints where a step's time goes: by kernel and kind of kernel, the gaps between kernels, and the host's share.

usage: profile_step.py MODEL_DIR [--decode 1,64] [--prefill 1024x16] [--mixed 256+512] [--context 1024] [engine options as name=value …]

    --decode 1,64        one token for each of so many requests of --context tokens
    --prefill 1024x16    16 prompts of 1024 tokens, computed at once as far as max_num_batched_tokens allows
    --mixed 256+512      one token for each of 256 requests, with 512 tokens of prompts, in every step

Steps are timed without a trace first; the trace that follows has the gaps and what the profiler itself costs.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.measuring import trace

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {trace.COMMAND_BUFFERS_WHILE_PROFILING}"

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.describe import describe


def main() -> None:
    """Profile each kind of step; a mixed one in a separate engine, whose steps are that large."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("model", type=Path)
    parser.add_argument("--decode", default="", help="numbers of rows; default: 1,64 if no other kind is asked for")
    parser.add_argument("--prefill", default="", help="prompts as TOKENSxCOUNT, with commas between several")
    parser.add_argument("--mixed", default="", help="ROWS+TOKENS, with commas between several")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="steps timed without a trace")
    parser.add_argument("--traced", type=int, default=10, help="steps traced")
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("options", nargs="*", type=engine_option, help="engine options, name=value")
    args = parser.parse_intermixed_args()
    if not (args.decode or args.prefill or args.mixed):
        args.decode = "1,64"
    decodes = [int(rows) for rows in args.decode.split(",") if rows]
    prefills = [tuple(map(int, text.split("x"))) for text in args.prefill.split(",") if text]
    print(jax.devices()[0].device_kind, os.environ["XLA_FLAGS"])
    if decodes or prefills:
        rows = sorted({*decodes, *(count for _, count in prefills)})
        step_tokens = max([args.context, *(tokens * count for tokens, count in prefills)])
        profiler = Profiler(
            args, {"max_num_seqs": rows[-1], "decode_buckets": rows, "max_num_batched_tokens": min(step_tokens, 8192)}
        )
        for batch in decodes:
            profiler.decode(batch, args.context)
        for tokens, count in prefills:
            profiler.prefill(tokens, count)
        profiler.core.shutdown()
    for text in filter(None, args.mixed.split(",")):
        batch, tokens = map(int, text.split("+"))
        size = batch + tokens
        sizes = {
            "max_num_seqs": batch + 8,
            "decode_buckets": [batch + 8],
            "max_num_batched_tokens": size,
            "token_buckets": [size],
        }
        profiler = Profiler(args, sizes)
        profiler.mixed(batch, args.context, tokens)
        profiler.core.shutdown()


class Profiler:
    """An engine, and the requests that keep it at one kind of step."""

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any]):
        options = {"load_format": "dummy", "enable_prefix_caching": False, "max_model_len": 4096, "warmup": "lazy", **sizes}
        options |= dict(args.options)
        self.args = args
        self.core = EngineCore(EngineConfig.from_options(model=str(args.model), **options))
        self.core.finish_compiling()
        self.rng = np.random.default_rng(0)
        self.names = (f"request {i}" for i in itertools.count())
        self.current: set[str] = set()
        print(f"\n{options}")

    def decode(self, batch: int, context: int) -> None:
        self.fill(batch, context)
        self.run(20)
        self.measure(f"decode of {batch} rows, context {context}", self.run)
        self.clear()

    def prefill(self, tokens: int, count: int) -> None:
        """Whole prompts again and again; times are of all steps that it takes."""

        def once(times: int) -> None:
            for _ in range(times):
                self.add(tokens, count, max_tokens=1)
                while self.core.has_unfinished_requests():
                    self.core.step()

        once(2)
        self.measure(f"prefill {tokens}x{count} (a step here is the whole)", once, num_steps=max(1, self.args.steps // 10))
        self.clear()

    def mixed(self, batch: int, context: int, tokens: int) -> None:
        """Prompts of 2048 tokens wait during the decodes, so that every step takes as many of their tokens as it can."""
        self.fill(batch, context)
        length = min(2048, self.core.max_model_len - 1)
        steps = self.args.steps + self.args.traced + 45
        self.add(length, -(-steps * tokens // length) + 2, max_tokens=1)
        self.run(20)
        before = self.core.stats().num_waiting
        self.measure(f"mixed step of {batch} decodes at context {context} and {tokens} prompt tokens", self.run)
        if self.core.stats().num_waiting == 0 or before == 0:
            print("  WRONG: the prompts ran out, not every step was mixed")
        self.clear()

    def measure(self, title: str, run: Any, num_steps: int | None = None) -> None:
        """Time steps without a trace, then trace some."""
        core, num_steps = self.core, num_steps or self.args.steps
        dispatch, launch, wait = core.runner.dispatch_seconds, core.runner.launch_seconds, core.loop.wait_seconds
        start = time.perf_counter()
        run(num_steps)
        seconds = time.perf_counter() - start
        print(
            f"\n{title}: {seconds / num_steps * 1e3:.3f} ms; host: dispatch "
            f"{(core.runner.dispatch_seconds - dispatch) / num_steps * 1e3:.3f} ms, launch "
            f"{(core.runner.launch_seconds - launch) / num_steps * 1e3:.3f} ms, waiting for the device "
            f"{(core.loop.wait_seconds - wait) / num_steps * 1e3:.3f} ms"
        )

        def steps(count: int) -> None:
            # Steps that are under way must not be counted with those of the stretch, nor these be left out.
            run(count)
            core.runner.wait()

        found, _ = trace.record(lambda: steps(5 if run == self.run else 1), lambda: steps(self.args.traced))
        num_layers = core.model_config.num_layers
        print(describe(found, num_steps=self.args.traced, num_layers=num_layers, top=self.args.top), flush=True)

    def add(self, tokens: int, count: int, max_tokens: int) -> None:
        for request_id in itertools.islice(self.names, count):
            prompt = self.rng.integers(0, self.core.model_config.vocab_size - 256, tokens).tolist()
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
            self.core.add_request(EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params))
            self.current.add(request_id)

    def fill(self, batch: int, context: int) -> None:
        """Have this many requests in decode."""
        self.add(context, batch, max_tokens=1000)
        waiting = set(self.current)
        while waiting:
            waiting -= {output.request_id for output in self.core.step()}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.core.step()

    def clear(self) -> None:
        """End every request."""
        self.core.abort_requests(sorted(self.current))
        self.current.clear()
        while self.core.has_unfinished_requests():
            self.core.step()


if __name__ == "__main__":
    main()
