"""A process that renders conversations: a template that takes too much time or memory ends only this process.

Reads msgpack frames from its input: first {"seconds", "memory_bytes", "special_tokens_map", "chat_templates"}, then jobs,
the arguments of `render_chat`; answers each with {"text"} or {"error", "param"}, and "log": [[level, message]]. Imports
neither a web framework nor JAX.
"""

import logging
import resource
import signal
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm import worker_pipe
from jaxllm.errors import InvalidRequestError
from jaxllm.log import logger
from jaxllm.text.chat_template import choose_template, render_chat, template_variables

MAX_TEXT_CHARACTERS = 64 << 20
"""Maximum number of characters of a rendered prompt."""
SWITCHES = {"enable_thinking", "thinking"}
"""Many clients disable reasoning for every model; templates without such a switch ignore it."""
OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that requests have fields for, and functions of templates."""


@dataclass(frozen=True)
class _Tokens:
    """The parts of a tokenizer that rendering needs."""

    special_tokens_map: dict[str, str]
    chat_templates: dict[str, str]


class _Log(logging.Handler):
    """Collects what is logged during a job."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.lines.append((record.levelno, record.getMessage()))


def main() -> None:
    """Render jobs until the input ends."""
    first = worker_pipe.read(sys.stdin.buffer)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first)
    tokens = _Tokens(settings["special_tokens_map"], settings["chat_templates"])
    own_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    limit = own_bytes + settings["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    variables: dict[str, set[str]] = {}
    log = _Log()
    logger.handlers, logger.propagate = [log], False
    logger.setLevel(logging.DEBUG)
    while (frame := worker_pipe.read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # SIGALRM ends the process at any point
        answer = _answer(msgspec.msgpack.decode(frame), tokens, variables)
        signal.setitimer(signal.ITIMER_REAL, 0)
        worker_pipe.write(sys.stdout.buffer, msgspec.msgpack.encode({**answer, "log": log.lines}))
        log.lines = []


def _answer(job: dict[str, Any], tokens: Any, variables: dict[str, set[str]]) -> dict[str, Any]:
    try:
        kwargs = _checked_kwargs(job, tokens, variables)
        text = render_chat(tokens, job.pop("messages"), **job, **kwargs)
    except InvalidRequestError as error:
        return {"error": str(error), "param": error.param}
    except MemoryError:
        return {"error": "the chat template takes too much memory on this conversation", "param": "messages"}
    except RecursionError:
        return {"error": "the chat template or the conversation is nested too deeply", "param": "messages"}
    if len(text) > MAX_TEXT_CHARACTERS:
        return {
            "error": f"the chat template makes a prompt of {len(text)} characters of this conversation",
            "param": "messages",
        }
    return {"text": text}


def _checked_kwargs(job: dict[str, Any], tokens: Any, variables: dict[str, set[str]]) -> dict[str, Any]:
    """Values for the template's variables.

    What the template does not read has no effect, as in Jinja; the log names what the client gave. Raises InvalidRequestError
    for variables that the conversation itself sets.
    """
    defaults, hints, given = job.pop("default_kwargs"), job.pop("hints"), job.pop("kwargs")
    if not (defaults or hints or given or job["documents"]):
        return {}
    source = choose_template(tokens, job["chat_template"], tools=bool(job["tools"]))
    if source not in variables:
        if len(variables) > 8:
            variables.clear()
        variables[source] = template_variables(source)
    if job["documents"] and "documents" not in variables[source]:
        logger.info("documents have no effect: the chat template does not read them; put their texts into messages")
    reserved = OWN_VARIABLES | set(tokens.special_tokens_map)
    for name in given:
        if name in reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs has {name!r}, which the request itself or the tokenizer sets; leave it out",
                "chat_template_kwargs",
            )
        if name not in variables[source] and not (name in SWITCHES and given[name] is False):
            logger.info("chat_template_kwargs has %r, which has no effect: the chat template does not read it", name[:100])
    return {
        name: value
        for name, value in {**defaults, **hints, **given}.items()
        if name in variables[source] and name not in reserved
    }


if __name__ == "__main__":
    main()
