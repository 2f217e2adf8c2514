"""`jaxllm compile MODEL --output DIR`: compiles an engine's programs ahead of time for machines of this kind."""

import argparse
import time
from pathlib import Path

from jaxllm.cli import options, running
from jaxllm.cli.flags import engine_flags
from jaxllm.cli.parser import Parser
from jaxllm.cli.terminal import size

ABOUT = (
    "Compile the programs of an engine ahead of time. An engine on a machine of the same kind, with the same options and versions, "
    "starts from them with --compiled-artifact and compiles nothing. The directory holds code: trust it like a program."
)
EXAMPLES = """examples:
  jaxllm compile meta-llama/Llama-3.1-8B-Instruct --output compiled/8b
  jaxllm generate -m meta-llama/Llama-3.1-8B-Instruct --compiled-artifact compiled/8b"""


def add_arguments(parser: Parser) -> None:
    parser.add_model()
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="directory to write, new or empty")
    options.add_common_arguments(parser)
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Compile and report what was written. Returns the exit code."""
    chosen = options.engine_options(arguments)
    if arguments.dry_run:
        return running.dry_run(chosen)
    from jaxllm.config import EngineConfig
    from jaxllm.engine.compile import compile_artifact
    from jaxllm.text.model_files import text_files

    config, started = EngineConfig.from_options(**chosen), time.perf_counter()
    directory = text_files(config.model.model, revision=config.model.revision, download_dir=config.model.download_dir)
    with options.progress_for(arguments, chosen) as progress:
        made = compile_artifact(config, directory, Path(arguments.output), progress)
    seconds = time.perf_counter() - started
    print(f"{made.num_programs} programs, {size(made.num_bytes)}, in {arguments.output} ({seconds:.1f} s)")
    return 0
