"""The arguments of `jaxllm bench serve`. Names are those of `vllm bench serve` where it has the same."""

import contextlib
import math

from jaxllm.cli import numbers, options
from jaxllm.cli.flags import shaping_flags
from jaxllm.cli.parser import Parser
from jaxllm.cli.server_arguments import add_connection_arguments
from jaxllm.flag_arguments import read_object, spelling
from jaxllm.vllm_compat.arguments import add_vllm_arguments
from jaxllm.vllm_compat.flags import BENCH_TABLE

DATASETS = ("random", "random-mm", "mix", "sharegpt", "custom", "prefix_repetition")
BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat", "openai-embeddings": "openai-embeddings"}
SAMPLING = {flag.name: flag.type for flag in shaping_flags() if flag.name != "temperature"}
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def add_arguments(parser: Parser) -> None:
    options.add_log_arguments(parser)
    _add_server_arguments(parser)
    _add_prompt_arguments(parser)
    _add_image_arguments(parser)
    _add_load_arguments(parser)
    _add_request_arguments(parser)
    _add_result_arguments(parser)
    add_vllm_arguments(parser, names=(*BENCH_TABLE, "trust_remote_code", "tokenizer_mode"))


def _add_server_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    kinds = "openai (= vllm): completions; openai-chat: chat completions; openai-embeddings: vectors"
    add("--backend", choices=sorted(BACKENDS), default="openai", help=kinds)
    add("--base-url", metavar="URL", help="the server, e.g. http://127.0.0.1:8000; instead of --host and --port")
    add("--host", default="127.0.0.1", metavar="NAME", help="(default: 127.0.0.1)")
    add("--port", type=numbers.positive, default=8000, help="(default: 8000)")
    add("--endpoint", metavar="PATH", help="default: the backend's, such as /v1/completions")
    add("-m", "--model", metavar="NAME", help="model to ask for; default: the first that /v1/models lists")
    add("--served-model-name", metavar="NAME", help="what the server calls it; default: as --model")
    add("--lora-modules", nargs="+", metavar="NAME", help="LoRA adapters of the server: each request names one of them")
    which = "which: all alike, in turn, or the n-th named 1/n as often as the first"
    add("--lora-assignment", choices=["random", "round-robin", "zipf"], default="random", help=which)
    add("--tokenizer", metavar="NAME", help="directory or hub id; needed only for random text and for ShareGPT lengths")
    add_connection_arguments(group)
    wait = "how long to wait for the answer to a first request, which is not measured; 0: send none"
    add("--ready-check-timeout-sec", type=numbers.not_negative, default=600.0, metavar="SECONDS", help=wait)


def _add_prompt_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--dataset-name", type=numbers.dataset(DATASETS), choices=DATASETS, default="random", help="(default: random)")
    files = 'mix: {"requests": [[prompt, output], …]}; sharegpt: a JSON list; custom: JSON lines with prompt or messages'
    add("--dataset-path", metavar="FILE", help=files)
    add("--num-prompts", type=numbers.positive, help="default: 1000; for mix and custom the whole file")
    add("--input-len", "--random-input-len", type=numbers.positive, default=1024, help="tokens of random prompts")
    add(
        *(
            "--output-len",
            "--random-output-len",
            "--sharegpt-output-len",
            "--custom-output-len",
            "--prefix-repetition-output-len",
        ),
        type=numbers.positive,
        help="output tokens asked for; default: 128 for random prompts, else as the file says",
    )
    spread = "random: lengths between (1-X) and (1+X) times the given"
    add("--range-ratio", "--random-range-ratio", type=numbers.fraction, default=0.0, help=spread)
    add(
        *("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len"),
        type=numbers.count,
        help="tokens at the front that prompts share (default: 0; prefix_repetition: 256)",
    )
    add("--suffix-len", "--prefix-repetition-suffix-len", type=numbers.positive, default=256, help="(default: 256)")
    add("--num-prefixes", "--prefix-repetition-num-prefixes", type=numbers.positive, default=10, help="(default: 10)")
    add("--random-text", action="store_true", help="send random prompts as text, not as token ids; always so with openai-chat")
    below = "random token ids are below it (less 256); default: the tokenizer's, else 1000, which every model has"
    add("--vocab-size", type=numbers.positive, help=below)
    add("--seed", type=numbers.count, default=0, help="of prompts and start times")


def _add_image_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("images of random-mm").add_argument
    add("--random-mm-base-items-per-request", type=numbers.count, default=1, help="images of a request (default: 1)")
    spread = "between (1-X) and (1+X) times as many"
    add("--random-mm-num-mm-items-range-ratio", type=numbers.fraction_or_1, default=0.0, help=spread)
    limit = numbers.ArgumentType(_image_limit, "JSON")
    add("--random-mm-limit-mm-per-prompt", type=limit, default=255, help='at most so many (default: {"image": 255})')
    sizes = "how likely each (height, width, 1) is (default: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5})"
    add("--random-mm-bucket-config", type=numbers.ArgumentType(_image_sizes, "DICT"), help=sizes)


def _add_load_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=numbers.rate, default=math.inf, help="requests/s; inf: all at once")
    shape = "shape of the gamma distributed gaps: 1 is Poisson, less is burstier"
    add("--burstiness", type=numbers.above_zero, default=1.0, help=shape)
    add("--max-concurrency", type=numbers.positive, help="most requests under way at once")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow over the run")
    add("--ramp-up-start-rps", type=numbers.above_zero, help="the rate at its start")
    add("--ramp-up-end-rps", type=numbers.above_zero, help="the rate at its end")
    add("--num-warmups", type=numbers.count, default=0, help="requests before the measured ones")


def _add_request_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action="store_true", help="write exactly as many tokens as asked for (vLLM, jaxllm)")
    add("--temperature", type=float, default=0.0, help="(default: 0)")
    for name, kind in SAMPLING.items():
        add(spelling(name), type=kind, help="default: the server's")
    add("--logprobs", type=numbers.count, help="logprobs of so many likely tokens")
    add("--extra-body", type=numbers.json_object, default={}, help="laid over the body of every request")
    variables = "values of the chat template's variables, sent with every request; for openai-chat"
    add("--chat-template-kwargs", type=numbers.json_object, help=variables)
    add("--request-id-prefix", help="send X-Request-Id: TEXT0, TEXT1, …")


def _add_result_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("results").add_argument
    shown = "which of ttft,tpot,itl,e2el to print (default: all; a file has all)"
    add("--percentile-metrics", type=numbers.names(METRICS), default=METRICS, help=shown)
    add("--metric-percentiles", type=numbers.several(numbers.percentile), default=(99.0,), help="(default: 99)")
    limits = "count requests within these limits, e.g. ttft:200 tpot:50"
    add("--goodput", nargs="+", type=numbers.ArgumentType(_limit, "NAME:MS"), default=[], help=limits)
    add("--json", action="store_true", help="print the result as a JSON object")
    add("--output-json", metavar="FILE", help="write the result to this file")
    add("--save-result", action="store_true", help="write the result to a JSON file that is named after the run")
    add("--save-detailed", action="store_true", help="with every request's lengths, times and text")
    add("--append-result", action="store_true", help="add it to the file, as a line of JSON")
    add("--result-dir", metavar="DIRECTORY", help="default: the current one")
    add("--result-filename", metavar="NAME", help="default: from label, rate, model and time")
    add("--label", help="name of this run in result and file name; default: the backend")
    add("--metadata", nargs="*", type=numbers.name_value, default=[], metavar="KEY=VALUE", help="kept in the result")
    add("--disable-tqdm", action="store_true", help="show no progress")
    add("--profile", action="store_true", help="have the server trace the run (its --profiler-dir and --enable-dev-endpoints)")
    add("--plot", metavar="FILE", help="draw the run (png, svg or pdf; extra: plot)")


def _image_limit(text: str) -> int:
    from jaxllm.http_client.random_images import read_limit

    return read_limit(read_object(text))


def _image_sizes(text: str) -> dict[tuple[int, int], float]:
    from jaxllm.http_client.random_images import read_sizes

    return read_sizes(text)


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in GOODPUT_METRICS and (milliseconds := float(limit)) >= 0:
            return name, milliseconds
    raise ValueError(f"{text!r} must be NAME:MILLISECONDS with NAME one of {', '.join(GOODPUT_METRICS)}")
