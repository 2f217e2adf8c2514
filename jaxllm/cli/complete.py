"""`jaxllm complete`: a running server continues each text, without a chat template."""

import argparse

from jaxllm.cli import options
from jaxllm.cli.chat import answer_all, chat_flags
from jaxllm.cli.conversation import ServerCompletions, connected
from jaxllm.cli.parser import Parser
from jaxllm.cli.server_arguments import add_connection_arguments, make_client

ABOUT = "Have a running server write on from texts: --quick, or each line of the terminal or of stdin."
EXAMPLES = """examples:
  jaxllm complete --quick "Once upon a time" --max-tokens 32
  jaxllm complete --url http://127.0.0.1:8000 < lines.txt
  jaxllm generate "Once upon a time"           the same with a model in this process"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: http://127.0.0.1:8000)")
    parser.add_argument("-m", "--model", "--model-name", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument("--quick", help="write on from this text and end")
    options.add_config_argument(parser)
    add_connection_arguments(parser)
    options.add_log_arguments(parser)
    parser.add_flags(chat_flags())


def run(arguments: argparse.Namespace) -> int:
    """Continue each text until the input ends. Returns the exit code."""
    sampling = options.sampling_options(arguments, chat_flags())
    client = make_client(arguments, arguments.url)
    with connected(client) as runner:
        server = ServerCompletions(client, runner, arguments.model, sampling, quiet=arguments.quiet)
        return answer_all(server, arguments.quick, has_commands=False)
