"""`jaxllm bench serve`: put load on a running OpenAI-compatible server and measure what clients see."""

import argparse
import asyncio
import datetime
import json
import math
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm import env
from jaxllm.cli import options, terminal
from jaxllm.cli.flags import whole_number
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.progress_bars import make_progress
from jaxllm.errors import ConfigError
from jaxllm.progress import Progress

if TYPE_CHECKING:
    from jaxllm.http_client.arrivals import RampUp
    from jaxllm.http_client.client import ServerClient
    from jaxllm.http_client.datasets import LoadPrompt, PromptWriter, Tokenizer
    from jaxllm.http_client.load import LoadRun

ABOUT = "Put load on a running OpenAI-compatible server and measure latencies and throughput as its clients see them."
EXAMPLES = """examples:
  jaxllm bench serve --num-prompts 320 --request-rate 32 --input-len 512 --output-len 128 --range-ratio 0.5
  jaxllm bench serve --base-url http://host:8000 --dataset-name mix --dataset-path lengths.json --max-concurrency 64
  jaxllm bench serve --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl --goodput ttft:200 tpot:50"""

DATASETS = ("random", "mix", "sharegpt", "custom", "prefix_repetition")
NEEDS_PATH = ("mix", "sharegpt", "custom")
BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat"}
SAMPLING = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

T = TypeVar("T")


def add_arguments(parser: Parser) -> None:
    options.add_log_arguments(parser)
    _add_server_arguments(parser)
    _add_dataset_arguments(parser)
    _add_load_arguments(parser)
    _add_request_arguments(parser)
    _add_result_arguments(parser)


def _add_server_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=sorted(BACKENDS),
        default="openai",
        help="openai (= vllm): completions; openai-chat: chat completions (default: openai)",
    )
    group.add_argument("--base-url", metavar="URL", help="the server, e.g. http://127.0.0.1:8000; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=_positive, default=8000, metavar="N", help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions, by the backend")
    group.add_argument("-m", "--model", metavar="NAME", help="model to ask for; default: the first that /v1/models lists")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="directory or hub id; needed only for random text and for ShareGPT lengths"
    )
    group.add_argument("--api-key", metavar="KEY", help=f"default: ${env.API_KEY}, else $OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="a further header; may be repeated")
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the answer to a first request, which is not measured; 0: send none (default: 600)",
    )


def _add_dataset_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: random)")
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='mix: {"requests": [[prompt, output], …]}; sharegpt: a JSON list; custom: JSON lines with prompt or messages',
    )
    group.add_argument("--num-prompts", type=_positive, metavar="N", help="default: 1000; for mix and custom the whole file")
    group.add_argument(
        "--input-len", "--random-input-len", type=_positive, default=1024, metavar="N", help="tokens of random prompts"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        "--prefix-repetition-output-len",
        type=_positive,
        metavar="N",
        help="output tokens asked for; default: 128 for random prompts, else as the file says",
    )
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=_fraction,
        default=0.0,
        metavar="X",
        help="random: lengths between (1-X) and (1+X) times the given (default: 0)",
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        type=_count,
        metavar="N",
        help="tokens at the front that prompts share (default: 0; prefix_repetition: 256)",
    )
    group.add_argument(
        "--suffix-len", "--prefix-repetition-suffix-len", type=_positive, default=256, metavar="N", help="(default: 256)"
    )
    group.add_argument(
        "--num-prefixes", "--prefix-repetition-num-prefixes", type=_positive, default=10, metavar="N", help="(default: 10)"
    )
    group.add_argument(
        "--random-text", action="store_true", help="send random prompts as text, not as token ids; always so with openai-chat"
    )
    group.add_argument(
        "--vocab-size",
        type=_positive,
        metavar="N",
        help="random token ids are below it (less 256); default: the tokenizer's, else 1000, which every model has",
    )
    group.add_argument("--seed", type=_count, default=0, metavar="N", help="of prompts and start times (default: 0)")


def _add_load_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="X", help="requests/s; inf: all at once (default: inf)"
    )
    group.add_argument(
        "--burstiness",
        type=_above_zero,
        default=1.0,
        metavar="X",
        help="shape of the gamma distributed gaps: 1 is Poisson, less is burstier (default: 1)",
    )
    group.add_argument("--max-concurrency", type=_positive, metavar="N", help="most requests under way at once")
    group.add_argument("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow over the run")
    group.add_argument("--ramp-up-start-rps", type=_above_zero, metavar="X", help="the rate at its start")
    group.add_argument("--ramp-up-end-rps", type=_above_zero, metavar="X", help="the rate at its end")
    group.add_argument(
        "--num-warmups", type=_count, default=0, metavar="N", help="requests before the measured ones (default: 0)"
    )


def _add_request_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="write exactly as many tokens as asked for (vLLM, jaxllm)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0)")
    for name in SAMPLING:
        group.add_argument("--" + name.replace("_", "-"), type=float, metavar="X", help="default: the server's")
    group.add_argument("--top-k", type=int, metavar="N", help="default: the server's")
    group.add_argument("--logprobs", type=_count, metavar="N", help="logprobs of so many likely tokens")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="laid over the body of every request"
    )
    group.add_argument("--request-id-prefix", metavar="TEXT", help="send X-Request-Id: TEXT0, TEXT1, …")


def _add_result_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=METRICS,
        metavar="NAMES",
        help="which of ttft,tpot,itl,e2el to print (default: all; a file has all)",
    )
    group.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="N,N", help="(default: 99)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests within these limits, e.g. ttft:200 tpot:50"
    )
    group.add_argument("--json", action="store_true", help="print the result as a JSON object")
    group.add_argument("--save-result", action="store_true", help="write the result to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with every request's lengths, times and text")
    group.add_argument("--append-result", action="store_true", help="add it to the file, as a line of JSON")
    group.add_argument("--result-dir", metavar="DIRECTORY", help="default: the current one")
    group.add_argument("--result-filename", metavar="NAME", help="default: from label, rate, model and time")
    group.add_argument("--label", metavar="TEXT", help="name of this run in result and file name; default: the backend")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result")
    group.add_argument("--plot", metavar="FILE", help="draw the run (png, svg or pdf; extra: plot)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 1 if no request was answered."""
    _check(arguments)
    goodput = _goodput(arguments.goodput)
    metadata = dict(_pair(entry, "--metadata") for entry in arguments.metadata)
    if arguments.plot:
        from jaxllm.http_client.plot import check_installed, draw

        check_installed()
    prompts, warm_up = _prompts(arguments)
    progress = make_progress(quiet=arguments.quiet)
    try:
        model, load = _run_async(_measure(arguments, prompts, warm_up, progress))
    finally:
        progress.finish()
    from jaxllm.http_client import results

    percentiles = arguments.metric_percentiles
    figures = results.summary(load, percentiles=percentiles, goodput_ms=goodput)
    report = _header(arguments, model, len(prompts)) | metadata | figures
    if arguments.json:
        print(json.dumps(report))
    else:
        print(results.as_text(report, arguments.percentile_metrics, percentiles))
    if arguments.save_result or arguments.append_result or arguments.save_detailed:
        detailed = results.details(load) if arguments.save_detailed else {}
        path = _save(report | detailed, arguments, model)
        terminal.note(f"result written to {path}") if not arguments.quiet else None
    if arguments.plot:
        draw(load, f"{model}, {arguments.request_rate:g} requests/s, {len(prompts)} prompts", arguments.plot)
    return 0 if figures["completed"] else 1


async def _measure(
    arguments: argparse.Namespace, prompts: "list[LoadPrompt]", warm_up: "LoadPrompt", progress: Progress
) -> "tuple[str, LoadRun]":
    from jaxllm.http_client.arrivals import start_times
    from jaxllm.http_client.load import ENDPOINTS, RequestMaker, ask, run_load, wait_until_ready

    backend = BACKENDS[arguments.backend]
    path = arguments.endpoint or ENDPOINTS[backend]
    async with _client(arguments) as client:
        progress.start("waiting for the server", None, "answer")
        model = arguments.model or await _first_model(client, arguments.ready_check_timeout_sec)
        maker = RequestMaker(backend, model, _extra_body(arguments), arguments.ignore_eos)  # type: ignore[arg-type]
        first = maker.body(warm_up)
        if arguments.ready_check_timeout_sec:
            await wait_until_ready(client, path, first, arguments.ready_check_timeout_sec)
            progress.advance()
        if arguments.num_warmups:
            progress.start("warming up", arguments.num_warmups, "request")
            await asyncio.gather(*(ask(client, path, first) for _ in range(arguments.num_warmups)))
        times = start_times(
            len(prompts),
            arguments.request_rate,
            burstiness=arguments.burstiness,
            ramp_up=_ramp_up(arguments),
            seed=arguments.seed,
        )
        progress.start("measuring", len(prompts), "request")
        return model, await run_load(
            client,
            maker,
            path,
            prompts,
            times,
            max_concurrency=arguments.max_concurrency,
            request_id_prefix=arguments.request_id_prefix,
            done=progress.advance,
        )


def _client(arguments: argparse.Namespace) -> "ServerClient":
    from jaxllm.http_client.client import ServerClient

    return ServerClient(
        arguments.base_url or f"http://{arguments.host}:{arguments.port}",
        api_key=arguments.api_key or os.environ.get(env.API_KEY) or os.environ.get("OPENAI_API_KEY"),
        headers=dict(_pair(entry, "--header") for entry in arguments.header),
        verify_tls=not arguments.insecure,
    )


async def _first_model(client: "ServerClient", timeout_seconds: float) -> str:
    """The first model that the server names, waiting while it is not there or still loads."""
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
    """The measured prompts, and one for the requests before them."""
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

    return _PlainTokenizer(load_tokenizer(text_files(name), name=name))


class _PlainTokenizer:
    """A tokenizer that adds no special tokens and writes none."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _extra_body(arguments: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": arguments.temperature}
    body |= {name: value for name in (*SAMPLING, "top_k") if (value := getattr(arguments, name)) is not None}
    if arguments.logprobs is not None:
        is_chat = BACKENDS[arguments.backend] == "openai-chat"
        body |= {"logprobs": True, "top_logprobs": arguments.logprobs} if is_chat else {"logprobs": arguments.logprobs}
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
    ends = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if arguments.ramp_up_strategy is None and any(ends):
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if arguments.ramp_up_strategy is not None and not all(ends):
        raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.ramp_up_strategy is not None and not math.isinf(arguments.request_rate):
        raise UsageError("--ramp-up-strategy gives the rate; leave out --request-rate")


def _header(arguments: argparse.Namespace, model: str, num_prompts: int) -> dict[str, Any]:
    """What was measured, under the names that vLLM's benchmark uses."""
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if arguments.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path


def _run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one: half the client's time is the event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


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


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{flag}: {text!r} must be NAME=VALUE")
    return name, value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if wrong := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 100, separated by commas")
    return values


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _count(text: str) -> int:
    try:
        value = whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError("must be a number")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return value


def _above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return value
