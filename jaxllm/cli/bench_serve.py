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
from jaxllm.cli.server_arguments import make_client, pairs, run_async
from jaxllm.errors import ConfigError
from jaxllm.progress import Progress

if TYPE_CHECKING:
    from jaxllm.acceptance import Acceptance
    from jaxllm.http_client.arrivals import RampUp
    from jaxllm.http_client.client import ServerClient
    from jaxllm.http_client.datasets import LoadPrompt, PromptWriter, Tokenizer
    from jaxllm.http_client.load import LoadRun
    from jaxllm.http_client.scrape import Scrape

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "Put load on a running OpenAI-compatible server and measure latencies and throughput as its clients see them."
EXAMPLES = """examples:
  jaxllm bench serve --num-prompts 320 --request-rate 32 --input-len 512 --output-len 128 --range-ratio 0.5
  jaxllm bench serve --base-url http://host:8000 --dataset-name mix --dataset-path lengths.json --max-concurrency 64
  jaxllm bench serve --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl --goodput ttft:200 tpot:50"""

NEEDS_PATH = ("mix", "sharegpt", "custom")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 1 if no request was answered."""
    _check(arguments)
    goodput = _goodput(arguments.goodput)
    metadata = dict(pairs(arguments.metadata, "--metadata"))
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
    progress = make_progress(quiet=arguments.quiet or arguments.disable_tqdm)
    try:
        model, load, drafts = run_async(_measure(arguments, prompts, warm_up, progress))
    finally:
        progress.finish()
    from jaxllm.http_client import results

    percentiles = arguments.metric_percentiles
    figures = results.summary(load, percentiles=percentiles, goodput_ms=goodput) | (drafts.report() if drafts else {})
    report = _header(arguments, model, len(prompts)) | metadata | figures
    if not arguments.quiet and any(outcome.succeeded and outcome.num_output_tokens is None for outcome in load.outcomes):
        terminal.note("the server reports no usage for some answers; each of their chunks is counted as one token")
    if arguments.json:
        print(json.dumps(report))
    else:
        print(results.as_text(report, arguments.percentile_metrics, percentiles))
    if arguments.output_json:
        write_json(Path(arguments.output_json), report)
    if arguments.save_result or arguments.append_result or arguments.save_detailed:
        detailed = results.details(load) if arguments.save_detailed else {}
        path = _save(report | detailed, arguments, model)
        terminal.note(f"result written to {path}") if not arguments.quiet else None
    if arguments.plot:
        draw(load, f"{model}, {arguments.request_rate:g} requests/s, {len(prompts)} prompts", arguments.plot)
    return 0 if figures["completed"] else 1


async def _measure(
    arguments: argparse.Namespace, prompts: "list[LoadPrompt]", warm_up: "LoadPrompt", progress: Progress
) -> "tuple[str, LoadRun, Acceptance | None]":
    from jaxllm.http_client.arrivals import start_times
    from jaxllm.http_client.load import ENDPOINTS, RequestMaker, ask, run_load, wait_until_ready
    from jaxllm.http_client.scrape import acceptance

    backend = BACKENDS[arguments.backend]
    path = arguments.endpoint or ENDPOINTS[backend]
    async with make_client(arguments, arguments.base_url or f"http://{arguments.host}:{arguments.port}") as client:
        progress.start("waiting for the server", None, "answer")
        model = arguments.served_model_name or arguments.model or await _first_model(client, arguments.ready_check_timeout_sec)
        maker = RequestMaker(backend, model, _extra_body(arguments), arguments.ignore_eos)  # type: ignore[arg-type]
        first = maker.body(warm_up)
        if arguments.ready_check_timeout_sec:
            await wait_until_ready(client, path, first, arguments.ready_check_timeout_sec, streams=maker.streams)
            progress.advance()
        if arguments.num_warmups:
            progress.start("warming up", arguments.num_warmups, "request")
            await asyncio.gather(*(ask(client, path, first, streams=maker.streams) for _ in range(arguments.num_warmups)))
        times = start_times(
            len(prompts),
            arguments.request_rate,
            burstiness=arguments.burstiness,
            ramp_up=_ramp_up(arguments),
            seed=arguments.seed,
        )
        progress.start("measuring", len(prompts), "request")
        if arguments.profile:
            await client.post("/start_profile")
        before = await _scrape(client)
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
        after = await _scrape(client)
        return model, load, acceptance(before, after) if before and after else None


async def _scrape(client: "ServerClient") -> "Scrape | None":
    """The server's metrics; None if it has none."""
    from jaxllm.http_client.client import ServerError
    from jaxllm.http_client.scrape import read_scrape

    try:
        return read_scrape((await client.get("/metrics")).decode("utf-8", "replace"), 0.0)
    except (ServerError, ValueError):
        return None


async def _first_model(client: "ServerClient", timeout_seconds: float) -> str:
    """The first model that the server lists; waits while the server is unreachable or loading."""
    from jaxllm.http_client.client import ServerError

    deadline = asyncio.get_running_loop().time() + timeout_seconds
    while True:
        try:
            names = await client.models()
        except ServerError as error:
            if error.is_final or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(1)
            continue
        if not names:
            raise ConfigError("the server lists no models at /v1/models; name one with --model")
        return names[0]


def _prompts(arguments: argparse.Namespace) -> "tuple[list[LoadPrompt], LoadPrompt]":
    """The measured prompts, and one for the warm-up requests."""
    import numpy as np

    from jaxllm.http_client import datasets

    tokenizer = _load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    rng = np.random.default_rng(arguments.seed)
    is_chat = BACKENDS[arguments.backend] == "openai-chat"
    writer = datasets.PromptWriter(rng, arguments.vocab_size, tokenizer, arguments.random_text or is_chat)
    name, path, count, output_len = arguments.dataset_name, arguments.dataset_path, arguments.num_prompts, arguments.output_len
    if writer.as_text and tokenizer is None and name in ("random", "mix", "prefix_repetition") and not arguments.quiet:
        terminal.note("no --tokenizer: random text has a word for each token, which is about the length asked for")
    if name == "sharegpt":
        prompts = datasets.sharegpt_prompts(path, count or 1000, rng, tokenizer, output_len)
        return prompts, prompts[0]
    if name == "custom":
        prompts = datasets.custom_prompts(path, count, output_len, chat=is_chat)
        return prompts, prompts[0]
    prompts = _random_prompts(arguments, writer)
    longest = max(prompts, key=lambda prompt: prompt.num_prompt_tokens or 0)
    return prompts, writer.prompt(writer.ids(longest.num_prompt_tokens or 128), longest.num_output_tokens)


def _random_prompts(arguments: argparse.Namespace, writer: "PromptWriter") -> "list[LoadPrompt]":
    from jaxllm.http_client import datasets

    count, output_len, prefix_len = arguments.num_prompts, arguments.output_len or 128, arguments.prefix_len
    if arguments.dataset_name == "mix":
        lengths = datasets.read_mix(arguments.dataset_path)
        if count and count > len(lengths):
            raise UsageError(f"--num-prompts is {count}, the mix has {len(lengths)} requests")
        return datasets.mix_prompts(writer, lengths[:count])
    if arguments.dataset_name == "prefix_repetition":
        return datasets.prefix_repetition_prompts(
            writer,
            count or 1000,
            prefix_len=256 if prefix_len is None else prefix_len,
            suffix_len=arguments.suffix_len,
            num_prefixes=arguments.num_prefixes,
            output_len=output_len,
        )
    return datasets.random_prompts(
        writer,
        count or 1000,
        input_len=arguments.input_len,
        output_len=output_len,
        range_ratio=arguments.range_ratio,
        prefix_len=prefix_len or 0,
    )


def _load_tokenizer(name: str) -> "Tokenizer":
    from jaxllm.text.model_files import text_files
    from jaxllm.text.tokenizer import load_tokenizer

    return PlainTokenizer(load_tokenizer(text_files(name), name=name))


class PlainTokenizer:
    """A tokenizer that neither adds nor writes special tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


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


def _ramp_up(arguments: argparse.Namespace) -> "RampUp | None":
    from jaxllm.http_client.arrivals import RampUp

    if arguments.ramp_up_strategy is None:
        return None
    return RampUp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.dataset_name in NEEDS_PATH and not arguments.dataset_path:
        raise UsageError(f"--dataset-name {arguments.dataset_name} needs --dataset-path")
    if arguments.dataset_path and arguments.dataset_name not in NEEDS_PATH:
        raise UsageError(f"--dataset-path is for {', '.join(NEEDS_PATH)}; add --dataset-name")
    if arguments.chat_template_kwargs is not None and BACKENDS[arguments.backend] != "openai-chat":
        raise UsageError("--chat-template-kwargs is for --backend openai-chat: no other has a chat template")
    ends = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if arguments.ramp_up_strategy is None and any(ends):
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if arguments.ramp_up_strategy is not None and not all(ends):
        raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.ramp_up_strategy is not None and not math.isinf(arguments.request_rate):
        raise UsageError("--ramp-up-strategy gives the rate; leave out --request-rate")


def _header(arguments: argparse.Namespace, model: str, num_prompts: int) -> dict[str, Any]:
    """The results, under the names that vLLM's benchmark uses."""
    rate = arguments.request_rate
    header = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": arguments.tokenizer or model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.lora_modules:
        header |= {"lora_modules": arguments.lora_modules, "lora_assignment": arguments.lora_assignment}
    if arguments.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        header |= {name: getattr(arguments, name) for name in names}
    return header


def _save(report: Mapping[str, Any], arguments: argparse.Namespace, model: str) -> Path:
    name = arguments.result_filename
    if name is None:
        concurrency = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
        label = arguments.label or arguments.backend
        name = f"{label}-{arguments.request_rate:g}qps{concurrency}-{model.rsplit('/', 1)[-1]}-{report['date']}.json"
    path = Path(arguments.result_dir or ".") / name
    write_json(path, report, append=arguments.append_result)
    return path


def _goodput(entries: list[str]) -> dict[str, float] | None:
    limits = {}
    for entry in entries:
        name, colon, text = entry.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1
        if not colon or name not in GOODPUT_METRICS or not limit >= 0:
            raise UsageError(f"--goodput: {entry!r} must be NAME:MILLISECONDS with NAME one of {', '.join(GOODPUT_METRICS)}")
        limits[name] = limit
    return limits or None
