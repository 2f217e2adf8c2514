"""Times the same work through `LLM` of jaxllm or of vLLM, whose API is one: run it once with each engine on the same machine.

usage: bench_peer.py {jaxllm,vllm} MODEL_DIR [--parts decode,long,sampling,…] [--json FILE] [engine options as name=value …]

decode       ms per token of 1 and 64 rows with 1024 tokens of context, and prefill of their prompts
long         one prompt of 32 768 tokens, 16 prompts of 16 384, and then decodes of 1 and 16 rows behind them
sampling     64 and 256 requests of 128 + 256 tokens: greedy, random, with penalties or with logprobs, all of them or half
chats        64 chats of four turns, each of which begins with all before it
structured   64 objects under a JSON schema
mixed        the lengths of --mix, all at once

Weights are dummies and prompts random token ids from a fixed seed, new in every repetition, so that the prefix cache holds none of them.
The whole generate() call is timed, without detokenizing; the fastest of --reps after one that is not counted. Decodes are timed alone:
the same prompts are computed once, then asked for 1 and for 1 + N tokens while the prefix cache holds them; the difference is N steps.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.measuring.command_line import engine_option, script_parser

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PENALTIES = {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p 0.95, top-k 50": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "penalties": PENALTIES,
    "penalties for half": PENALTIES,
    "5 logprobs": {"logprobs": 5},
    "5 logprobs for half": {"logprobs": 5},
}
Prompts = list[list[int]]


class Bench:
    """One engine and what was measured of it."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self._engine = importlib.import_module(args.engine)
        self._random = np.random.default_rng(1)
        config = json.loads((args.model / "config.json").read_text())
        self._vocab_size = config["vocab_size"]
        options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": args.max_model_len, "seed": 0}
        began = time.perf_counter()
        self._llm = self._engine.LLM(model=str(args.model), enable_prefix_caching=True, **(options | dict(args.options)))
        self.note("start", seconds=round(time.perf_counter() - began, 1), version=self._engine.__version__)

    def note(self, name: str, **found: Any) -> None:
        """Print a row, and keep it."""
        self.rows.append({"engine": self.args.engine, "model": self.args.model.name, "name": name, **found})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.args.json:
            self.args.json.write_text(json.dumps(self.rows, indent=1))

    def prompts(self, lengths: list[int]) -> Prompts:
        """New prompts of random tokens; the last ids, where models keep special ones, are left out."""
        return [self._random.integers(0, max(1, self._vocab_size - 300), length).tolist() for length in lengths]

    def seconds(self, prompts: Prompts, outputs: list[int], each: Callable[[int], dict[str, Any]] = lambda i: {}) -> float:
        """Time of one generate(). each: sampling parameters of the i-th request."""
        params = [
            self._engine.SamplingParams(
                **{"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False, **each(i)}
            )
            for i, count in enumerate(outputs)
        ]
        began = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    def fastest(self, run: Callable[[], float]) -> float:
        """The fastest of several, after one that is not counted."""
        return min([run() for _ in range(self.args.reps + 1)][1:])

    def decodes(self, num_rows: int, context: int, num_steps: int) -> None:
        """Prefill, and decodes behind prompts that the prefix cache holds."""
        lengths = [context] * num_rows
        prefill = self.fastest(lambda: self.seconds(self.prompts(lengths), [1] * num_rows))
        self.note(f"prefill {num_rows} x {context}", seconds=round(prefill, 4), tokens_per_second=round(sum(lengths) / prefill))

        def of_steps() -> float:
            prompts = self.prompts(lengths)
            _, one, all_steps = (self.seconds(prompts, [count] * num_rows) for count in (1, 1, 1 + num_steps))
            return (all_steps - one) / num_steps

        step = self.fastest(of_steps)
        self.note(f"decode {num_rows} at {context}", ms_per_token=round(1e3 * step, 3))

    def decode(self) -> None:
        for num_rows in (1, 64):
            self.decodes(num_rows, 1024, 256)

    def long(self) -> None:
        self.decodes(1, 32768, 64)
        self.decodes(16, 16384, 64)

    def sampling(self) -> None:
        for num_rows in (64, 256):
            for name, params in SAMPLING.items():
                every = 2 if name.endswith("half") else 1

                def run(params: dict[str, Any] = params, every: int = every, count: int = num_rows) -> float:
                    prompts = self.prompts([128] * count)
                    return self.seconds(prompts, [256] * count, lambda i: {} if i % every else params)

                found = self.fastest(run)
                per_second = round(256 * num_rows / found)
                self.note(f"{num_rows} x (128 + 256), {name}", seconds=round(found, 4), output_tokens_per_second=per_second)

    def chats(self) -> None:
        def run() -> float:
            chats, total = self.prompts([512] * 64), 0.0
            for _ in range(4):
                began = time.perf_counter()
                params = self._engine.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
                answers = self._llm.generate([{"prompt_token_ids": chat} for chat in chats], params, use_tqdm=False)
                total += time.perf_counter() - began
                more = self.prompts([256] * 64)
                chats = [
                    [*chat, *answer.outputs[0].token_ids, *new] for chat, answer, new in zip(chats, answers, more, strict=True)
                ]
            return total

        found = self.fastest(run)
        self.note("64 chats of 4 turns", seconds=round(found, 3), output_tokens_per_second=round(64 * 4 * 64 / found))

    def structured(self) -> None:
        parts = [self._engine, getattr(self._engine, "sampling_params", None)]
        outputs = next(part.StructuredOutputsParams for part in parts if hasattr(part, "StructuredOutputsParams"))
        params = self._engine.SamplingParams(temperature=0.8, seed=1, max_tokens=192, structured_outputs=outputs(json=SCHEMA))
        num_tokens = num_valid = 0

        def run() -> float:
            nonlocal num_tokens, num_valid
            prompts = [{"prompt_token_ids": ids} for ids in self.prompts([128] * 64)]
            began = time.perf_counter()
            answers = self._llm.generate(prompts, params, use_tqdm=False)
            found = time.perf_counter() - began
            num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            num_valid = sum(map(_is_json, (answer.outputs[0].text for answer in answers)))
            return found

        found = self.fastest(run)
        self.note("64 under a JSON schema", seconds=round(found, 3), tokens=num_tokens, valid=num_valid)

    def mixed(self) -> None:
        lengths = json.loads(self.args.mix.read_text())["requests"]
        inputs, outputs = [count for count, _ in lengths], [count for _, count in lengths]
        found = self.fastest(lambda: self.seconds(self.prompts(inputs), outputs))
        self.note(f"{len(lengths)} mixed", seconds=round(found, 2), output_tokens_per_second=round(sum(outputs) / found))


PARTS = ("decode", "long", "sampling", "chats", "structured", "mixed")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Measure the parts in this order."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("engine", choices=["jaxllm", "vllm"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--parts", default="decode,sampling", help=f"default: decode,sampling; there are {', '.join(PARTS)}")
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=34816)
    parser.add_argument("--mix", type=Path, help='JSON with "requests": [prompt, output] lengths, for the part mixed')
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("options", nargs="*", type=engine_option, help="engine options, name=value")
    args = parser.parse_intermixed_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))} is unknown; there are {', '.join(PARTS)}")
    if "mixed" in parts and args.mix is None:
        parser.error("the part mixed needs --mix")
    bench = Bench(args)
    for part in PARTS:
        if part in parts:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
