"""`jaxllm bench serve`: puts load on a running OpenAI-compatible server and measures it from the client's side."""

import argparse
import asyncio
import dataclasses
import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli import terminal
from jaxllm.cli.bench_serve_arguments import BACKENDS, SAMPLING, add_arguments
from jaxllm.cli.json_files import check_writable, write_json
from jaxllm.cli.parser import UsageError
from jaxllm.cli.progress_bars import make_progress
from jaxllm.cli.server_arguments import make_client, run_async
from jaxllm.progress import Progress

if TYPE_CHECKING:
    from jaxllm.acceptance import Acceptance
    from jaxllm.http_client.datasets import LoadPrompt, Tokenizer
    from jaxllm.http_client.load import LoadRun

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "Put load on a running OpenAI-compatible server and measure latencies and throughput as its clients see them."
EXAMPLES = """examples:
  jaxllm bench serve --num-prompts 320 --request-rate 32 --input-len 512 --output-len 128 --range-ratio 0.5
  jaxllm bench serve --base-url http://host:8000 --dataset-name mix --dataset-path lengths.json --max-concurrency 64
  jaxllm bench serve --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl --goodput ttft:200 tpot:50
  jaxllm bench serve --backend openai-chat --dataset-name random-mm --random-mm-base-items-per-request 2"""

NEEDS_PATH = ("mix", "sharegpt", "custom")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 1 if no request was answered."""
    _check(arguments)
    if arguments.plot:
        from jaxllm.http_client.plot import check_installed, draw

        check_installed()
    if arguments.output_json:
        check_writable(Path(arguments.output_json))
    prompts, warm_up = _prompts(arguments)
    if arguments.lora_modules:
        from jaxllm.http_client.datasets import with_models

        prompts = with_models(prompts, arguments.lora_modules, arguments.lora_assignment, arguments.seed)
        warm_up = dataclasses.replace(warm_up, model=arguments.lora_modules[0])
    with make_progress(quiet=arguments.quiet or arguments.disable_tqdm) as progress:
        model, load, drafts = run_async(_measure(arguments, prompts, warm_up, progress))
    from jaxllm.http_client import results

    percentiles = arguments.metric_percentiles
    figures = results.summary(load, percentiles=percentiles, goodput_ms=dict(arguments.goodput) or None)
    figures |= drafts.report() if drafts else {}
    report = _header(arguments, model, len(prompts)) | dict(arguments.metadata) | figures
    if not arguments.quiet and any(outcome.succeeded and outcome.num_output_tokens is None for outcome in load.outcomes):
        terminal.note("the server reports no usage for some answers; each of their chunks is counted as one token")
    print(json.dumps(report) if arguments.json else results.as_text(report, arguments.percentile_metrics, percentiles))
    if arguments.output_json:
        write_json(Path(arguments.output_json), report)
    if arguments.save_result or arguments.append_result or arguments.save_detailed:
        path = Path(arguments.result_dir or ".") / (arguments.result_filename or _file_name(arguments, report))
        detailed = results.details(load) if arguments.save_detailed else {}
        write_json(path, report | detailed, append=arguments.append_result)
        if not arguments.quiet:
            terminal.note(f"result written to {path}")
    if arguments.plot:
        draw(load, f"{model}, {arguments.request_rate:g} requests/s, {len(prompts)} prompts", arguments.plot)
    return 0 if figures["completed"] else 1


async def _measure(
    arguments: argparse.Namespace, prompts: "list[LoadPrompt]", warm_up: "LoadPrompt", progress: Progress
) -> "tuple[str, LoadRun, Acceptance | None]":
    from jaxllm.http_client.arrivals import RampUp, start_times
    from jaxllm.http_client.load import ENDPOINTS, RequestMaker, ask, first_model, run_load, wait_until_ready
    from jaxllm.http_client.scrape import acceptance, scrape_if_any

    backend = BACKENDS[arguments.backend]
    path = arguments.endpoint or ENDPOINTS[backend]
    async with make_client(arguments, arguments.base_url or f"http://{arguments.host}:{arguments.port}") as client:
        progress.start("waiting for the server", None, "answer")
        model = arguments.served_model_name or arguments.model or await first_model(client, arguments.ready_check_timeout_sec)
        maker = RequestMaker(backend, model, _extra_body(arguments), arguments.ignore_eos)  # type: ignore[arg-type]
        first = maker.body(warm_up)
        if arguments.ready_check_timeout_sec:
            await wait_until_ready(client, path, first, arguments.ready_check_timeout_sec, streams=maker.streams)
            progress.advance()
        if arguments.num_warmups:
            progress.start("warming up", arguments.num_warmups, "request")
            await asyncio.gather(*(ask(client, path, first, streams=maker.streams) for _ in range(arguments.num_warmups)))
        ramp_up = None
        if arguments.ramp_up_strategy is not None:
            ramp_up = RampUp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
        rate, burstiness = arguments.request_rate, arguments.burstiness
        times = start_times(len(prompts), rate, burstiness=burstiness, ramp_up=ramp_up, seed=arguments.seed)
        progress.start("measuring", len(prompts), "request")
        if arguments.profile:
            await client.post("/start_profile")
        before = await scrape_if_any(client)
        try:
            load = await run_load(
                client,
                maker,
                path,
                prompts,
                times,
                max_concurrency=arguments.max_concurrency,
                request_id_prefix=arguments.request_id_prefix,
                done=progress.advance,
            )
        finally:
            if arguments.profile:
                await client.post("/stop_profile")
        after = await scrape_if_any(client)
        return model, load, acceptance(before, after) if before and after else None


def _prompts(arguments: argparse.Namespace) -> "tuple[list[LoadPrompt], LoadPrompt]":
    """The measured prompts, and one for the warm-up requests."""
    import numpy as np

    from jaxllm.http_client import datasets
    from jaxllm.text.model_files import text_files
    from jaxllm.text.tokenizer import load_tokenizer

    named = arguments.tokenizer
    tokenizer: Tokenizer | None = load_tokenizer(text_files(named), name=named) if named else None
    rng = np.random.default_rng(arguments.seed)
    is_chat = BACKENDS[arguments.backend] == "openai-chat"
    writer = datasets.PromptWriter(rng, arguments.vocab_size, tokenizer, arguments.random_text or is_chat)
    name, path, count, output_len = arguments.dataset_name, arguments.dataset_path, arguments.num_prompts, arguments.output_len
    if name == "sharegpt":
        prompts = datasets.sharegpt_prompts(path, count or 1000, rng, tokenizer, output_len)
        return prompts, prompts[0]
    if name == "custom":
        prompts = datasets.custom_prompts(path, count, output_len, chat=is_chat)
        return prompts, prompts[0]
    if writer.as_text and tokenizer is None and not arguments.quiet:
        terminal.note("no --tokenizer: random text has a word for each token, which is about the length asked for")
    prefix_len, lengths = arguments.prefix_len, {"output_len": output_len or 128}
    if name == "mix":
        prompts = datasets.mix_prompts(writer, read_mix(path, count))
    elif name == "prefix_repetition":
        lengths |= {"prefix_len": 256 if prefix_len is None else prefix_len, "suffix_len": arguments.suffix_len}
        prompts = datasets.prefix_repetition_prompts(writer, count or 1000, num_prefixes=arguments.num_prefixes, **lengths)
    else:
        lengths |= {"input_len": arguments.input_len, "prefix_len": prefix_len or 0}
        prompts = datasets.random_prompts(writer, count or 1000, range_ratio=arguments.range_ratio, **lengths)
    longest = max(prompts, key=lambda prompt: prompt.num_prompt_tokens or 0)
    warm_up = writer.prompt(writer.ids(longest.num_prompt_tokens or 128), longest.num_output_tokens)
    if name == "random-mm":
        from jaxllm.http_client import random_images

        mix = random_images.ImageMix(
            arguments.random_mm_base_items_per_request,
            arguments.random_mm_num_mm_items_range_ratio,
            arguments.random_mm_limit_mm_per_prompt,
            arguments.random_mm_bucket_config or random_images.DEFAULT_SIZES,
        )
        *prompts, warm_up = random_images.with_images([*prompts, warm_up], mix, rng)
    return prompts, warm_up


def read_mix(path: str, count: int | None, option: str = "--num-prompts") -> list[tuple[int, int]]:
    """The (prompt, output) lengths in a mix file, or the first `count` of them, of an option. Raises UsageError or ConfigError."""
    from jaxllm.http_client import datasets

    lengths = datasets.read_mix(path)
    if count and count > len(lengths):
        raise UsageError(f"{option} is {count}, the mix has {len(lengths)} requests")
    return lengths[:count]


def _extra_body(arguments: argparse.Namespace) -> dict[str, Any]:
    if BACKENDS[arguments.backend] == "openai-embeddings":
        return arguments.extra_body
    body: dict[str, Any] = {"temperature": arguments.temperature}
    body |= {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.logprobs is not None:
        is_chat = BACKENDS[arguments.backend] == "openai-chat"
        body |= {"logprobs": True, "top_logprobs": arguments.logprobs} if is_chat else {"logprobs": arguments.logprobs}
    if arguments.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = arguments.chat_template_kwargs
    return body | arguments.extra_body


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for arguments that exclude or need each other."""
    name, path, strategy = arguments.dataset_name, arguments.dataset_path, arguments.ramp_up_strategy
    ends = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if name in NEEDS_PATH and not path:
        raise UsageError(f"--dataset-name {name} needs --dataset-path")
    if name == "random-mm" and BACKENDS[arguments.backend] != "openai-chat":
        raise UsageError("--dataset-name random-mm is for --backend openai-chat: images are parts of messages")
    if path and name not in NEEDS_PATH:
        raise UsageError(f"--dataset-path is for {', '.join(NEEDS_PATH)}; add --dataset-name")
    if arguments.chat_template_kwargs is not None and BACKENDS[arguments.backend] != "openai-chat":
        raise UsageError("--chat-template-kwargs is for --backend openai-chat: no other has a chat template")
    if strategy is None and any(ends):
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if strategy is not None and not all(ends):
        raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if strategy is not None and not math.isinf(arguments.request_rate):
        raise UsageError("--ramp-up-strategy gives the rate; leave out --request-rate")


def _header(arguments: argparse.Namespace, model: str, num_prompts: int) -> dict[str, Any]:
    """The requested options, under the names of vLLM's benchmark."""
    header = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": arguments.tokenizer or model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(arguments.request_rate) else arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    more = ["lora_modules", "lora_assignment"] if arguments.lora_modules else []
    if arguments.ramp_up_strategy is not None:
        more += ["ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"]
    return header | {name: getattr(arguments, name) for name in more}


def _file_name(arguments: argparse.Namespace, report: Mapping[str, Any]) -> str:
    concurrency = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
    label, model = arguments.label or arguments.backend, report["model_id"].rsplit("/", 1)[-1]
    return f"{label}-{arguments.request_rate:g}qps{concurrency}-{model}-{report['date']}.json"
