"""The arguments of `jaxllm bench serve`. Names are those of `vllm bench serve` where it has the same."""

import argparse
import json
import math
from typing import Any

from jaxllm.cli import options
from jaxllm.cli.bench_elsewhere import add_arguments_of_vllm, dataset
from jaxllm.cli.flags import shaping_flags
from jaxllm.cli.numbers import above_zero, count, fraction, not_negative, positive, rate
from jaxllm.cli.parser import Parser
from jaxllm.cli.server_arguments import add_connection_arguments
from jaxllm.flag_arguments import spelling
from jaxllm.vllm_arguments import add_vllm_arguments

DATASETS = ("random", "mix", "sharegpt", "custom", "prefix_repetition")
BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat", "openai-embeddings": "openai-embeddings"}
SAMPLING = {flag.name: flag.type for flag in shaping_flags() if flag.name != "temperature"}
METRICS = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: Parser) -> None:
    options.add_log_arguments(parser)
    _add_server_arguments(parser)
    _add_dataset_arguments(parser)
    _add_load_arguments(parser)
    _add_request_arguments(parser)
    _add_result_arguments(parser)
    add_arguments_of_vllm(parser)
    add_vllm_arguments(parser, names=("trust_remote_code", "tokenizer_mode"))


def _add_server_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=sorted(BACKENDS),
        default="openai",
        help="openai (= vllm): completions; openai-chat: chat completions; openai-embeddings: vectors (default: openai)",
    )
    group.add_argument("--base-url", metavar="URL", help="the server, e.g. http://127.0.0.1:8000; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=positive, default=8000, metavar="N", help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's, such as /v1/completions")
    group.add_argument("-m", "--model", metavar="NAME", help="model to ask for; default: the first that /v1/models lists")
    group.add_argument("--served-model-name", metavar="NAME", help="what the server calls it; default: as --model")
    group.add_argument(
        "--lora-modules", nargs="+", metavar="NAME", help="LoRA adapters of the server: each request names one of them"
    )
    group.add_argument(
        "--lora-assignment",
        choices=["random", "round-robin", "zipf"],
        default="random",
        help="which: all alike, in turn, or the n-th named 1/n as often as the first (default: random)",
    )
    group.add_argument(
        "--tokenizer", metavar="NAME", help="directory or hub id; needed only for random text and for ShareGPT lengths"
    )
    add_connection_arguments(group)
    group.add_argument(
        "--ready-check-timeout-sec",
        type=not_negative,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the answer to a first request, which is not measured; 0: send none (default: 600)",
    )


def _add_dataset_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", type=dataset(DATASETS), choices=DATASETS, default="random", help="(default: random)")
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='mix: {"requests": [[prompt, output], …]}; sharegpt: a JSON list; custom: JSON lines with prompt or messages',
    )
    group.add_argument("--num-prompts", type=positive, metavar="N", help="default: 1000; for mix and custom the whole file")
    group.add_argument(
        "--input-len", "--random-input-len", type=positive, default=1024, metavar="N", help="tokens of random prompts"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        "--prefix-repetition-output-len",
        type=positive,
        metavar="N",
        help="output tokens asked for; default: 128 for random prompts, else as the file says",
    )
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=fraction,
        default=0.0,
        metavar="X",
        help="random: lengths between (1-X) and (1+X) times the given (default: 0)",
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        type=count,
        metavar="N",
        help="tokens at the front that prompts share (default: 0; prefix_repetition: 256)",
    )
    group.add_argument(
        "--suffix-len", "--prefix-repetition-suffix-len", type=positive, default=256, metavar="N", help="(default: 256)"
    )
    group.add_argument(
        "--num-prefixes", "--prefix-repetition-num-prefixes", type=positive, default=10, metavar="N", help="(default: 10)"
    )
    group.add_argument(
        "--random-text", action="store_true", help="send random prompts as text, not as token ids; always so with openai-chat"
    )
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="random token ids are below it (less 256); default: the tokenizer's, else 1000, which every model has",
    )
    group.add_argument("--seed", type=count, default=0, metavar="N", help="of prompts and start times (default: 0)")


def _add_load_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=rate, default=math.inf, metavar="X", help="requests/s; inf: all at once (default: inf)"
    )
    group.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="shape of the gamma distributed gaps: 1 is Poisson, less is burstier (default: 1)",
    )
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="most requests under way at once")
    group.add_argument("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow over the run")
    group.add_argument("--ramp-up-start-rps", type=above_zero, metavar="X", help="the rate at its start")
    group.add_argument("--ramp-up-end-rps", type=above_zero, metavar="X", help="the rate at its end")
    group.add_argument(
        "--num-warmups", type=count, default=0, metavar="N", help="requests before the measured ones (default: 0)"
    )


def _add_request_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="write exactly as many tokens as asked for (vLLM, jaxllm)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0)")
    for name, kind in SAMPLING.items():
        group.add_argument(spelling(name), type=kind, metavar="N" if kind is int else "X", help="default: the server's")
    group.add_argument("--logprobs", type=count, metavar="N", help="logprobs of so many likely tokens")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="laid over the body of every request"
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="values of the chat template's variables, sent with every request; for openai-chat",
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
    group.add_argument("--output-json", metavar="FILE", help="write the result to this file")
    group.add_argument("--save-result", action="store_true", help="write the result to a JSON file that is named after the run")
    group.add_argument("--save-detailed", action="store_true", help="with every request's lengths, times and text")
    group.add_argument("--append-result", action="store_true", help="add it to the file, as a line of JSON")
    group.add_argument("--result-dir", metavar="DIRECTORY", help="default: the current one")
    group.add_argument("--result-filename", metavar="NAME", help="default: from label, rate, model and time")
    group.add_argument("--label", metavar="TEXT", help="name of this run in result and file name; default: the backend")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    group.add_argument(
        "--profile", action="store_true", help="have the server trace the run (its --profiler-dir and --enable-dev-endpoints)"
    )
    group.add_argument("--plot", metavar="FILE", help="draw the run (png, svg or pdf; extra: plot)")


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
