"""Measures LoRA adapters on an engine with dummy weights: steps with and without them, loading one, many with few slots.

    python scripts/bench_lora.py --model DIRECTORY --rows 1,64 --adapters 8 --rank 16

Steps: all prompts are computed, then so many steps of the same engine, without adapters and with them in turn; the requests have the
adapters one after the other. Loading: the time from a request that names an adapter which was never loaded, its files in the page
cache, to its first token, and the time of the same request once the adapter is in its slot. --zipf: many adapters are added, and
requests for them arrive one after the other by a Zipf distribution; the longest times between two tokens of a request, and to the
first one, by whether its adapter was in a slot when it arrived.

Options of the engine follow as name=value.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, LoRARequest
from jaxllm.llm_engine import LLMEngine
from jaxllm.measuring.runs import greedy, random_prompts
from jaxllm.runner.features.adapters import Adapters
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.random_adapters import write_adapter
from scripts.measuring.steps import time_steps

REPEATS = 3


def bench_steps(engine: LLMEngine, adapters: Sequence[LoRARequest], rows: Sequence[int], arguments: argparse.Namespace) -> None:
    """Print the time of a step without adapters and with so many of them."""
    max_tokens = engine.max_model_len - arguments.prompt_len
    for num_rows in rows:
        prompts = random_prompts([arguments.prompt_len] * num_rows, engine.model_config.vocab_size, seed=0)
        counts = sorted({1, min(num_rows, len(adapters))})
        works: dict[int, list[LoRARequest | None]] = {0: [None] * num_rows}
        works |= {count: [adapters[i % count] for i in range(num_rows)] for count in counts}
        times: dict[int, list[float]] = {count: [] for count in works}
        for number in range(1 + REPEATS):
            for count, work in works.items():
                steps = time_steps(engine, prompts, arguments.steps if number else 8, max_tokens, work)
                times[count] += [steps.ms_per_step] if number else []
        without = min(times[0])
        for count, found in times.items():
            print(
                f"{num_rows:>4} rows, {count} adapters: {min(found):.3f} ms a step "
                f"(of {', '.join(f'{each:.3f}' for each in found)}), {min(found) / without:.3f} times that without",
                flush=True,
            )


def bench_loading(engine: LLMEngine, adapters: Sequence[LoRARequest], arguments: argparse.Namespace) -> None:
    """Print the time to the first token of requests for adapters that were never loaded, and of the same once they are."""
    (prompt,) = random_prompts([arguments.prompt_len], engine.model_config.vocab_size, seed=1)
    for adapter in adapters:
        seconds = []
        for number in range(2):
            began = time.perf_counter()
            engine.add_request(f"loading {adapter.lora_name} {number}", prompt, greedy(1), lora_request=adapter)
            while engine.has_unfinished_requests():
                engine.step()
            seconds.append(time.perf_counter() - began)
        print(
            f"first token with {adapter.lora_name}: {1e3 * seconds[0]:.0f} ms with loading, {1e3 * seconds[1]:.0f} ms without"
        )


@dataclass
class Sent:
    """A request of --zipf."""

    began: float
    was_loaded: bool
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0


def bench_zipf(engine: LLMEngine, adapters: Sequence[LoRARequest], arguments: argparse.Namespace) -> None:
    """Print the longest times without a token among requests that arrive at a rate, each for an adapter by Zipf's law."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, len(adapters) + 1)
    chosen = rng.choice(len(adapters), arguments.zipf, p=weights / weights.sum())
    arrivals = np.cumsum(rng.exponential(1 / arguments.rate, arguments.zipf))
    prompts = random_prompts([arguments.prompt_len] * arguments.zipf, engine.model_config.vocab_size, seed=2)
    sent: dict[str, Sent] = {}
    core: Any = engine.core
    loaded: set[str] = set()
    began, number = time.perf_counter(), 0
    while number < len(chosen) or engine.has_unfinished_requests():
        now = time.perf_counter()
        while number < len(chosen) and arrivals[number] <= now - began:
            adapter = adapters[chosen[number]]
            loaded = {info.name for info in core.list_adapters() if info.where == "device"}
            request_id = f"zipf {number}"
            sent[request_id] = Sent(now, adapter.lora_name in loaded)
            engine.add_request(request_id, prompts[number], greedy(arguments.output_len), lora_request=adapter)
            number += 1
        if not engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        outputs = core.step()
        engine.take(outputs)
        now = time.perf_counter()
        for item in outputs:
            request = sent[item.request_id.rpartition("-")[0]]
            if item.new_token_ids:
                request.longest_gap = max(request.longest_gap, now - request.last) if request.first else 0.0
                request.first, request.last = request.first or now, now
    for was_loaded in (True, False):
        group = [request for request in sent.values() if request.was_loaded == was_loaded]
        if group:
            first = sorted(request.first - request.began for request in group)
            gaps = [request.longest_gap for request in group]
            print(
                f"{len(group)} requests whose adapter was {'' if was_loaded else 'not '}in a slot: first token after "
                f"{1e3 * statistics.median(first):.0f} ms (median), {1e3 * first[-1]:.0f} ms (longest); longest time between two "
                f"tokens {1e3 * max(gaps):.0f} ms",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with config.json")
    parser.add_argument("--rows", default="1,64", help="requests at once")
    parser.add_argument("--adapters", type=int, default=8, help="different adapters in a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--registered", type=int, default=0, help="with --zipf: adapters to choose from")
    parser.add_argument("--zipf", type=int, default=0, metavar="REQUESTS", help="requests of the many adapters")
    parser.add_argument("--rate", type=float, default=20.0, help="of these, each second")
    parser.add_argument("--output-len", type=int, default=64, help="their tokens")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("options", nargs="*", type=engine_option, metavar="name=value")
    arguments = parser.parse_args()
    options = {"max_loras": arguments.adapters, "max_cpu_loras": max(arguments.adapters, arguments.registered)}
    options |= {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True, "use_progress_bar": False}
    options |= {"enable_lora": True, "max_lora_rank": arguments.rank, "max_model_len": 4096, **dict(arguments.options)}
    began = time.perf_counter()
    llm = LLM(model=arguments.model, **options)
    engine = llm.llm_engine
    engine.finish_compiling()
    print(f"start {time.perf_counter() - began:.1f} s", flush=True)
    core: Any = engine.core
    targets = core.runner.shapes.functions.get(Adapters).adaptation.targets
    with tempfile.TemporaryDirectory() as temporary:
        # Two more than there are slots: their first requests load them, whatever else has run.
        num_files = arguments.adapters + 2
        for number in range(num_files):
            write_adapter(Path(temporary) / str(number), targets, arguments.rank, number)
        made = [
            LoRARequest(f"adapter-{i}", i + 1, f"{temporary}/{i % num_files}")
            for i in range(max(num_files, arguments.registered))
        ]
        try:
            bench_loading(engine, made[:num_files], arguments)
            bench_steps(engine, made[: arguments.adapters], [int(rows) for rows in arguments.rows.split(",")], arguments)
            if arguments.zipf:
                for adapter in made:
                    engine.add_lora(adapter)
                bench_zipf(engine, made, arguments)
        finally:
            llm.shutdown()


if __name__ == "__main__":
    main()
