"""`jaxllm serve MODEL`: the OpenAI-compatible server."""

import argparse

from jaxllm import log
from jaxllm.cli import options, running
from jaxllm.cli.flags import engine_flags, server_flags
from jaxllm.cli.parser import Parser
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from server.served_config import check_together, served_config

ABOUT = (
    "Serve a model over HTTP, as OpenAI's API does. The server listens at once and answers 503 until the model is loaded; "
    "SIGTERM and Ctrl-C let running requests end, a second one stops at once."
)
EXAMPLES = """examples:
  jaxllm serve                                          the model that is shipped with jaxllm, at port 8000
  jaxllm serve meta-llama/Llama-3.1-8B-Instruct --api-key secret
  jaxllm serve Qwen/Qwen3-0.6B --host 127.0.0.1 --port 0 --api-server-count 4"""


def add_arguments(parser: Parser) -> None:
    parser.add_model()
    options.add_common_arguments(parser)
    parser.add_flags(server_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal or a failure. Returns the exit code."""
    server_options = options.server_options(arguments, server_flags())
    roles = server_options.processes.roles
    engine_options = options.engine_options(arguments, dict if roles is None else roles.applied_to)
    config = EngineConfig.from_options(**engine_options)
    check_together(server_options, config)
    level = "debug" if arguments.verbose else "error" if arguments.quiet else None
    if server_options.logging.log_format == "json":
        log.set_up(level, format="json")
    if arguments.dry_run:
        return running.dry_run(engine_options if roles is None else roles.decode_engine(config).flat())
    from jaxllm.llm_engine import check_model
    from server.middleware import load_middleware
    from server.serve import follow_host_0, serve
    from server.start_report import show_start

    config = served_config(config, server_options)
    load_middleware(server_options.network.middleware or ())  # report its errors and the model's before any process starts
    check_model(config if roles is None else roles.decode_engine(config))
    if config.parallel.node_rank:
        return follow_host_0(config, server_options, log_level=level)
    if server_options.processes.headless:
        raise ConfigError("headless is set, but host 0 serves HTTP: leave it out, or give --node-rank and --nnodes")
    on_ready = (lambda serving: None) if arguments.quiet else show_start
    with options.progress_for(arguments, engine_options) as progress:
        return serve(config, server_options, log_level=level, progress=progress, on_ready=on_ready)
