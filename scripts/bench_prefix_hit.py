"""Times the first token of a prompt that is new, and of the same prompt when it is found in the prefix cache.

usage: bench_prefix_hit.py MODEL_DIR [--prompt 16384] [--rounds 5] [engine options as name=value …]

Dummy weights, one request at a time, greedy. Each round has a random prompt of its own, which is asked for three times: the first time
is that of a new prompt; the second finds its blocks, and the states of layers that keep one by row. The fastest and the median of the
rounds are printed, the tokens found, and how often the first tokens were equal (chunks end elsewhere, so those of dummy weights in
bfloat16 may differ). The first round is left out.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxllm import LLM
from jaxllm.measuring.runs import greedy, random_prompts, time_generation
from scripts.measuring.command_line import engine_option, script_parser

TIMES = ("new", "found", "found again")


def main() -> None:
    parser = script_parser(__doc__, 3)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("options", nargs="*", type=engine_option, metavar="name=value", help="options of the engine")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of a prompt (default: 16384)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_intermixed_args()
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": args.prompt + 16, "max_num_seqs": 4}
    llm = LLM(model=str(args.model), **{**options, **dict(args.options)})
    llm.llm_engine.finish_compiling()
    report(args, *measure(llm, args))
    llm.shutdown()


def measure(llm: LLM, args: argparse.Namespace) -> tuple[list[list[float]], list[int], int]:
    """Milliseconds by round and time, the tokens found by the last request, and in how many rounds all first tokens were equal."""
    rounds, num_equal, found = [], 0, [0] * len(TIMES)
    for seed in range(args.rounds + 1):
        prompt = random_prompts([args.prompt], llm.llm_engine.core.model_config.vocab_size, seed)
        runs = [time_generation(llm, prompt, [greedy(1)]) for _ in TIMES]
        found = [output.num_cached_tokens or 0 for _, (output,) in runs]
        if seed > 0:
            rounds.append([1e3 * seconds for seconds, _ in runs])
            num_equal += len({output.outputs[0].token_ids[0] for _, (output,) in runs}) == 1
    return rounds, found, num_equal


def report(args: argparse.Namespace, rounds: list[list[float]], found: list[int], num_equal: int) -> None:
    best, middle = ([choose(times) for times in zip(*rounds, strict=True)] for choose in (min, statistics.median))
    print(f"{args.model.name} on {jax.devices()[0].device_kind}, first token of {args.prompt} tokens, {len(rounds)} rounds:")
    for place, name in enumerate(TIMES):
        shares = " / ".join(f"{100 * times[place] / times[0]:.1f} %" for times in (best, middle))
        print(
            f"{name}: fastest {best[place]:.2f} ms, median {middle[place]:.2f} ({shares} of new), {found[place]} tokens found"
        )
    print(f"first tokens equal in {num_equal} of {len(rounds)} rounds", flush=True)


if __name__ == "__main__":
    main()
