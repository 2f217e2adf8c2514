"""The `jaxllm` command: selects and runs a subcommand, and converts errors to exit codes.

0 done · 1 an error of the project · 2 wrong usage · 130 Ctrl-C · 141 the reader of stdout went away
"""

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from jaxllm import address_space, log
from jaxllm.cli.options import set_up_log
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.terminal import styled
from jaxllm.config import unknown_name
from jaxllm.errors import JaxLLMError

COMMANDS = {
    "generate": "write on from prompts, or answer them",
    "chat": "talk with a model",
    "complete": "have a running server write on from prompts",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "run-batch": "answer the requests of an OpenAI batch file",
    "bench": "measure throughput or latency, offline or of a server, or how they scale",
    "top": "a live view of a running server",
    "compile": "compile an engine's programs ahead of time",
    "models": "supported architectures, models on this machine",
    "inspect": "the numbers of a model, and whether it fits",
    "config": "every option and where its value comes from",
    "env": "versions and devices, for a bug report",
    "completion": "completion script for a shell",
}
"""Each is a module of this package with `ABOUT`, `add_arguments` and `run`."""
SUBCOMMANDS = (("bench", "serve"), ("bench", "scaling"))
"""Commands with a separate module for the second word."""
OTHER_NAMES = {"collect-env": "env"}
"""vLLM's names for some commands."""
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `jaxllm` with these arguments (default: those of the process). Returns the exit code."""
    _open_missing_streams()
    try:
        try:
            code = _dispatch(sys.argv[1:] if arguments is None else list(arguments))
        except SystemExit as stop:  # argparse exits this way
            code = stop.code if isinstance(stop.code, int) else 1
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if address_space.is_full(error):
            _print_error(f"memory ran out ({str(error) or type(error).__name__}){address_space.describe_limit()}")
            return 1
        if not isinstance(error, OSError) or error.errno not in _CANNOT_WRITE:
            raise
        _drop_output()
        _print_error(f"cannot write{f' {error.filename}' if error.filename else ' the output'}: {error.strerror}")
        return 1


def _drop_output() -> None:
    """Flush what can be written and discard the rest, so that the interpreter's last flush raises no error."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(text: str, *, verbose: bool = False) -> None:
    """A line on stderr, or in a log of JSON lines; if verbose with the traceback."""
    if log.writes_json():
        log.logger.error("%s", text, exc_info=verbose)
        return
    if verbose:
        traceback.print_exc()
    print(styled("error", "red", sys.stderr) + f": {text}", file=sys.stderr)


def _open_missing_streams() -> None:
    """Open standard streams that were closed at the start, as for some daemons, so that no socket gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def command_parser(*words: str) -> Parser:
    """The parser of a command; of two words if they are in SUBCOMMANDS."""
    module = _module(words)
    parser = Parser(" ".join(["jaxllm", *words]), module.ABOUT, getattr(module, "EXAMPLES", ""))
    module.add_arguments(parser)
    return parser


def _module(words: Sequence[str]) -> ModuleType:
    return importlib.import_module(f"jaxllm.cli.{'_'.join(words).replace('-', '_')}")


def _dispatch(arguments: list[str]) -> int:
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            print(f"jaxllm: error: argument {argument!a} is not UTF-8", file=sys.stderr)
            return 2
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in ("-v", "-V", "--version"):
        from jaxllm.cli.env import version_line

        print(version_line())
        return 0
    name = OTHER_NAMES.get(arguments[0], arguments[0])
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "option" else COMMANDS
        print(f"jaxllm: error: {unknown_name(kind, name, known)}\nrun `jaxllm --help` for the commands", file=sys.stderr)
        return 2
    words = arguments[:2] if tuple(arguments[:2]) in SUBCOMMANDS else [name]
    parser = command_parser(*words)
    found = parser.parse(arguments[len(words) :])
    try:
        if "quiet" in found:
            set_up_log(found)
        parser.take_vllm_flags(found)
        return _module(words).run(found)
    except UsageError as error:
        parser.error(str(error))
    except JaxLLMError as error:
        _print_error(str(error), verbose=getattr(found, "verbose", False))
        return 1


def _overview() -> str:
    return "\n".join(
        [
            "jaxllm: an LLM inference engine on JAX\n",
            "usage: jaxllm COMMAND [options]      (jaxllm COMMAND --help, jaxllm --version)\n",
            *(f"  {name:<12}{about}" for name, about in COMMANDS.items()),
            "\n`jaxllm generate` alone lets the model that is shipped with jaxllm write something.",
        ]
    )
