"""Renders conversations in separate, warm processes, which end when a template exceeds its time or memory limit."""

import contextlib
import logging
import queue
import subprocess
import threading
from typing import Any

import msgspec

from jaxllm import worker_pipe
from jaxllm.errors import InvalidRequestError
from jaxllm.log import logger
from jaxllm.text.tokenizer import Tokenizer
from server.ignored import log_once
from server.options import ChatOptions

MAX_PROCESSES = 4


class TemplateProcesses:
    """Up to MAX_PROCESSES workers, each rendering one conversation at a time; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, options: ChatOptions):
        self._seconds = options.chat_template_timeout
        self._first = msgspec.msgpack.encode(
            {
                "seconds": options.chat_template_timeout,
                "memory_bytes": options.chat_template_memory_bytes,
                "special_tokens_map": tokenizer.special_tokens_map,
                "chat_templates": tokenizer.chat_templates,
            }
        )
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._is_closed = False

    def render(self, job: dict[str, Any]) -> str:
        """Render the prompt of a conversation. Raises InvalidRequestError."""
        try:
            body = msgspec.msgpack.encode(job)
        except OverflowError:
            raise InvalidRequestError(
                "the conversation or its tools hold an integer of more than 64 bits", "messages"
            ) from None
        with self._places:
            process = self._taken()
            answer = process.ask(body)
            if answer is None:
                process.end()
                raise InvalidRequestError(
                    f"the chat template takes more than {self._seconds:g} s, or too much memory, on this conversation",
                    "messages",
                )
            self._idle.put(process)
            if self._is_closed:
                self.close()
        found = msgspec.msgpack.decode(answer)
        for level, message in found["log"]:
            log_once(message) if level >= logging.INFO else logger.debug("%s", message)
        if "error" in found:
            raise InvalidRequestError(found["error"], found["param"])
        return found["text"]

    def warm_up(self) -> None:
        """Start a process, so that the first request need not wait for it."""
        with self._places:
            self._idle.put(self._taken())

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def _taken(self) -> "_Process":
        with contextlib.suppress(queue.Empty):
            while True:
                process = self._idle.get_nowait()
                if process.is_alive:
                    return process
                process.end()
        return _Process(self._first)


class _Process:
    """One worker."""

    def __init__(self, first: bytes):
        self._process = worker_pipe.start_worker("server.template_worker", stderr=subprocess.DEVNULL)
        self._send(first)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, body: bytes) -> bytes | None:
        """The answer to a job; None if the process ended during it."""
        self._send(body)
        assert self._process.stdout is not None
        return worker_pipe.read(self._process.stdout)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self._process.wait() not in (0, -9):
            logger.warning("a chat template was ended by signal %d", -self._process.returncode)

    def _send(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the missing answer is the error
            worker_pipe.write(self._process.stdin, body)  # type: ignore[arg-type]
