"""`jaxllm run-batch`: answers the requests of an OpenAI batch file with an engine in this process."""

import argparse
import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli import options, running, terminal
from jaxllm.cli.flags import engine_flags, server_flags
from jaxllm.cli.numbers import positive
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.config import EngineConfig, Flag

if TYPE_CHECKING:
    from server.batch.run import BatchResult
    from server.options import ServerOptions

ABOUT = "Answer the requests of an OpenAI batch file (JSON lines), and write the answers in their order."
EXAMPLES = """examples:
  jaxllm run-batch -i requests.jsonl -o answers.jsonl -m Qwen/Qwen3-0.6B
  jaxllm run-batch -i requests.jsonl -o answers.jsonl -m demo          the same again goes on where it was interrupted

a line of the input:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}}
urls: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/score, /v1/rerank

The exit code is 0 if the whole file was processed; what failed has its error in the output and is counted at the end."""

REPLY_FLAGS = ("served_model_name", "return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_per_request_metrics")
ADAPTER_FLAGS = ("lora_modules", "lora_dir")


def batch_flags() -> list[Flag]:
    """The server options that apply without a network."""
    from server.options import ChatOptions

    names = {field.name for field in fields(ChatOptions)} | {*REPLY_FLAGS, *ADAPTER_FLAGS}
    return [flag for flag in server_flags() if flag.name in names]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="requests, a JSON object a line")
    target = "answers; those that are there already are not computed again"
    add("-o", "--output-file", required=True, metavar="FILE", help=target)
    add("--overwrite", action="store_true", help="begin anew, whatever the output file holds")
    most = "requests that are read ahead and run at once; default: 4 times --max-num-seqs"
    add("--max-in-flight", type=positive, help=most)
    options.add_common_arguments(parser)
    parser.add_flags(batch_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Answer the file, and print a line of counts. Returns the exit code."""
    from server.batch.run import EngineStopped
    from server.options import AccessOptions
    from server.served_config import check_together

    chosen = options.engine_options(arguments)
    fixed = {"max_stored_responses": 0, "disable_uvicorn_access_log": True}
    server = options.server_options(arguments, batch_flags(), **fixed)
    check_together(server, EngineConfig.from_options(**chosen))
    server = replace(server, access=AccessOptions())  # the environment may have a server's keys
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    num_lines = _check_files(source, target)
    if arguments.dry_run:
        return running.dry_run(chosen)
    try:
        if arguments.overwrite:
            target.unlink(missing_ok=True)
        result = _run(arguments, num_lines, chosen, server)
    except (EngineStopped, OSError, KeyboardInterrupt) as error:
        by_user = isinstance(error, KeyboardInterrupt)
        what = "interrupted:" if by_user else f"error: {getattr(error, 'strerror', None) or error};"
        terminal.note(f"{what} {target} has the answers so far, and the same command goes on from there", "red")
        return 130 if by_user else 1
    if not arguments.quiet or result.num_failed:
        skipped = f", {result.num_skipped} were there already" if result.num_skipped else ""
        where = f"; {target} has the errors" if result.num_failed else ""
        answered = terminal.counted(result.num_answered, "request")
        terminal.note(f"{answered} answered, {result.num_failed} failed{skipped}{where}")
    return 0


def _check_files(source: Path, target: Path) -> int:
    """The number of non-blank lines of the input. Raises UsageError for files that cannot be used."""
    for name, path in (("input", source), ("output", target)):
        if path.name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise UsageError(f"--{name}-file is {str(path)!r}, must be a regular file: it is read more than once")
    try:
        with source.open("rb") as file:
            num_lines = sum(1 for line in file if line.strip())
    except OSError as error:
        raise UsageError(f"cannot read the input file {source}: {error.strerror}") from None
    if target.exists() and target.samefile(source):
        raise UsageError("--output-file is the input file; choose another")
    return num_lines


def _run(arguments: argparse.Namespace, num_lines: int, chosen: dict[str, Any], server: "ServerOptions") -> "BatchResult":
    from server.app import create_app
    from server.batch.lines import read_lines
    from server.batch.output_file import BatchOutput
    from server.batch.run import run_batch

    try:
        output = BatchOutput(Path(arguments.output_file))
    except OSError as error:
        raise UsageError(f"cannot write the output file {arguments.output_file}: {error.strerror}") from None
    progress = options.progress_for(arguments, chosen)
    engine = running.open_async_llm(chosen, progress)
    max_in_flight = arguments.max_in_flight or 4 * (engine.config.scheduler.max_num_seqs or 64)
    lines, is_alive = read_lines(Path(arguments.input_file)), lambda: engine.is_running

    async def answer() -> "BatchResult":
        app = create_app(engine, server)
        async with app.router.lifespan_context(app):
            return await run_batch(app, lines, output, max_in_flight=max_in_flight, is_alive=is_alive, on_done=progress.advance)

    try:
        with progress:
            progress.start("answering", num_lines, "request")
            return asyncio.run(answer())
    finally:
        engine.shutdown()
