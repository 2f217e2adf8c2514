"""Generates from every schema of structured_schemas.jsonl, judges each finished output with jsonschema, and times the masks.

    python scripts/check_structured.py [--generations N] [--max-tokens N] [--schemas FILE] [engine options as name=value …]
    python scripts/check_structured.py --tokenizer DIR      the time of masks over another vocabulary, and the steps of 64 answers with
                                                            and without the drafts of their grammar, without a model

Outputs cut off by max_tokens are counted apart. Exits with 1 if a finished output is invalid.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, SamplingParams
from scripts.measuring.command_line import engine_option

SCHEMAS = Path(__file__).parent / "structured_schemas.jsonl"
MOST_DRAFTS = 7
PROMPTS = ("data = ", "The answer as JSON: ", "print(json.dumps(", "# ", "x = [")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=10, help="outputs per schema")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--schemas", type=Path, default=SCHEMAS)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("options", nargs="*", type=engine_option, metavar="name=value")
    arguments = parser.parse_args()
    schemas = [json.loads(line) for line in arguments.schemas.read_text(encoding="utf-8").splitlines()]
    if arguments.tokenizer is not None:
        time_masks(schemas, arguments.tokenizer)
        time_host(arguments.tokenizer)
        return 0
    llm = LLM(**{"model": "demo", "use_progress_bar": False, **dict(arguments.options)})
    try:
        invalid = check(llm, schemas, arguments.generations, arguments.max_tokens)
        time_steps(llm, schemas)
    finally:
        llm.shutdown()
    return 1 if invalid else 0


def check(llm: LLM, schemas: list[Any], num_generations: int, max_tokens: int) -> int:
    """Generate and judge. Returns how many finished outputs are invalid."""
    prompts, params, judged = [], [], []
    for number, schema in enumerate(schemas):
        for generation in range(num_generations):
            prompts.append(PROMPTS[generation % len(PROMPTS)])
            form = {"json": schema}
            seed = number * num_generations + generation
            params.append(SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, structured_outputs=form))
            judged.append((number, schema))
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    counts: Counter[str] = Counter()
    for (number, schema), output in zip(judged, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            counts[str(answer.finish_reason)] += 1
            continue
        fault = fault_of(schema, answer.text)
        counts["invalid" if fault else "valid"] += 1
        if fault:
            print(f"schema {number} {json.dumps(schema)[:200]}\n  gave {answer.text!r}: {fault}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(schemas)} schemas, {len(outputs)} outputs, {num_tokens} tokens, {seconds:.1f} s: {dict(counts)}")
    return counts["invalid"]


def fault_of(schema: Any, text: str) -> str | None:
    """The reason why a text is not an instance of a schema; None if it is one."""
    try:
        value = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def time_steps(llm: LLM, schemas: list[Any]) -> None:
    """The time per step and per token of the same batch with and without grammars."""
    num_rows, num_tokens = 32, 100
    form = {"json": {"type": "array", "items": {"type": "string", "maxLength": 1000}, "minItems": 100}}
    for name, constraint in (("without grammars", None), ("with grammars", form)) * 2:
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=row, structured_outputs=constraint, detokenize=False)
            for row in range(num_rows)
        ]
        start = time.perf_counter()
        outputs = llm.generate([PROMPTS[0]] * num_rows, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(
            f"{name}: {1e3 * seconds / num_tokens:.2f} ms per step of {num_rows} rows, {1e6 * seconds / count:.0f} us per token"
        )


def time_masks(schemas: list[Any], directory: Path) -> None:
    """The time to accept a token and fill the next mask, along outputs that the grammars allow, on one thread."""
    import random

    from jaxllm.structured.compiler import GrammarCompiler
    from jaxllm.structured.matcher import Matcher, Template, fill_masks
    from jaxllm.structured.token_table import Vocabulary
    from jaxllm.structured_outputs import StructuredOutputsParams
    from jaxllm.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_id is not None
    start = time.perf_counter()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    num_tokens = vocabulary.table.vocab_size
    print(f"{num_tokens} tokens read in {time.perf_counter() - start:.2f} s")
    compiler, draw = GrammarCompiler(vocabulary), random.Random(0)
    compile_ms, fill_us, advance_us = [], [], []
    for schema in schemas:
        grammar = compiler.compile(StructuredOutputsParams(json=schema))
        start = time.perf_counter()
        template = Template.of(vocabulary, grammar)
        compile_ms.append(1e3 * (time.perf_counter() - start))
        matcher = Matcher(template, num_columns=num_tokens, eos_token_ids=vocabulary.eos_token_ids)
        for _ in range(100):
            mask = np.full((1, -(-num_tokens // 32)), -1, np.int32)
            start = time.perf_counter()
            fill_masks([(matcher, 0, [])], mask)
            fill_us.append(1e6 * (time.perf_counter() - start))
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
            token = int(draw.choice(allowed))
            if token in vocabulary.eos_token_ids:
                break
            start = time.perf_counter()
            matcher.advance(token)
            advance_us.append(1e6 * (time.perf_counter() - start))
    compiler.shutdown()
    for name, times in (("compile, ms", compile_ms), ("fill a mask, us", fill_us), ("take in a token, us", advance_us)):
        ordered = sorted(times)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        print(
            f"{name}: mean {statistics.mean(times):.1f}, median {statistics.median(times):.1f}, p99 {p99:.1f}, max {ordered[-1]:.1f}"
        )


ANSWER = {
    "name": "Anna Bianchi",
    "age": 31,
    "city": "Rome",
    "occupation": "software engineer",
    "email_address": "anna.bianchi@example.com",
    "hobbies": ["chess", "rowing", "old films"],
}


def time_host(directory: Path, num_rows: int = 64) -> None:
    """The CPU time of what grammars add to the host's part of a step, while rows write the same answer."""
    from jaxllm.request import Grammar
    from jaxllm.structured.grammar_text import grammar_text
    from jaxllm.structured.matcher import Matcher, Template, fill_masks
    from jaxllm.structured.token_table import Vocabulary
    from jaxllm.structured_outputs import StructuredOutputsParams
    from jaxllm.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_id is not None
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    num_tokens = vocabulary.table.vocab_size
    kinds = {str: "string", int: "integer", list: "array"}
    schema = {"type": "object", "properties": {name: {"type": kinds[type(value)]} for name, value in ANSWER.items()}}
    grammar = Grammar(grammar_text(StructuredOutputsParams(json=schema), vocabulary.split))
    answer = [*vocabulary.table.tokenize_str(json.dumps(ANSWER)), tokenizer.eos_token_id]
    for drafts_forced in (False, True):
        template = Template.of(vocabulary, grammar, drafts_forced=drafts_forced)
        new = partial(Matcher, template, num_columns=num_tokens, eos_token_ids=vocabulary.eos_token_ids)
        rows, times, place, drafts = [new() for _ in range(num_rows)], defaultdict[str, list[float]](list), 0, list[int]()
        while place < len(answer):
            width, start = 1 + len(drafts), time.process_time()
            mask = np.full((num_rows * width, -(-num_tokens // 32)), -1, np.int32)
            fill_masks([(row, index * width, drafts) for index, row in enumerate(rows)], mask)
            filled = time.process_time()
            expected, *found = [row.next_drafts(drafts) for row in rows][0] or [-1]
            drafted = time.process_time()
            right = next((i for i, token in enumerate(drafts) if token != answer[place + i]), len(drafts))
            for row in rows:
                for token in answer[place : place + right + 1]:
                    row.advance(token)
            place += right + 1
            drafts = found[:MOST_DRAFTS] if expected == answer[place - 1] else []
            for name, end, begin in (
                ("masks", filled, start),
                ("drafts", drafted, filled),
                ("tokens", time.process_time(), drafted),
            ):
                times[name].append(1e3 * (end - begin))
        means = ", ".join(f"{name} {statistics.mean(each):.2f} ms" for name, each in times.items())
        form = "with" if drafts_forced else "without"
        print(f"{num_rows} answers of {len(answer)} tokens {form} drafts: {len(times['masks'])} steps, a step takes {means}")


if __name__ == "__main__":
    sys.exit(main())
