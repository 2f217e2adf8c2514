"""Compiles the grammars of requests in a thread next to the step loop. Does not import JAX."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxllm.engine.preparations import Preparation
from jaxllm.errors import GrammarError
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Grammar, Request
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.interface import AnyScheduler

if TYPE_CHECKING:
    from jaxllm.structured.matcher import Template
    from jaxllm.structured.token_table import Vocabulary

MAX_CACHE_BYTES = 256 << 20
"""Memory limit of the cache of compiled grammars."""
STACK_BYTES = 64 << 20
"""Stack of the compiling thread: larger than in the process that compiled each grammar on trial."""


class Grammars(Preparation):
    """The compiled grammars of an engine core. One thread compiles. A request fits as soon as it has its matcher.

    The sender of a request compiled its grammar on trial, so `bind` refuses none.
    """

    def __init__(
        self, load_vocabulary: "Callable[[tuple[int, ...]], Vocabulary]", num_columns: int, *, drafts_forced: bool = False
    ):
        """`load_vocabulary` takes the ids of EOS tokens. It is called with the first grammar, because it takes a second.

        drafts_forced: whether the tokens that grammars force are drafts."""
        self._load_vocabulary = load_vocabulary
        self._num_columns = num_columns
        self._drafts_forced = drafts_forced
        self._thread: ThreadPoolExecutor | None = None
        self._vocabularies: dict[tuple[int, ...], Vocabulary] = {}
        self._templates: OrderedDict[str, tuple[Template, int]] = OrderedDict()
        self._num_cached_bytes = 0
        self._compiling: dict[str, Future[Template]] = {}
        """Running compilations by the text of the grammar."""
        self._waiting: list[tuple[Request, Future[Template]]] = []

    def admit(self, request: Request) -> None:
        """Give a request its matcher, or let it wait until its grammar is compiled."""
        grammar = request.spec.grammar
        if grammar is None:
            return
        found = self._templates.get(grammar.text)
        if found is not None:
            self._templates.move_to_end(grammar.text)
            self._start(request, found[0])
            return
        job = self._compiling.get(grammar.text)
        if job is None:
            job = self._compiling[grammar.text] = self._executor().submit(self._compile, grammar, request.spec.eos_token_ids)
        self._waiting.append((request, job))

    def fits(self, request: Request) -> Fit:
        """Requests without a grammar, or whose grammar is compiled already, overtake those that wait."""
        return Fit.LATER if request.spec.grammar is not None and request.matcher is None else Fit.NOW

    def settle(self, scheduler: AnyScheduler) -> list[EngineCoreOutput]:
        """Give the requests whose grammars are compiled their matchers. Returns the outputs of those whose grammars failed to compile."""
        if not self._waiting:
            return []
        outputs: list[EngineCoreOutput] = []
        still_waiting = []
        for request, job in self._waiting:
            if request.status.is_finished:
                continue
            if not job.done():
                still_waiting.append((request, job))
                continue
            try:
                self._start(request, job.result())
            except GrammarError as error:
                outputs += scheduler.fail_requests([request.request_id], ErrorKind.CONSTRAINT, str(error))
            except Exception:
                logger.exception("the grammar of request %s cannot be compiled", request.request_id)
                message = "the request's grammar cannot be compiled in the engine"
                outputs += scheduler.fail_requests([request.request_id], ErrorKind.INTERNAL, message)
        self._waiting = still_waiting
        for text, job in list(self._compiling.items()):
            if job.done():
                del self._compiling[text]
                if job.exception() is None:
                    self._keep(text, job.result())
        return outputs

    def jobs(self) -> Sequence[Future[Any]]:
        return [job for _, job in self._waiting]

    def shutdown(self) -> None:
        """End the thread. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self, request: Request, template: "Template") -> None:
        from jaxllm.structured.matcher import Matcher

        grammar, spec = request.spec.grammar, request.spec
        assert grammar is not None
        request.matcher = Matcher(
            template,
            num_columns=self._num_columns,
            eos_token_ids=spec.eos_token_ids,
            ends_at_eos=not spec.sampling_params.ignore_eos,
            start_after=grammar.start_after_token_ids,
        )
        for token_id in request.output_token_ids:  # another engine has drawn them
            request.matcher.advance(token_id)

    def _keep(self, text: str, template: "Template") -> None:
        self._templates[text] = (template, template.num_bytes)
        self._num_cached_bytes += template.num_bytes
        while self._num_cached_bytes > MAX_CACHE_BYTES:
            _, (_, num_bytes) = self._templates.popitem(last=False)
            self._num_cached_bytes -= num_bytes

    def _compile(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> "Template":
        from jaxllm.structured.matcher import Template  # imports llguidance

        start = time.perf_counter()
        if eos_token_ids not in self._vocabularies:
            self._vocabularies[eos_token_ids] = self._load_vocabulary(eos_token_ids)
        template = Template.of(self._vocabularies[eos_token_ids], grammar, drafts_forced=self._drafts_forced)
        logger.debug("compiled a grammar of %d characters in %.3f s", len(grammar.text), time.perf_counter() - start)
        return template

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
                self._thread.submit(lambda: None).result()  # starts the thread
            finally:
                threading.stack_size(before)
        return self._thread
