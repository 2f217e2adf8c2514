"""`jaxllm serve MODEL`: the OpenAI-compatible server."""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from jaxllm import log
from jaxllm.cli import options, running, terminal
from jaxllm.cli.flags import engine_flags, server_flags
from jaxllm.cli.parser import Parser
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from server.options import ServerOptions
from server.served_config import served_config

if TYPE_CHECKING:
    from server.serve import Serving

ABOUT = (
    "Serve a model over HTTP, as OpenAI's API does. The server listens at once and answers 503 until the model is loaded; "
    "SIGTERM and Ctrl-C let running requests end, a second one stops at once."
)
EXAMPLES = """examples:
  jaxllm serve                                          the model that is shipped with jaxllm, at port 8000
  jaxllm serve meta-llama/Llama-3.1-8B-Instruct --api-key secret
  jaxllm serve Qwen/Qwen3-0.6B --host 127.0.0.1 --port 0 --api-server-count 4"""


def add_arguments(parser: Parser) -> None:
    options.add_model_argument(parser)
    options.add_common_arguments(parser)
    parser.add_flags(server_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal or a failure. Returns the exit code."""
    options.use_model_argument(arguments)
    engine_options = options.engine_options(arguments)
    config = EngineConfig.from_options(**engine_options)
    server_options = options.server_options(arguments, config, server_flags())
    level = "debug" if arguments.verbose else "error" if arguments.quiet else None
    if server_options.logging.log_format == "json":
        log.set_up(level, format="json")
    if arguments.dry_run:
        return running.dry_run(engine_options)
    from jaxllm.llm_engine import check_model
    from server.middleware import load_middleware
    from server.serve import serve

    config = served_config(config, server_options)
    load_middleware(server_options.network.middleware or ())  # report its errors and the model's before any process starts
    check_model(config)
    if config.parallel.node_rank:
        return _follow(config, server_options, level)
    if server_options.processes.headless:
        raise ConfigError(
            "headless is set, but host 0 serves HTTP: leave it out, or give this host's --node-rank (and --nnodes)"
        )
    show = (lambda serving: None) if arguments.quiet else (lambda serving: _show(first_screen(serving)))
    with options.progress_for(arguments, engine_options) as progress:
        return serve(config, server_options, log_level=level, progress=progress, on_ready=show)


def _follow(config: EngineConfig, options: ServerOptions, log_level: str | None) -> int:
    """Run as another host until host 0 ends, with replicas or with devices of the one engine. Ctrl-C and SIGTERM end this host, in
    the first case once its requests have ended, and in the second with all others."""
    if config.parallel.num_replicas > 1:
        from jaxllm.replicas.hosts.host import serve_replicas

        return serve_replicas(
            config,
            drain_seconds=options.network.shutdown_timeout,
            log_level=log_level,
            log_format=options.logging.log_format,
            step_timeout_seconds=options.processes.step_timeout,
            compile_timeout_seconds=options.processes.compile_timeout,
            stall_timeout_seconds=options.processes.stall_timeout,
        )
    from jaxllm.engine.features import follow

    follow(config)
    return 0


def _show(screen: str) -> None:
    """Print the whole start report; to a log of JSON lines only the model and the address."""
    if not log.writes_json():
        print(screen, file=sys.stderr, flush=True)
        return
    for line in screen.strip().partition("\n\n")[0].splitlines():
        log.logger.info("%s", line)


def first_screen(serving: "Serving") -> str:
    """The served model, its address, and how to try it."""
    from server.listening import address_of, is_local

    network, access = serving.options.network, serving.options.access
    model = serving.options.replies.names_of(serving.config.model.model)[0]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in serving.start_seconds.items() if seconds >= 0.05)
    lines = [f"ready in {terminal.duration(serving.seconds)}" + (f" ({parts}; some at the same time)" if parts else "")]
    if network.uds is not None:
        base, curl = "http://localhost", f"curl --unix-socket {shlex.quote(network.uds)}"
        lines.append(f"{model} is served at the Unix socket {network.uds}")
    else:
        host, port = address_of(serving.socket)
        scheme = "https" if network.ssl_certfile else "http"
        base, curl = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{network.root_path}", "curl"
        lines.append(f"{model} is served at {base}/v1" + (f", with a page at {base}/" if serving.options.replies.web else ""))
        if not access.api_key and not is_local(network):
            lines.append("whoever reaches this machine can use it: --api-key KEY, or --host 127.0.0.1")
    path, body, extra, reply = _CALLS[serving.offers]
    request = shlex.quote(json.dumps({"model": model, **body, **dict.fromkeys(extra, True)}))
    key = ' \\\n    -H "Authorization: Bearer $API_KEY"' if access.api_key else ""
    lines += ["", f"  {curl} {base}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d {request}"]
    if network.uds is None:
        keywords = [f"{name}={json.dumps(value)}" for name, value in {"model": model, **body}.items()]
        keywords += [f'extra_body={{"{name}": True}}' for name in extra]
        lines += [
            "",
            "  from openai import OpenAI",
            f'  client = OpenAI(base_url="{base}/v1", api_key="{"API_KEY" if access.api_key else "none"}")',
            f"  reply = client.{path.replace('/', '.')}.create({', '.join(keywords)})",
            f"  print(reply.{reply})",
        ]
    return "\n".join(["", *lines, ""])


_CALLS: dict[str, tuple[str, dict[str, object], tuple[str, ...], str]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}, (), "choices[0].message.content"),
    "completions": ("completions", {"prompt": "Once upon a time", "max_tokens": 32}, (), "choices[0].text"),
    "token ids": ("completions", {"prompt": [1, 2, 3], "max_tokens": 32}, ("return_token_ids",), "choices[0].token_ids"),
    "embeddings": ("embeddings", {"input": "Hello!"}, (), "data[0].embedding"),
}
"""Requests of examples, by name: the path, the fields of the body, those that OpenAI lacks, and the part of the answer to print."""
