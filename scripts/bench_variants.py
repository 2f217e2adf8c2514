"""Compares the greedy and the random program of a decode on the same engine and greedy requests: python scripts/bench_variants.py MODEL_DIR

Prints ms a step of both, alternating, and whether they drew the same tokens. Where random costs nothing, engines need no greedy programs.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.llm_engine import LLMEngine
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from scripts.measuring.command_line import engine_option
from scripts.measuring.steps import time_steps


def main() -> None:
    """Time each number of rows with both programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="8,64", help="numbers of requests")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each program")
    parser.add_argument("options", nargs="*", type=engine_option, help="engine options, name=value")
    args = parser.parse_intermixed_args()
    rows = [int(number) for number in args.rows.split(",")]
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, "warmup": "lazy"}
    sizes = {"max_num_seqs": max(rows), "decode_buckets": rows, "max_model_len": args.context + args.steps + 64}
    engine = LLMEngine(EngineConfig.from_options(**{**options, **sizes, **dict(args.options), "model": str(args.model)}))
    kernels = ", ".join(f"{op} {report.implementation}" for op, report in engine.core.kernels.items())
    print(f"{args.model.name} on {jax.devices()[0].device_kind}, {kernels}", flush=True)
    for number in rows:
        compare(engine, number, args)
    engine.shutdown()


def compare(engine: LLMEngine, num_rows: int, args: argparse.Namespace) -> None:
    """One number of rows: a first round of each program, which compiles it, does not count."""
    rng = np.random.default_rng(0)
    vocab_size = engine.core.model_config.vocab_size
    prompts = [{"prompt_token_ids": rng.integers(0, vocab_size - 256, args.context).tolist()} for _ in range(num_rows)]
    times: dict[Variant, list[float]] = {Variant.GREEDY: [], Variant.RANDOM: []}
    tokens = {}
    for variant in times:
        choose(engine, variant)
        tokens[variant] = draw(engine, prompts)
    for _ in range(args.rounds + 1):
        for variant, found in times.items():
            choose(engine, variant)
            found.append(time_steps(engine, prompts, args.steps, args.steps + 40).ms_per_step)
    greedy, random = (statistics.median(found[1:]) for found in times.values())
    same = "the same tokens" if tokens[Variant.GREEDY] == tokens[Variant.RANDOM] else "OTHER TOKENS"
    print(f"decode of {num_rows} rows: greedy {greedy:.3f} ms, random {random:.3f} ms ({random / greedy - 1:+.1%}), {same}")
    for variant, found in times.items():
        print(f"  {variant.name.lower():<7}{' '.join(f'{ms:.3f}' for ms in found[1:])}", flush=True)


def choose(engine: LLMEngine, variant: Variant) -> None:
    """Have decodes take the programs of a variant."""
    (batches,) = engine.core.runner.batches.builders  # type: ignore[attr-defined]
    batches.choice = ProgramChoice(
        batches.buckets, is_there=lambda key: key.kind != "decode" or key.variant == variant, reach=None
    )


def draw(engine: LLMEngine, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    """Some tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt["prompt_token_ids"], params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return [found[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    main()
