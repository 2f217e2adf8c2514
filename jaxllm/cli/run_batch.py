"""`jaxllm run-batch`: answers the requests of an OpenAI batch file with an engine in this process."""

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli import planning, running, terminal
from jaxllm.cli.flags import engine_flags, server_flags
from jaxllm.cli.options import add_common_arguments, engine_options, progress_for
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.settings import chosen, resolve
from jaxllm.config import EngineConfig, Flag
from jaxllm.flag_arguments import whole_number
from jaxllm.progress import Progress

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
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, a JSON object a line")
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers; those that are there already are not computed again",
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever the output file holds")
    parser.add_argument(
        "--max-in-flight",
        type=whole_number,
        metavar="N",
        help="requests that are read ahead and run at once; default: 4 times --max-num-seqs",
    )
    add_common_arguments(parser)
    parser.add_flags(batch_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Answer the file, and print a line of counts. Returns the exit code."""
    from server.adapters import check_adapter_options
    from server.batch.run import EngineStopped
    from server.options import LoggingOptions, ServerOptions

    options = engine_options(arguments)
    server = ServerOptions.from_options(
        **chosen(resolve(batch_flags(), vars(arguments), arguments.config)), max_stored_responses=0
    )
    server = ServerOptions(
        chat=server.chat,
        replies=server.replies,
        limits=server.limits,
        adapters=server.adapters,
        logging=LoggingOptions(disable_uvicorn_access_log=True),
    )
    config = EngineConfig.from_options(**options)
    check_adapter_options(server.adapters, config, server.replies.names_of(config.model.model))
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    if arguments.max_in_flight is not None and arguments.max_in_flight < 1:
        raise UsageError(f"--max-in-flight is {arguments.max_in_flight}, must be at least 1")
    for name, path in (("input", source), ("output", target)):
        if path.name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise UsageError(f"--{name}-file is {str(path)!r}, must be a regular file: it is read more than once")
    num_lines = _count(source)
    if target.exists() and target.samefile(source):
        raise UsageError("--output-file is the input file; choose another")
    if arguments.dry_run:
        from server.speech import check_names

        check_names(server.chat)
        return planning.dry_run(options)
    try:
        if arguments.overwrite:
            target.unlink(missing_ok=True)
        result = _run(source, target, num_lines, options, server, arguments.max_in_flight, progress_for(arguments, options))
    except (EngineStopped, OSError, KeyboardInterrupt) as error:
        by_user = isinstance(error, KeyboardInterrupt)
        what = "interrupted:" if by_user else f"error: {getattr(error, 'strerror', None) or error};"
        terminal.note(f"{what} {target} has the answers so far, and the same command goes on from there", "red")
        return 130 if by_user else 1
    if not arguments.quiet or result.num_failed:
        skipped = f", {result.num_skipped} were there already" if result.num_skipped else ""
        where = f"; {target} has the errors" if result.num_failed else ""
        terminal.note(
            f"{terminal.counted(result.num_answered, 'request')} answered, {result.num_failed} failed{skipped}{where}"
        )
    return 0


def _count(source: Path) -> int:
    """The number of non-blank lines. Raises UsageError if the file cannot be read."""
    try:
        with source.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise UsageError(f"cannot read the input file {source}: {error.strerror}") from None


def _run(
    source: Path,
    target: Path,
    num_lines: int,
    options: Mapping[str, Any],
    server: "ServerOptions",
    max_in_flight: int | None,
    progress: Progress,
) -> "BatchResult":
    from server.app import create_app
    from server.batch.lines import read_lines
    from server.batch.output_file import BatchOutput
    from server.batch.run import run_batch

    try:
        output = BatchOutput(target)
    except OSError as error:
        raise UsageError(f"cannot write the output file {target}: {error.strerror}") from None
    engine = running.open_async_llm(options, progress)
    try:
        progress.start("answering", num_lines, "request")

        async def answer() -> "BatchResult":
            app = create_app(engine, server)
            async with app.router.lifespan_context(app):
                return await run_batch(
                    app,
                    read_lines(source),
                    output,
                    max_in_flight=max_in_flight or 4 * (engine.config.scheduler.max_num_seqs or 64),
                    is_alive=lambda: engine.is_running,
                    on_done=progress.advance,
                )

        return asyncio.run(answer())
    finally:
        progress.finish()
        engine.shutdown()
