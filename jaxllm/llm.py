"""LLM: a model for scripts. Takes batches of prompts and returns their answers in order."""

import copy
import functools
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm import clock
from jaxllm.at_exit import shut_down_at_exit
from jaxllm.batches import Messages, conversations, each, one_each, prompt_list
from jaxllm.beam_search import BeamSearchOutput, search_beams, step_params, step_request
from jaxllm.config import EngineConfig
from jaxllm.core_interface import ControlCalls, SteppedCore
from jaxllm.errors import EngineError
from jaxllm.interrupt import DeferredInterrupt
from jaxllm.llm_engine import LLMEngine
from jaxllm.lora_calls import LoraCalls, Loras, run_now
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics.metric import Metric
from jaxllm.outputs import RequestOutput, raise_error
from jaxllm.parallel.topology import Topology
from jaxllm.pooling_calls import PoolingCalls
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.request_feed import AHEAD, NUM_FIRST_STEPS, LaterRequest, RequestFeed
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.text.chat_media import MediaRef, split_media
from jaxllm.text.input_processor import ParentRequest, Prompt
from jaxllm.text.prompt_media import DATA, by_kind, has_unprepared, with_processed
from jaxllm.text.tokenization import PLAIN, Tokenization
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.tqdm_bars import LoadingBar, open_bar
from jaxllm.vllm_compat.environment import with_engine_variables
from jaxllm.vllm_compat.flags import as_options

if TYPE_CHECKING:
    from jaxllm.media.addresses import MediaReader
    from jaxllm.sampling.processors import Processor
    from jaxllm.text.chat_template import ContentFormat


class LLM(PoolingCalls, LoraCalls, ControlCalls):
    """A model with its engine, for use from one thread.

    Keyword arguments are the engine's options (`jaxllm.config`); docs/VLLM_FLAGS.md lists the accepted options of vLLM.
    `logits_processors`: functions that requests may apply to their logits (`jaxllm.sampling.processors`), or import paths of
    the form "module:Name". Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """

    def __init__(self, model: str = "demo", *, logits_processors: "Sequence[Processor | str]" = (), **options: Any):
        config = EngineConfig.from_options(model=model, **with_engine_variables(as_options(options)))
        self._start(config, LoadingBar() if config.observe.use_progress_bar else None, None, logits_processors)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        core: SteppedCore | None = None,
        logits_processors: "Sequence[Processor | str]" = (),
    ) -> "LLM":
        """Make an LLM from a whole config. `progress` reports loading and compiling; `core` is an existing engine core."""
        llm = cls.__new__(cls)
        llm._start(config, progress, core, logits_processors)
        return llm

    def _start(
        self,
        config: EngineConfig,
        progress: Progress | None,
        core: SteppedCore | None,
        logits_processors: "Sequence[Processor | str]",
    ) -> None:
        self.llm_engine = LLMEngine(config, progress=progress, core=core, log_stats=False, logits_processors=logits_processors)
        self._request_numbers = itertools.count()
        self._strays: dict[str, list[RequestOutput]] = defaultdict(list)
        self._enqueued: list[ParentRequest] = []
        """Requests for `wait_for_completion`, in the order of their submission."""
        self.interrupt = DeferredInterrupt()
        """Handle outputs inside this context to defer a Ctrl-C until all outputs of the same step are delivered."""
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        shut_down_at_exit(self)

    # Generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answers to prompts and return them in the order of the prompts.

        A prompt is a text, a list of token ids, or an object with `prompt` or `prompt_token_ids` and optionally `cache_salt`, or
        images: `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs` (docs/IMAGES.md).
        `sampling_params`: one for all prompts or one each; default: the model's own. `use_tqdm`: whether to show a progress
        bar, or a replacement for tqdm; default: the engine's `use_progress_bar`. `lora_request`: the adapter of all prompts or
        one each, loaded if it is not yet (AdapterError). `priority`: of all prompts or one each. `tokenization_kwargs`: how texts
        become tokens (`jaxllm.text.tokenization`). All prompts are checked before any runs: InvalidRequestError names the indices
        of the invalid ones. Of more than 32 prompts with images these are prepared while others run; one that cannot be ends the call, as
        EngineError or a Ctrl-C does.
        """
        params = self._params_list(sampling_params, len(all_prompts := prompt_list(prompts)), RequestOutputKind.FINAL_ONLY)
        tokenization = Tokenization.of(tokenization_kwargs)
        return self._finish(self._requests_or_later(all_prompts, params, priority, lora_request, tokenization), use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Submit prompts, and return the ids of their requests without waiting. Arguments and errors: as for `generate`.

        The engine computes them with the next `wait_for_completion`, or together with the requests of another call.
        """
        kind = RequestOutputKind.FINAL_ONLY
        requests = self._checked(prompts, sampling_params, priority, kind, lora_request, tokenization_kwargs)
        added: list[str] = []
        bar = self._bar(use_tqdm, len(requests), "Adding requests")
        try:
            for request in requests:
                self.llm_engine.add(request)
                added.append(request.internal_id)
                bar.update(1)
        except BaseException:
            self.llm_engine.abort_internal(added)
            raise
        finally:
            bar.close()
        self._enqueued += requests
        return [request.request_id for request in requests]

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[str]:
        """`enqueue` for one conversation or a list of them. Template options: see `render_conversations`."""
        prompts = self.render_conversations(messages, **template_options)
        return self.enqueue(prompts, sampling_params, lora_request, priority, use_tqdm)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] | None = None
    ) -> list[RequestOutput]:
        """Run what was enqueued to completion, and return the outputs in the order of submission.

        `output_type`: the class that outputs must have (TypeError). A request that fails alone, EngineError or a Ctrl-C ends all of
        them.
        """
        requests, self._enqueued = self._enqueued, []
        outputs = self._finish(requests, use_tqdm, are_added=True)
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                raise TypeError(f"the output of request {output.request_id} is a {type(output).__name__}, not {output_type!r}")
        return outputs

    def generate_iter(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Yield outputs as they arrive, each with the index of its prompt. `sampling_params.output_kind` sets their content.

        A request that failed alone has the finish reason "error" and the message as stop reason. Closing the iterator aborts
        unfinished requests.
        """
        params = self._params_list(sampling_params, len(all_prompts := prompt_list(prompts)), None)
        iterator = self._run(self._requests_or_later(all_prompts, params, priority, lora_request))
        self._iterators.add(iterator)
        return iterator

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the answers to one conversation or a list of them. Template options: see `render_conversations`."""
        self.llm_engine.input_processor.check_generates()
        prompts, tokenization = self._render_conversations(messages, reads_later=True, **template_options)
        params = self._params_list(sampling_params, len(prompts), RequestOutputKind.FINAL_ONLY)
        return self._finish(self._requests_or_later(prompts, params, priority, lora_request, tokenization), use_tqdm)

    def render_conversations(self, messages: Messages | Sequence[Messages], **template_options: Any) -> list[Prompt]:
        """Render conversations to prompts with the chat template. Special tokens come from the template; none are added unless
        `tokenization_kwargs` (`jaxllm.text.tokenization`) say so. Parts of messages may be images (docs/IMAGES.md), prepared as
        `mm_processor_kwargs` say over the option of that name. Template options: `chat_template` (a template or its file),
        `chat_template_content_format`, `add_generation_prompt` (True), `continue_final_message` (False), `tools`, `documents`,
        `chat_template_kwargs`, `tokenization_kwargs`, `mm_processor_kwargs`."""
        prompts, tokenization = self._render_conversations(messages, **template_options)
        return self.llm_engine.input_processor.tokenize_texts(prompts, tokenization)

    def _render_conversations(
        self,
        messages: Messages | Sequence[Messages],
        *,
        reads_later: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: "ContentFormat" = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[Any], Tokenization]:
        """Conversations as prompts of text, and how they become tokens. reads_later: prompts of many conversations with images
        have references, which `_prepared` reads."""
        from jaxllm.text.chat_template import render_chat  # imports Jinja

        tokenizer, media = self.get_tokenizer(), self.llm_engine.input_processor.media
        tokenization = Tokenization.of(tokenization_kwargs, add_special_tokens=False)

        split = each(conversations(messages), split_media, "conversation")
        num_with_images = sum(bool(references) for _, references in split)
        is_later = reads_later and num_with_images > AHEAD
        reader = self._media_reader if num_with_images else None  # made here, before threads use it

        def render(conversation_and_references: tuple[Messages, list[MediaRef]]) -> dict[str, Any]:
            conversation, references = conversation_and_references
            kinds = [each.kind for each in references]
            media.check_count(kinds, "messages")
            images: Sequence[Any] = references if is_later or not references or reader is None else reader.read_now(references)
            text = render_chat(
                tokenizer,
                conversation,
                tools=tools,
                documents=documents,
                chat_template=chat_template or self.llm_engine.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                content_format=chat_template_content_format,
                image_texts=media.placeholders(kinds),
                interleave_images=self.llm_engine.config.multimodal.interleave_mm_strings,
                **(chat_template_kwargs or {}),
            )
            if not images:
                return {"prompt": text}
            return {"prompt": text, "multi_modal_data": by_kind(images), "mm_processor_kwargs": mm_processor_kwargs}

        return each(split, render, "conversation"), tokenization

    def _prepared(self, prompt: Any) -> Any:
        """A prompt with its images read and prepared. Runs in a thread. Raises InvalidRequestError."""
        found = [item for items in (prompt.get(DATA) or {}).values() if isinstance(items, list) for item in items]
        if found and isinstance(found[0], MediaRef):
            prompt = {**prompt, DATA: by_kind(self._media_reader.read_now(found))}
        return with_processed(prompt, [image.result() for image in self.llm_engine.input_processor.media.submit(prompt)])

    @functools.cached_property
    def _media_reader(self) -> "MediaReader":
        from jaxllm.media.addresses import MediaReader  # imports an HTTP client

        engine = self.llm_engine
        return MediaReader(engine.config.multimodal, on_fetched=engine.input_processor.media.counts.add_fetched)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest answers to each prompt by beam search, best first. `lora_request`: the adapter of all prompts."""
        engine = self.llm_engine
        options = step_params(params, engine.config.model.max_logprobs)
        checked = self._checked(prompts, options, None, RequestOutputKind.FINAL_ONLY, lora_request)
        steps = itertools.count()
        bar = open_bar(use_tqdm, params.max_tokens, "Searching", "token")

        def run(beams: list[tuple[int, list[int]]]) -> list[RequestOutput]:
            bar.update(1)
            step = next(steps)
            requests = [step_request(checked[number], step, place, ids) for place, (number, ids) in enumerate(beams)]
            return self._finish(requests, use_tqdm=False)

        try:
            return search_beams(
                run,
                [request.prompt_token_ids for request in checked],
                params,
                eos_token_ids=engine.input_processor.eos_token_ids,
                max_model_len=engine.max_model_len,
                tokenizer=engine.tokenizer,
            )
        finally:
            bar.close()

    # The rest

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self, *, chat: bool = False) -> SamplingParams:
        """SamplingParams with the values of the model's generation config. `chat`: with those of llama.cpp where it has none."""
        return self.llm_engine.get_default_sampling_params(chat=chat)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of devices of one replica or data-parallel rank, times their number with `include_dp`."""
        parallel = self.llm_engine.config.parallel
        topology = Topology.of(parallel)
        return topology.num_devices // topology.data * (parallel.data_parallel_size if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """All metrics now."""
        return self.llm_engine.get_metrics()

    @property
    def loras(self) -> Loras:  # type: ignore[override]
        """The adapters that LoRARequests have named."""
        return self.llm_engine.loras

    def call_core(self, name: str, *arguments: Any) -> Any:
        return getattr(self.llm_engine, name)(*arguments)

    def shutdown(self) -> None:
        """End every request and free the device. The object cannot be used afterwards."""
        for iterator in list(self._iterators):
            iterator.close()
        if "_media_reader" in vars(self):
            self._media_reader.close()
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # Inside

    def _checked(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        output_kind: RequestOutputKind | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ParentRequest]:
        """Make a request for each prompt, or raise one error that names all invalid prompts."""
        all_prompts = prompt_list(prompts)
        params = self._params_list(sampling_params, len(all_prompts), output_kind)
        tokenization = Tokenization.of(tokenization_kwargs)
        return self._requests_or_later(all_prompts, params, priority, lora_request, tokenization, prepares_later=False)

    def _requests_or_later(
        self,
        all_prompts: list[Any],
        all_params: Sequence[SamplingParams | PoolingParams],
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        tokenization: Tokenization = PLAIN,
        *,
        prepares_later: bool = True,
    ) -> list[Any]:
        """`_requests`, with a LaterRequest for each prompt with images if these are many. prepares_later: False if none may be."""
        priorities = one_each(0 if priority is None else priority, len(all_prompts), "priority")
        adapters = run_now(self.loras.use_each(lora_request, len(all_prompts)))
        processor = self.llm_engine.input_processor
        are_later = [prepares_later and has_unprepared(prompt) for prompt in all_prompts]
        if sum(are_later) <= AHEAD:
            are_later = [False] * len(all_prompts)
        texts = [prompt for prompt, is_later in zip(all_prompts, are_later, strict=True) if not is_later]
        tokenized = iter(processor.tokenize_texts(texts, tokenization))
        arrival_time = clock.now()
        by_priority = self.llm_engine.config.scheduler.scheduling_policy == "priority"

        def request(place: int) -> ParentRequest | LaterRequest[ParentRequest]:
            make = functools.partial(
                processor.process,
                str(next(self._request_numbers)),
                params=all_params[place],
                options=RequestOptions(priority=priorities[place], adapter=adapters[place]),
            )
            if not are_later[place]:
                return make(next(tokenized), arrival_time=arrival_time)
            processor.media.check(prompt := all_prompts[place])
            return LaterRequest(
                prepare=lambda: self._prepared(prompt),
                make=lambda prepared: make(processor.tokenize_texts([prepared], tokenization)[0]),
                priority=priorities[place] if by_priority else 0,
            )

        return each(range(len(all_prompts)), request, "prompt")

    def _params_list(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        output_kind: RequestOutputKind | None,
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Sequence):
            return [_with_kind(params, output_kind) for params in one_each(sampling_params, count, "sampling_params")]
        return [_with_kind(sampling_params, output_kind)] * count

    def _finish(
        self,
        requests: Sequence[ParentRequest | LaterRequest[ParentRequest]],
        use_tqdm: bool | Callable[..., Any] | None,
        *,
        are_added: bool = False,
        make: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Run requests to completion. are_added: the engine has them already. make: makes a result of each output; None: it is one."""
        results: dict[int, Any] = {}
        bar = self._bar(use_tqdm, len(requests), "Processed prompts")
        running = self._run(requests, are_added=are_added)
        start, num_in, num_out = time.perf_counter(), 0, 0
        try:
            for place, output in running:
                raise_error(output, f"prompt {place} of {len(requests)}" if len(requests) > 1 else "the request")
                results[place] = output if make is None else make(output)
                num_in += len(output.prompt_token_ids)
                if isinstance(output, RequestOutput):
                    num_out += sum(len(answer.token_ids) for answer in output.outputs)
                seconds = time.perf_counter() - start
                bar.set_postfix_str(
                    f"est. input {num_in / seconds:.1f} tok/s, output {num_out / seconds:.1f} tok/s", refresh=False
                )
                bar.update(1)
        finally:
            running.close()
            bar.close()
        return [results[place] for place in range(len(requests))]

    def _bar(self, use_tqdm: bool | Callable[..., Any] | None, total: int, description: str) -> Any:
        if use_tqdm is None:
            use_tqdm = self.llm_engine.config.observe.use_progress_bar
        return open_bar(use_tqdm, total, description, "prompt")

    def _run(
        self, requests: Sequence[ParentRequest | LaterRequest[ParentRequest]], *, are_added: bool = False
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Yield the outputs of requests. Aborts unfinished ones when the caller stops."""
        engine, options = self.llm_engine, self.llm_engine.config
        places: dict[str, int] = {}
        num_seats = (options.scheduler.max_num_seqs or 1) * options.parallel.data_parallel_size
        feed = RequestFeed(requests, num_seats + AHEAD, self._first_tokens(), lambda request: len(request.prompt_token_ids))
        try:
            while places or feed:
                for place, request in feed.take(len(places)):
                    places[request.internal_id] = place
                    if not are_added:
                        engine.add(request)
                    if isinstance(requests[place], LaterRequest):
                        request.forget_payloads()  # the engine frees them with the request
                for internal_id, output in self._next_outputs(places):
                    place = places[internal_id]
                    if output.finished:
                        del places[internal_id]
                    yield place, output
                self.interrupt.raise_if_noticed()
        finally:
            feed.close()
            if places:
                engine.abort_internal(places)
                for internal_id in places:
                    self._strays.pop(internal_id, None)

    def _first_tokens(self) -> int | None:
        """Tokens of the prompts that fill the first steps in flight: the engine gets the others while the device computes these. None:
        it needs all at once, because it does not take them in order."""
        options = self.llm_engine.config
        scheduler = options.scheduler
        if scheduler.scheduling_policy == "priority" or scheduler.max_num_batched_tokens is None:
            return None
        return NUM_FIRST_STEPS * scheduler.max_step_tokens * options.parallel.data_parallel_size

    def _next_outputs(self, places: Mapping[str, int]) -> list[tuple[str, RequestOutput]]:
        """Run a step and return the outputs of these requests. Keeps the outputs of others for their own iterators."""
        mine = [(id, output) for id in list(self._strays) if id in places for output in self._strays.pop(id)]
        if mine:
            return mine
        if not self.llm_engine.has_unfinished_requests():
            raise EngineError("the requests ended with a step that failed during another call; submit them again")
        self.interrupt.raise_if_noticed()
        with self.interrupt:
            outputs = self.llm_engine.step_with_ids()
        for internal_id, output in outputs:
            if internal_id in places:
                mine.append((internal_id, output))
            else:
                self._strays[internal_id].append(output)
        return mine


def _with_kind(params: SamplingParams, kind: RequestOutputKind | None) -> SamplingParams:
    if kind is None or not isinstance(params, SamplingParams) or params.output_kind is kind:
        return params
    changed = copy.copy(params)
    changed.output_kind = kind
    return changed
