"""Measures speculative decoding against the same engine without it: tokens/s, steps, and how many drafts are accepted.

    python scripts/bench_speculative.py --copy                                   # n-grams, a text that repeats itself with edits
    python scripts/bench_speculative.py --method eagle3 --draft DIRECTORY        # held-out questions and Python text
    python scripts/bench_speculative.py --synthetic 0.75 --model DIRECTORY       # dummy weights, drafts accepted at a set rate

--copy and --method take the demo model by default; both engines run in turn on the same prompts, the fastest run of each batch
counts, and the greedy tokens of both are compared. --copy: passages of Python, each repeated with other names. The demo model goes on
repeating them with its changes, as an answer does that gives back a text of the prompt with edits.

--synthetic times steps: all prompts are computed, then so many steps of the engine, first without drafts, then with. Dummy weights
write unpredictable tokens, so each draft is accepted with the probability given if all before it are. A row of the table
has the time of a step, the tokens that a request gets in it, and the quotient: the time for an accepted token.

Options of the engine follow as name=value.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, SamplingParams
from jaxllm.acceptance import Acceptance, percentages
from jaxllm.measuring.runs import SETTLING_STEPS, random_prompts
from scripts.demo_data import chat_tokenizer, python_text, scoring, tasks
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.steps import Steps, time_steps

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
Prompt = dict[str, list[int]]


@dataclass(frozen=True)
class Work:
    """Requests that are given at once."""

    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams


@dataclass
class Found:
    """Result of an engine for one workload."""

    seconds: float = 0.0
    """Sum of the fastest runs of each batch."""
    tokens: list[list[int]] = field(default_factory=list)
    drafts: Acceptance = Acceptance()

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


NAMES = ("name", "age", "city", "country", "size", "width", "height", "color")
PASSAGES = (
    """    def get_{n}(self):
        \"\"\"Return the {n} of the object.\"\"\"
        return self._{n}

    def set_{n}(self, value):
        \"\"\"Set the {n} of the object.\"\"\"
        self._{n} = value

""",
    """    @property
    def {n}(self):
        \"\"\"Return the {n} of the object.\"\"\"
        return self._{n}

    @{n}.setter
    def {n}(self, value):
        \"\"\"Set the {n} of the object.\"\"\"
        self._{n} = value

""",
    """    if {n} is None:
        raise ValueError('the {n} must be given')
    if not isinstance({n}, int):
        raise TypeError('the {n} must be an integer')
    result.append({n})
""",
    """    try:
        {n} = int(values['{n}'])
    except KeyError:
        raise ValueError('{n} is missing') from None
    result['{n}'] = {n}
""",
    """    def test_{n}(self):
        \"\"\"Check the {n} of the object.\"\"\"
        obj = self.make_object()
        self.assertEqual(obj.{n}, self.expected.{n})
        self.assertIsNotNone(obj.{n})

""",
    """    logger.info("reading the {n}")
    {n} = read_{n}(path)
    if {n} is None:
        logger.error("no {n} in %s", path)
        return None
""",
)
"""Text that the copying prompts repeat, each time with another name."""


def copying(llm: LLM, count: int) -> list[Prompt]:
    """Passages of Python, each repeated with other names; of further prompts, the names come in another order."""
    prompts = []
    for i in range(count):
        passage, first = PASSAGES[i % len(PASSAGES)], i // len(PASSAGES)
        names = [*NAMES[first % len(NAMES) :], *NAMES[: first % len(NAMES)]]
        text = "".join(passage.format(n=name) for name in names)
        prompts.append({"prompt_token_ids": list(llm.get_tokenizer().encode(text, add_special_tokens=False))})
    return prompts


def questions(llm: LLM, count: int) -> list[Prompt]:
    """Held-out questions to the demo model, as its chat template writes them."""
    encode = llm.get_tokenizer().encode
    found = (question for question in tasks.held_out_questions(count) if not question.tools)
    return [
        {"prompt_token_ids": list(encode(chat_tokenizer.render_question(each), add_special_tokens=False))} for each in found
    ]


def beginnings(llm: LLM, count: int) -> list[Prompt]:
    """The first 64 tokens of held-out files of Python."""
    texts = python_text.library_texts()[1][:count]
    return [{"prompt_token_ids": list(llm.get_tokenizer().encode(text, add_special_tokens=False)[:64])} for text in texts]


def compare(engines: dict[str, LLM], work: Work, rows: int, repeats: int) -> dict[str, Found]:
    """Run the work with both engines, so many requests at once, each batch once unmeasured and then repeatedly in turn."""
    found = {name: Found() for name in engines}
    before = {name: Acceptance.of(llm.llm_engine.core.stats()) for name, llm in engines.items()}
    for at in range(0, len(work.prompts), rows):
        prompts, fastest = work.prompts[at : at + rows], dict.fromkeys(engines, math.inf)
        for number in range(1 + repeats):
            for name, llm in engines.items():
                began = time.perf_counter()
                outputs = llm.generate(prompts, work.params, use_tqdm=False)
                if number:
                    fastest[name] = min(fastest[name], time.perf_counter() - began)
                else:
                    found[name].tokens += [list(output.outputs[0].token_ids) for output in outputs]
                    llm.llm_engine.finish_compiling()
        for name, seconds in fastest.items():
            found[name].seconds += seconds
    for name, llm in engines.items():
        found[name].drafts = Acceptance.of(llm.llm_engine.core.stats()) - before[name]
    return found


def report(work: Work, rows: int, found: dict[str, Found]) -> dict[str, Any]:
    """Print a work's figures. Returns them by name."""
    without, drafting = found["without"], found["with"]
    num_equal = sum(one == other for one, other in zip(without.tokens, drafting.tokens, strict=True))
    speedup = drafting.tokens_per_second / without.tokens_per_second
    print(
        f"{work.name}, {rows} at once: {without.tokens_per_second:.0f} tokens/s without, {drafting.tokens_per_second:.0f} with: "
        f"{speedup:.2f} times; {described(drafting.drafts)}; {num_equal} of {len(without.tokens)} outputs equal",
        flush=True,
    )
    return {
        "work": work.name,
        "rows": rows,
        "tokens_per_second_without": without.tokens_per_second,
        "tokens_per_second": drafting.tokens_per_second,
        "speedup": speedup,
        "equal_outputs": num_equal,
        **drafting.drafts.report(),
    }


def described(drafts: Acceptance) -> str:
    """Acceptance in a line."""
    if not drafts.num_drafts:
        return "no drafts"
    return f"mean acceptance length {drafts.mean_length:.2f}, by position {percentages(drafts.rates_per_position)}"


def run_works(arguments: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """--copy and --method."""
    config = {**options.pop("speculative_config", {}), "num_speculative_tokens": arguments.num_speculative_tokens}
    config = {**NGRAM, **config} if arguments.copy else {"method": arguments.method, **config}
    if arguments.draft is not None:
        config["model"] = arguments.draft
    # Without prefix caching: a repeated prompt must be computed again.
    common = {"model": arguments.model, "enable_prefix_caching": False, "use_progress_bar": False, **options}
    engines = {"without": LLM(**common), "with": LLM(**common, speculative_config=config)}
    llm, count = engines["without"], arguments.prompts
    fixed = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True)
    if arguments.copy:
        works = [Work("copying", copying(llm, count), fixed)]
    else:
        answer = SamplingParams(temperature=0.0, max_tokens=scoring.MAX_ANSWER_TOKENS)
        works = [Work("questions", questions(llm, count), answer), Work("Python text", beginnings(llm, count), fixed)]
    print(f"{arguments.model}, {json.dumps(config)}", flush=True)
    try:
        return [
            report(work, rows, compare(engines, work, rows, arguments.repeats)) for work in works for rows in arguments.rows
        ]
    finally:
        for each in engines.values():
            each.shutdown()


def run_synthetic(arguments: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """--synthetic: one engine after the other, because each takes the device's memory."""
    num_drafts = arguments.num_speculative_tokens
    config = {
        "method": "ngram",
        "prompt_lookup_max": 1,
        "num_speculative_tokens": num_drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [arguments.synthetic**i for i in range(1, num_drafts + 1)],
        **options.pop("speculative_config", {}),
    }
    common = {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True, "use_progress_bar": False}
    common |= {"max_model_len": 4096, **options}
    found: dict[str, dict[int, Steps]] = {}
    for name, more in (("without", {}), ("with", {"speculative_config": config})):
        began = time.perf_counter()
        llm = LLM(model=arguments.model, **common, **more)
        engine = llm.llm_engine
        engine.finish_compiling()
        print(f"engine {name} drafts: start {time.perf_counter() - began:.1f} s", flush=True)
        found[name] = {}
        try:
            for rows in arguments.rows:
                prompts = random_prompts([arguments.prompt_len] * rows, engine.model_config.vocab_size, seed=0)
                max_tokens = engine.max_model_len - arguments.prompt_len
                time_steps(engine, prompts, SETTLING_STEPS, max_tokens)  # compiles what is rare, and lets the drafts settle
                steps = found[name][rows] = time_steps(engine, prompts, arguments.steps, max_tokens)
                print(
                    f"  {rows:>4} rows: {steps.ms_per_step:.3f} ms a step, {steps.num_tokens / rows / steps.num_steps:.2f} tokens of a "
                    f"request in it, {1e3 * steps.seconds * rows / steps.num_tokens:.3f} ms a token, "
                    f"{steps.tokens_per_second:.0f} tokens/s; {described(steps.drafts)}",
                    flush=True,
                )
        finally:
            llm.shutdown()
    results = []
    for rows in arguments.rows:
        without, drafting = found["without"][rows], found["with"][rows]
        slower, faster = drafting.ms_per_step / without.ms_per_step, drafting.tokens_per_second / without.tokens_per_second
        print(f"{rows} rows: a step takes {slower:.2f} times as long, tokens/s are {faster:.2f} times as many")
        results.append(
            {
                "rows": rows,
                "ms_per_step_without": without.ms_per_step,
                "ms_per_step": drafting.ms_per_step,
                "ms_per_token": 1e3 * drafting.seconds * rows / drafting.num_tokens,
                "speedup": faster,
                **drafting.drafts.report(),
            }
        )
    return results


def main() -> None:
    """Measure and print."""
    parser = script_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--copy", action="store_true", help="n-grams on a text that repeats itself")
    what.add_argument("--method", help="another method on held-out questions and text")
    what.add_argument(
        "--synthetic", type=float, metavar="RATE", help="steps with dummy weights and drafts accepted at this rate"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", metavar="DIRECTORY", help="checkpoint of the method")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="default: 8 for --copy, else 4")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], help="requests at once, e.g. 1,8")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a work (default: 12)")
    parser.add_argument("--output-len", type=int, default=256, help="tokens written for a prompt of text (default: 256)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of --copy and --method (default: 3)")
    parser.add_argument("--prompt-len", type=int, default=1024, help="tokens of a prompt of --synthetic (default: 1024)")
    parser.add_argument("--steps", type=int, default=64, help="timed steps of --synthetic (default: 64)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("options", type=engine_option, nargs="*", metavar="name=value", help="options of the engine")
    arguments = parser.parse_intermixed_args()
    if arguments.synthetic is not None and not 0 <= arguments.synthetic <= 1:
        parser.error(f"--synthetic is {arguments.synthetic}, must be 0 to 1")
    options = dict(arguments.options)
    arguments.num_speculative_tokens = arguments.num_speculative_tokens or (8 if arguments.copy else 4)
    arguments.rows = arguments.rows or ([1, 64, 256] if arguments.synthetic is not None else [1, 8])
    results = run_synthetic(arguments, options) if arguments.synthetic is not None else run_works(arguments, options)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
