"""Times `LLM` and `generate` of transformers on a CPU, in float32, on the same prompts, in one process: python scripts/bench_cpu.py

Both sides decode greedily to given lengths, without end tokens. Every measurement is taken in turn on both sides and repeated; the
fastest of each side counts. The tokens of both sides are compared, so that the times are of the same work. Needs torch and transformers.

batch 1       one prompt
mixed         requests whose lengths are log-normal like those of chat traffic. `LLM` gets them all at once; transformers gets them as
              one left-padded batch that runs to the longest output, and (sequential) one after the other
mix           with --mix FILE: the first requests of a file of lengths, run as the mixed ones are
equal         the same number of requests, prompts of one length and outputs of one length: padding costs transformers nothing here
"""

import argparse
import inspect
import logging
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.http_client.datasets import read_mix

try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as error:
    raise SystemExit(f"this benchmark needs torch and transformers: {error}") from error

WORKS = ["batch 1", "mixed", "mix", "equal"]
TOLERANCE = 1e-3
"""Logits closer than this are a tie in float32, which two engines may break differently."""


@dataclass(frozen=True)
class Work:
    """Requests of one measurement."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    """Tokens to write after each prompt."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class Ours:
    """The engine of this project."""

    def __init__(self, model: str):
        # Without prefix caching: a repeated prompt must be computed again.
        self.llm = LLM(model, dtype="float32", enable_prefix_caching=False, use_progress_bar=False)

    def run(self, work: Work) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.lengths]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Theirs:
    """`generate` of transformers."""

    def __init__(self, directory: str):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def run_batch(self, work: Work) -> list[list[int]]:
        longest = max(map(len, work.prompts))
        ids = torch.zeros((len(work.prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(work.prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(work.lengths), do_sample=False)
        return [row[longest : longest + n].tolist() for row, n in zip(out, work.lengths, strict=True)]

    def run_sequential(self, work: Work) -> list[list[int]]:
        pairs = zip(work.prompts, work.lengths, strict=True)
        return [self.run_batch(Work("", [prompt], [length]))[0] for prompt, length in pairs]

    @torch.inference_mode()
    def margin(self, prompt: Sequence[int], first: int, second: int) -> float:
        """How much likelier `first` is than `second` after the prompt, in logits."""
        logits = self.model(torch.tensor([list(prompt)])).logits[0, -1]
        return float(abs(logits[first] - logits[second]))


def fastest(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest run of each, taken in turn so that a busy machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def check_equal(work: Work, theirs: Theirs, ours: list[list[int]], reference: list[list[int]]) -> int:
    """Compare tokens. Returns how many requests diverged at a tie; fails where they diverge elsewhere."""
    ties = 0
    for prompt, mine, other, length in zip(work.prompts, ours, reference, work.lengths, strict=True):
        assert len(mine) == len(other) == length, f"{len(mine)} and {len(other)} tokens, asked for {length}"
        if mine == other:
            continue
        at = next(i for i in range(length) if mine[i] != other[i])
        margin = theirs.margin([*prompt, *mine[:at]], mine[at], other[at])
        assert margin < TOLERANCE, f"{work.name}: tokens differ at {at}, where the logits are {margin} apart"
        ties += 1
    return ties


def works(llm: LLM, num_requests: int, mix: Sequence[tuple[int, int]] = ()) -> list[Work]:
    """The measurements; prompts are Python source, which suits the demo model. `mix`: lengths of prompt and output."""
    source = llm.get_tokenizer().encode(inspect.getsource(argparse) + inspect.getsource(textwrap))
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        start = int(rng.integers(0, len(source) - length))
        return list(source[start : start + length])

    def log_normal(median: float, sigma: float, low: int, high: int) -> list[int]:
        drawn = median * np.exp(rng.normal(0.0, sigma, num_requests))
        return [int(x) for x in np.clip(drawn, low, high)]

    # The spread of the chat traffic that the GPU is measured on, at a third of its lengths.
    inputs, outputs = log_normal(50, 1.05, 4, 512), log_normal(50, 0.89, 4, 340)
    return [
        Work("batch 1", [prompt(64)], [256]),
        Work("mixed", [prompt(n) for n in inputs], outputs),
        Work("equal", [prompt(96) for _ in range(num_requests)], [128] * num_requests),
        *([Work("mix", [prompt(length) for length, _ in mix], [length for _, length in mix])] if mix else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--mix", metavar="FILE", help='lengths from a JSON file: {"requests": [[prompt, output], …]}')
    parser.add_argument(
        "--no-sequential", action="store_true", help="skip transformers one request after the other, which is slow"
    )
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ours = Ours(args.model)
    theirs = Theirs(str(ours.llm.llm_engine.core.model_dir))  # type: ignore[attr-defined]
    print(f"torch threads: {torch.get_num_threads()}; tokens/s are useful output tokens over the time of the whole call")
    print(f"{'work':8} {'requests':>8} {'in':>6} {'out':>6}  {'side':24} {'s':>8} {'tok/s':>9} {'jaxllm is':>9}")
    for work in works(ours.llm, args.requests, read_mix(args.mix)[: args.requests] if args.mix else ()):
        if work.name not in args.only:
            continue
        ties = check_equal(work, theirs, ours.run(work), theirs.run_batch(work))  # also compiles
        runs: dict[str, Callable[[], object]] = {
            "jaxllm": partial(ours.run, work),
            "transformers": partial(theirs.run_batch, work),
        }
        if work.name in ("mixed", "mix") and not args.no_sequential:
            runs["transformers sequential"] = partial(theirs.run_sequential, work)
        seconds = fastest(runs, args.repeats)
        num_inputs = sum(map(len, work.prompts))
        for name, value in seconds.items():
            print(
                f"{work.name:8} {len(work.prompts):8} {num_inputs:6} {work.num_tokens:6}  {name:24} {value:8.3f} "
                f"{work.num_tokens / value:9.1f} {value / seconds['jaxllm']:8.2f}x",
                flush=True,
            )
        print(f"{work.name:8} tokens equal" + (f", but {ties} requests part at a tie below {TOLERANCE}" if ties else ""))
    ours.llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
