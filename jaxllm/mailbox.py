"""Holds a request's outputs for the caller that streams them, and merges those that a slow caller has not fetched."""

import asyncio
from dataclasses import replace

from jaxllm.errors import EngineDeadError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind


class Mailbox:
    """Carries a request's outputs to the caller; holds one at a time, into which others merge. Lives in the caller's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind):
        self.loop = loop
        self._kind = kind
        self._content: RequestOutput | Exception | None = None
        self._filled = asyncio.Event()
        self.num_ticks_unread = 0
        """See UnreadStreams, as for `is_held`."""
        self.is_held = False
        self.is_done = False
        """Whether the last output, or an error, has arrived: there is nothing left to abort."""

    def put(self, content: RequestOutput | Exception) -> None:
        """Called in the event loop."""
        if isinstance(content, RequestOutput) and isinstance(self._content, RequestOutput):
            content = merged(self._content, content, self._kind)
        self.is_done = isinstance(content, Exception) or content.finished
        self._content = content
        self._filled.set()

    @property
    def is_unread(self) -> bool:
        """Whether an output lies here."""
        return self._content is not None

    async def take(self) -> RequestOutput:
        """The output so far unfetched, when there is one. Raises the error that ended the request."""
        await self._filled.wait()
        self._filled.clear()
        self.num_ticks_unread = 0
        content, self._content = self._content, None
        if isinstance(content, EngineDeadError):
            raise EngineDeadError(str(content)) from content
        if isinstance(content, Exception):
            raise content
        assert content is not None
        return content


Letter = tuple[Mailbox, RequestOutput | Exception]


def post(letters: list[Letter]) -> None:
    """Hand outputs over, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Letter]] = {}
    for mailbox, content in letters:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, content))
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(put_all, group)
        except RuntimeError:
            continue  # the loop was closed, and its callers with it


def put_all(letters: list[Letter]) -> None:
    """`post` within the event loop that all of them live in."""
    for mailbox, content in letters:
        mailbox.put(content)


def merged(earlier: RequestOutput, later: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """One output that says what two said in turn."""
    if kind is not RequestOutputKind.DELTA:
        return later
    answers = {answer.index: answer for answer in earlier.outputs}
    for answer in later.outputs:
        answers[answer.index] = _joined(answers[answer.index], answer) if answer.index in answers else answer
    return replace(
        later,
        outputs=[answers[index] for index in sorted(answers)],
        prompt_logprobs=earlier.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
    )


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = later.logprobs
    if earlier.logprobs is not None and logprobs is not None:
        logprobs = earlier.logprobs[:]
        logprobs.extend(later.logprobs or [])
    return replace(later, text=earlier.text + later.text, token_ids=[*earlier.token_ids, *later.token_ids], logprobs=logprobs)
