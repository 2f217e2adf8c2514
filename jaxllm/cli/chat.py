"""`jaxllm chat`: a conversation in the terminal, or over piped stdin."""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm import env
from jaxllm.cache_folders import make_folder
from jaxllm.cli import options, running, terminal
from jaxllm.cli.conversation import Conversation, LocalConversation, ServerConversation, connected
from jaxllm.cli.flags import engine_flags, sampling_flags
from jaxllm.cli.images import add_image_argument, given_files, image_part
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.server_arguments import add_connection_arguments, make_client
from jaxllm.config import Flag, unknown_name
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, JaxLLMError
from jaxllm.files import read_json
from jaxllm.flag_arguments import read_text, spelling

ABOUT = "Talk with a model. Commands begin with / (see /help); Ctrl-C stops an answer, Ctrl-D leaves."
EXAMPLES = """examples:
  jaxllm chat                                  with the demo model
  jaxllm chat Qwen/Qwen3-0.6B --temperature 0.7 --system "Answer in one sentence."
  jaxllm chat --url http://127.0.0.1:8000      with the model of a running server
  jaxllm chat --quick "What is 27 + 15?"       one answer, and the end
  jaxllm chat Qwen/Qwen3-VL-2B-Instruct --image photo.jpg --quick "What is this?"
  echo "What is 27 + 15?" | jaxllm chat -q     one answer for each line of stdin"""

QUOTES = '"""'
_HELP_WIDTH = 20
NOT_IN_CHAT = ("n", "logprobs", "prompt_logprobs")
"""Sampling values without a visible effect in a conversation."""


def chat_flags() -> list[Flag]:
    """The sampling flags that apply to a conversation."""
    return [flag for flag in sampling_flags() if flag.name not in NOT_IN_CHAT]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    parser.add_model()
    add("--system", "--system-prompt", help="system message to begin with")
    add("--quick", help="answer this message and end")
    add_image_argument(parser, "of the first message")
    add("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    add("--model-name", dest="model", metavar="NAME", default=argparse.SUPPRESS, help="as --model")
    options.add_lora_argument(parser, "LoRA adapter that answers")
    add("--url", metavar="URL", help="talk with the model of this server, e.g. http://127.0.0.1:8000")
    add_connection_arguments(parser)
    options.add_common_arguments(parser)
    parser.add_flags(chat_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Open the model, or connect to a server, and converse until the input ends. Returns the exit code."""
    sampling = options.sampling_options(arguments, chat_flags())
    messages = load_messages(arguments.load) if arguments.load else []
    images = [image_part(path, kind) for kind, path in given_files(arguments)]
    if arguments.url is not None:
        return _converse_with_server(arguments, sampling, messages, images)
    engine_options = options.engine_options(arguments)
    if engine_options.get("skip_tokenizer_init"):
        raise UsageError("a conversation needs the tokenizer; leave out --skip-tokenizer-init")
    lora_request = options.the_lora_request(arguments, engine_options)
    if arguments.dry_run:
        return running.dry_run(engine_options)
    with running.opened_llm(engine_options, options.progress_for(arguments, engine_options), lora_request) as llm:
        conversation = LocalConversation(llm, sampling, quiet=arguments.quiet, lora_request=lora_request)
        return _begin(conversation, arguments, messages, images)


def _converse_with_server(
    arguments: argparse.Namespace, sampling: dict[str, Any], messages: list[dict[str, Any]], images: list[dict[str, Any]]
) -> int:
    given = [flag.name for flag in engine_flags() if flag.name in arguments and flag.name != "model"]
    if given or arguments.dry_run:
        raise UsageError(f"{spelling([*given, 'dry_run'][0])} is for a model in this process; leave it out with --url")
    if arguments.lora:
        raise UsageError("--lora is for a model in this process; with --url name an adapter of the server with --model")
    client = make_client(arguments, arguments.url)
    with connected(client) as runner:
        model = vars(arguments).get("model")
        conversation = ServerConversation(client, runner, model, sampling, quiet=arguments.quiet)
        return _begin(conversation, arguments, messages, images)


def _begin(
    conversation: Conversation, arguments: argparse.Namespace, messages: list[dict[str, Any]], images: list[dict[str, Any]]
) -> int:
    conversation.messages, conversation.images = messages, images
    if arguments.system is not None:
        conversation.set_system(arguments.system)
    return answer_all(conversation, arguments.quick)


def answer_all(conversation: Conversation, quick: str | None, *, has_commands: bool = True) -> int:
    """Answer `quick`, or messages until the input ends or /exit. Without commands a message may begin with a slash.

    Returns the exit code: 1 if a piped message failed, because no user saw the error.
    """
    if quick is not None:
        conversation.answer(quick)
        return 0
    interactive, failed = sys.stdin.isatty(), False
    if interactive:
        _use_line_editing()
    if interactive and has_commands:
        terminal.note("/help for commands, Ctrl-D to leave")
    for text in _messages(input if interactive else _read_pipe, interactive=interactive):
        try:
            if not (has_commands and text.startswith("/")):
                conversation.answer(text)
            elif not _obey(conversation, text):
                break
        except EngineDeadError:
            raise
        except JaxLLMError as error:
            failed = True
            terminal.note(f"error: {error}", "red")
    return int(failed and not interactive)


def _obey(conversation: Conversation, line: str) -> bool:
    """Run a command. Returns whether the conversation continues. Raises ConfigError for an invalid one."""
    name, _, argument = line[1:].partition(" ")
    if name in EXITS:
        return False
    if name not in COMMANDS:
        raise ConfigError(unknown_name("command", "/" + name, ["/" + known for known in (*COMMANDS, *EXITS)]))
    command, argument = COMMANDS[name], argument.strip()
    if command.form == "FILE" and not argument:
        raise ConfigError(f"/{name} needs a file name")
    command.run(conversation, argument)
    return True


def load_messages(path: str) -> list[dict[str, Any]]:
    """Load a conversation from a file. Raises ConfigError."""
    messages = read_json(path)
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str | list) for m in messages
    ):
        raise ConfigError(f"{path} must hold a list of objects with role and content")
    return messages


def _help(conversation: Conversation, argument: str) -> None:
    for name, command in COMMANDS.items():
        terminal.note(f"/{name} {command.form}".ljust(_HELP_WIDTH) + command.about, "bold" if argument == name else "dim")
    terminal.note("/exit".ljust(_HELP_WIDTH) + "leave (also Ctrl-D)")
    quotes = "begins and ends a message of several lines; a space before / makes it no command"
    terminal.note(QUOTES.ljust(_HELP_WIDTH) + quotes)


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()
    terminal.note("forgotten")


def _system(conversation: Conversation, argument: str) -> None:
    conversation.set_system(argument)
    terminal.note("system message set" if argument else "system message removed")


def _save(conversation: Conversation, argument: str) -> None:
    text = json.dumps(conversation.messages, ensure_ascii=False, indent=1)
    try:
        Path(argument).expanduser().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {argument}: {error.strerror}") from None
    terminal.note(f"{len(conversation.messages)} messages saved in {argument}")


def _load(conversation: Conversation, argument: str) -> None:
    conversation.messages = load_messages(argument)
    terminal.note(f"{len(conversation.messages)} messages loaded")


def _attach(conversation: Conversation, argument: str, *, kind: str) -> None:
    conversation.images.append(image_part(argument, kind))
    count = sum(part["type"] == f"{kind}_url" for part in conversation.images)
    terminal.note(f"{terminal.counted(count, 'clip' if kind == 'audio' else kind)} for the next message")


def _set(conversation: Conversation, argument: str) -> None:
    known = {flag.name: flag for flag in chat_flags()}
    if not argument:
        for name, value in conversation.values().items():
            if name in known:
                terminal.note(f"{name} = {value!r}")
        return
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if name not in known:
        raise ConfigError(unknown_name("sampling value", name, known))
    before = conversation.sampling
    try:
        conversation.sampling = {**before, name: read_text(known[name], text.strip())}
        conversation.values()
    except ValueError as error:
        conversation.sampling = before
        raise ConfigError(str(error) if isinstance(error, InvalidRequestError) else f"{name}: {error}") from None
    terminal.note(f"{name} = {conversation.sampling[name]!r}")


class Command(NamedTuple):
    """A command of a conversation, with its line of /help."""

    run: Callable[[Conversation, str], None]
    form: str
    about: str


COMMANDS = {
    "help": Command(_help, "", "this list"),
    "reset": Command(_reset, "", "forget the conversation, keep the system message"),
    "system": Command(_system, "[TEXT]", "set the system message; without text remove it"),
    "image": Command(functools.partial(_attach, kind="image"), "FILE", "send an image with the next message"),
    "video": Command(functools.partial(_attach, kind="video"), "FILE", "send a video with the next message"),
    "audio": Command(functools.partial(_attach, kind="audio"), "FILE", "send audio with the next message"),
    "set": Command(_set, "[NAME VALUE]", "change a sampling value, e.g. /set temperature 0; alone: show all"),
    "save": Command(_save, "FILE", "write the conversation to a file"),
    "load": Command(_load, "FILE", "go on with a saved conversation"),
}
EXITS = ("exit", "quit", "bye")


def _messages(read: Callable[[str], str], *, interactive: bool) -> Iterator[str]:
    """Messages from lines; one that begins with three quotes goes on to the line that ends with three, or the end of input."""
    while True:
        try:
            text = read(">>> ")
            if text.startswith(QUOTES):
                text = _rest_of_message(text.removeprefix(QUOTES), read)
        except KeyboardInterrupt:
            if not interactive:
                raise
            terminal.note("\n(Ctrl-D leaves)")
            continue
        except EOFError:
            if interactive:
                print()
            return
        if text.strip():
            yield text.strip("\n")


def _rest_of_message(text: str, read: Callable[[str], str]) -> str:
    with contextlib.suppress(EOFError):
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + read("... ")
    return text.rstrip().removesuffix(QUOTES)


def _read_pipe(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _use_line_editing() -> None:
    """Enable arrow keys and a persistent history, where Python has readline."""
    try:
        import atexit
        import readline
    except ImportError:
        return
    history = env.cache_dir() / "chat_history"
    with contextlib.suppress(OSError):
        make_folder(history.parent)
        readline.read_history_file(history)
    readline.set_history_length(1000)

    @atexit.register
    def write_history() -> None:
        with contextlib.suppress(OSError):
            readline.write_history_file(history)
