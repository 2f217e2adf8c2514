"""`jaxllm bench throughput|latency`: measures the engine offline, on random prompts of given lengths."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.acceptance import Acceptance
from jaxllm.cli import options, running
from jaxllm.cli.bench_serve import read_mix
from jaxllm.cli.flags import engine_flags, sampling_flags, shaping_flags
from jaxllm.cli.json_files import check_writable, write_json
from jaxllm.cli.numbers import count, dataset, fraction, positive
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.config import Flag
from jaxllm.log import info_once
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.vllm_compat.arguments import add_vllm_arguments
from jaxllm.vllm_compat.flags import BENCH_TABLE

if TYPE_CHECKING:
    from jaxllm.http_client.datasets import LoadPrompt
    from jaxllm.llm import LLM

ABOUT = "Measure requests/s and tokens/s of many prompts (throughput), or the time of one batch (latency)."
EXAMPLES = """examples:
  jaxllm bench throughput --num-prompts 64 --input-len 128 --output-len 128
  jaxllm bench throughput --mix lengths.json --json      {"requests": [[prompt, output], …]}
  jaxllm bench latency -m Qwen/Qwen3-0.6B --load-format dummy --num-prompts 8 --output-len 256"""

SEPARATE = ("serve", "scaling")
"""The subcommands with modules of their own."""


def bench_flags() -> list[Flag]:
    """The sampling flags that affect speed; the benchmark sets lengths and stop conditions itself."""
    return [flag for flag in sampling_flags() if flag in shaping_flags() or flag.name == "logprobs"]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    what = "what to measure; serve and scaling have options of their own: `jaxllm bench serve --help`"
    add("what", metavar="throughput|latency|serve|scaling", choices=["throughput", "latency", *SEPARATE], help=what)
    add("--input-len", "--random-input-len", type=positive, help="tokens of each prompt (default: 128)")
    names = ("--output-len", "--random-output-len", "--sharegpt-output-len")
    add(*names, type=positive, help="tokens written for each prompt (default: 128)")
    spread = "throughput: lengths between (1-X) and (1+X) times the given (default: 0)"
    add("--range-ratio", "--random-range-ratio", type=fraction, help=spread)
    prefix = "throughput: further tokens at the front, which all prompts share"
    add("--prefix-len", "--random-prefix-len", type=count, default=0, help=prefix)
    add("--mix", metavar="FILE", help='lengths from a JSON file: {"requests": [[prompt, output], …]}')
    datasets = ("random", "sharegpt")
    kinds = "random: token ids of the lengths given; sharegpt: questions and the lengths of their answers"
    add("--dataset-name", type=dataset(datasets), choices=datasets, default="random", help=kinds)
    add("--dataset-path", metavar="FILE", help="the conversations of sharegpt, a JSON list")
    number = "prompts of a run, all given at once; default: 100 for throughput (or the whole mix), 1 for latency"
    add("--num-prompts", "--batch-size", type=positive, help=number)
    add(*("--warmup-runs", "--num-iters-warmup", "--num-warmups"), type=count, default=1, help="runs before the timed ones")
    add("--iterations", "--num-iters", type=positive, help="timed runs; default: 1 for throughput, 10 for latency")
    add("--json", action="store_true", help="the result as a JSON object")
    add("--output-json", metavar="FILE", help="write the result to this file, as --json prints it")
    backend = "changes nothing: this engine is measured, under vLLM's name for its own too; not vLLM's other engines"
    add("--backend", choices=["jaxllm", "vllm"], help=backend)
    add("--n", type=int, choices=[1], help=argparse.SUPPRESS)  # vLLM's number of answers to each prompt
    options.add_lora_argument(parser, "LoRA adapter that requests name in turn; may be repeated", several=True)
    options.add_common_arguments(parser)
    parser.add_flags(bench_flags())
    parser.add_flags(engine_flags())
    add_vllm_arguments(parser, names=BENCH_TABLE)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    _check(arguments)
    if arguments.backend == "vllm":
        info_once("--backend vllm changes nothing here: this engine is measured")
    engine_options = options.engine_options(arguments)
    sampling = options.sampling_options(arguments, bench_flags())
    mix = read_mix(arguments.mix, arguments.num_prompts) if arguments.mix else None
    loras = options.lora_requests(arguments, engine_options)
    if arguments.dry_run:
        return running.dry_run(engine_options)
    if arguments.output_json:
        check_writable(Path(arguments.output_json))
    progress = options.progress_for(arguments, engine_options)
    iterations = arguments.iterations or (1 if arguments.what == "throughput" else 10)
    from jaxllm.measuring import offline

    with running.opened_llm(engine_options, progress) as llm:
        llm.llm_engine.finish_compiling()
        prompts = _prompts(arguments, mix, llm)
        whole: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = [SamplingParams(**sampling, **whole, max_tokens=prompt.num_output_tokens) for prompt in prompts]
        each_lora = [loras[place % len(loras)] for place in range(len(prompts))] if loras else None
        progress.start("measuring", arguments.warmup_runs + iterations, "run")

        def measured(count: int) -> list[offline.OfflineRun]:
            runs = []
            for _ in range(count):
                runs.append(offline.run_offline(llm, prompts, params, each_lora))
                progress.advance()
            return runs

        measured(arguments.warmup_runs)
        before = Acceptance.of(llm.llm_engine.core.stats())
        runs = measured(iterations)
        drafts = Acceptance.of(llm.llm_engine.core.stats()) - before
    describe = offline.throughput_report if arguments.what == "throughput" else offline.latency_report
    report = describe(prompts, runs)
    if drafts.accepted_per_position:
        report |= drafts.report()
    if arguments.output_json:
        write_json(Path(arguments.output_json), report)
    print(json.dumps(report) if arguments.json else offline.as_text(report))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that exclude each other."""
    what, mix, is_sharegpt = arguments.what, arguments.mix, arguments.dataset_name == "sharegpt"
    if what in SEPARATE:
        raise UsageError(f"`{what}` must follow `bench` at once: jaxllm bench {what} …")
    if (arguments.range_ratio or arguments.prefix_len) and (what == "latency" or is_sharegpt or mix):
        raise UsageError("--range-ratio and --prefix-len are for throughput of random prompts without --mix")
    if is_sharegpt and (what == "latency" or mix or arguments.input_len or not arguments.dataset_path):
        raise UsageError("--dataset-name sharegpt is for throughput; it needs --dataset-path, and no --mix or --input-len")
    if arguments.dataset_path and not is_sharegpt:
        raise UsageError("--dataset-path is for --dataset-name sharegpt")
    if mix and what == "latency":
        raise UsageError("latency measures a batch of equal lengths; --mix is for throughput")
    if mix and (arguments.input_len or arguments.output_len):
        raise UsageError("--mix gives the lengths; leave out --input-len and --output-len")


def _prompts(arguments: argparse.Namespace, mix: list[tuple[int, int]] | None, llm: "LLM") -> "list[LoadPrompt]":
    """The prompts as token ids: random ones, also of the lengths of a mix, or questions of ShareGPT conversations."""
    import numpy as np

    from jaxllm.http_client import datasets

    writer = datasets.PromptWriter(np.random.default_rng(0), llm.llm_engine.model_config.vocab_size)
    if mix is not None:
        return datasets.mix_prompts(writer, mix)
    count, output_len = arguments.num_prompts or (100 if arguments.what == "throughput" else 1), arguments.output_len
    if arguments.dataset_name == "random":
        lengths = {"input_len": arguments.input_len or 128, "output_len": output_len or 128, "prefix_len": arguments.prefix_len}
        return datasets.random_prompts(writer, count, range_ratio=arguments.range_ratio or 0.0, **lengths)
    tokenizer = llm.get_tokenizer()
    found = datasets.sharegpt_prompts(arguments.dataset_path, count, writer.rng, tokenizer, output_len)
    each_ids = [tokenizer.encode(str(prompt.prompt)) for prompt in found]  # with special tokens
    return [datasets.LoadPrompt(ids, prompt.num_output_tokens, len(ids)) for ids, prompt in zip(each_ids, found, strict=True)]
