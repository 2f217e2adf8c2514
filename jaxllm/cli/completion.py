"""`jaxllm completion bash|zsh|tcsh`: a script that lets the shell complete commands, flags and values."""

import argparse

from jaxllm.cli.parser import Formatter, Parser

ABOUT = "Print a completion script for a shell."
EXAMPLES = """examples:
  jaxllm completion bash > ~/.local/share/bash-completion/completions/jaxllm
  jaxllm completion zsh > "${fpath[1]}/_jaxllm" """

FILES = ("file", "config", "mix", "load", "chat_template", "dataset_path", "plot")
DIRECTORIES = ("download_dir", "compiled_artifact", "output", "result_dir")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="which shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Returns the exit code."""
    import shtab

    from jaxllm.cli.main import COMMANDS, SUBCOMMANDS, command_parser

    root = argparse.ArgumentParser(prog="jaxllm")
    root.add_argument("--version", action="version", version="")
    commands = root.add_subparsers()
    for name, about in COMMANDS.items():
        built = command_parser(name)
        for first, second in SUBCOMMANDS:
            if first == name:
                _add_missing(built, command_parser(first, second))
        help = Formatter(name)
        for action in built._actions:
            action.help = help._get_help_string(action)
            if action.option_strings and action.nargs != 0 and action.metavar is action.choices is None:
                action.metavar = help._get_default_metavar_for_optional(action)
            if action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        commands.add_parser(name, help=about, parents=[built], add_help=False)
    print(shtab.complete(root, arguments.shell))
    return 0


def _add_missing(parser: Parser, other: Parser) -> None:
    """Options of `other` that `parser` lacks: the shell then completes those of both."""
    for action in other._actions:
        if action.option_strings and not set(action.option_strings) & set(parser._option_string_actions):
            parser._add_action(action)
