"""LLMEngine: takes prompts and returns RequestOutputs, one step at a time. Everything here runs in the caller's thread."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm import log
from jaxllm.at_exit import shut_down_at_exit
from jaxllm.config import EngineConfig
from jaxllm.core_interface import Core, PauseCalls
from jaxllm.engine import fault_points
from jaxllm.engine.features import check_speculative_config
from jaxllm.engine_args import FromOptions
from jaxllm.errors import ConfigError, EngineDeadError, EngineError, JaxLLMError
from jaxllm.lora_calls import LoraCalls, loras_in_this_thread, run_now
from jaxllm.lora_options import without_effect
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.metrics.metric import Metric
from jaxllm.metrics.stat_logger import StatLogger
from jaxllm.models.load_config import load_model_config
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.sampling_params import SamplingParams
from jaxllm.start_times import StartTimes, process_age_seconds
from jaxllm.text.generation_config import GenerationConfig, load_generation_config
from jaxllm.text.input_processor import FrontRequest, InputProcessor, Prompt
from jaxllm.text.model_files import text_files
from jaxllm.text.output_processor import OutputProcessor, ProcessedStep
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from jaxllm.sampling.processors import Processor
    from jaxllm.structured.compiler import GrammarCompiler


@dataclass(frozen=True)
class Texts:
    """The files of a model's directory that the front reads."""

    generation_config: GenerationConfig
    tokenizer: Tokenizer | None
    chat_template: str | None


def load_texts(config: EngineConfig, times: StartTimes | None = None) -> Texts:
    """Load tokenizer, chat template and generation config. Raises ConfigError or ModelLoadError."""
    options = config.model
    directory = text_files(options.model, revision=options.revision, download_dir=options.download_dir)
    generation_config = load_generation_config(options.generation_config, directory, options.override_generation_config)
    tokenizer: Tokenizer | None = None
    if not options.skip_tokenizer_init:
        if options.tokenizer is not None:
            directory = text_files(options.tokenizer, download_dir=options.download_dir)
        with (times or StartTimes()).part("tokenizer"):
            tokenizer = load_tokenizer(directory, name=options.tokenizer or options.model)
    template = None if options.chat_template is None else _load_chat_template(options.chat_template)
    return Texts(generation_config, tokenizer, template)


class LLMEngine(FromOptions, LoraCalls, PauseCalls):
    """An engine core with its tokenizer and the requests in flight.

    Builds the core from the config and the logits processors (`jaxllm.sampling.processors`) unless a core is given, and loads
    the texts unless they are given. `progress` reports loading and compiling. If several engines share a core, each has a
    `namespace` for the ids of its requests.
    Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        core: Core | None = None,
        log_stats: bool = True,
        logits_processors: "Sequence[Processor | str]" = (),
        texts: Texts | None = None,
        namespace: str = "",
    ):
        log.set_up_if_asked()
        fault_points.install_from_environment("front")
        times = StartTimes()
        if (age := process_age_seconds()) is not None:
            times.add("process before the engine", age)
        if core is not None and logits_processors:
            raise ConfigError("logits_processors are compiled into an engine core; give them to the one that is passed")
        config = config or (EngineConfig() if core is None else core.config)
        # Load the small files first, so that a fault in them is found before the weights are loaded.
        if core is None:
            check_model(config)
        texts = texts or load_texts(config, times)
        self.tokenizer = texts.tokenizer
        self.chat_template = texts.chat_template
        self.core: Core = _build_core(config, progress, logits_processors, times) if core is None else core
        self.config = self.core.config
        self.model_config = self.core.model_config
        self.max_model_len = self.core.max_model_len
        self.loras = loras_in_this_thread(self.config, self.call_core)
        self.metrics: EngineMetrics | None = None
        self._stat_logger: StatLogger | None = None
        if not config.observe.disable_log_stats:
            cache_config = {name: str(value) for name, value in dataclasses.asdict(self.config.cache).items()}
            self.metrics = EngineMetrics(config.model.model, self.max_model_len, cache_config=cache_config)
            self._stat_logger = StatLogger(self.metrics) if log_stats else None
        self.input_processor = InputProcessor(
            self.config,
            self.model_config,
            self.max_model_len,
            self.tokenizer,
            texts.generation_config,
            processor_arguments=self.core.processor_arguments,
            namespace=namespace,
            compile_grammar=None if self.tokenizer is None else lambda form: self.grammar_compiler.compile(form),
        )
        self._grammar_compiler: GrammarCompiler | None = None
        self._grammar_lock = threading.Lock()
        self._outputs = OutputProcessor(
            self.tokenizer, metrics=self.metrics, stream_interval=self.config.scheduler.stream_interval
        )
        shut_down_at_exit(self)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt to generate from or (with PoolingParams) to pool. The id need not be unique; outputs carry it.

        Waits until the adapter of `lora_request` is loaded. Raises InvalidRequestError or AdapterError.
        """
        params = self.get_default_sampling_params() if params is None else params
        adapter = run_now(self.loras.use(lora_request))
        process = self.input_processor.process
        self.add(process(request_id, prompt, params, arrival_time=arrival_time, priority=priority, adapter=adapter))

    def add(self, request: FrontRequest) -> None:
        """Queue a request that the input processor made. If the core rejects one of its answers, none is queued."""
        added: list[str] = []
        try:
            for child in request.children:
                self.core.add_request(child)
                added.append(child.request_id)
            self._outputs.add(request)
        except BaseException:
            self._abort_in_core(added)
            raise

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests by the ids they were added with. Returns their last outputs, with finish_reason "abort"."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return [output for _, output in self.abort_request_with_ids(ids)]

    def abort_request_with_ids(self, request_ids: Iterable[str]) -> list[tuple[str, RequestOutput]]:
        """`abort_request`, with the engine's own id of each request."""
        return self._abort(self._outputs.abort(request_ids))

    def abort_internal(self, internal_ids: Iterable[str]) -> list[tuple[str, RequestOutput]]:
        """`abort_request` by the engine's own ids."""
        return self._abort(self._outputs.abort(internal_ids, internal=True))

    def abort_refused(self, engine_id: str) -> str | None:
        """End the request of which the core rejected an answer. Returns its internal id; None if it has already ended."""
        if (internal_id := self._outputs.internal_id_of(engine_id)) is not None:
            self.abort_internal([internal_id])
        return internal_id

    def abort_all(self) -> list[tuple[str, RequestOutput]]:
        """End every request."""
        return self.abort_internal(self._outputs.internal_ids())

    def _abort(self, ended: ProcessedStep) -> list[tuple[str, RequestOutput]]:
        self._abort_in_core(ended.engine_ids_to_abort)
        return ended.outputs

    def _abort_in_core(self, engine_ids: list[str]) -> None:
        if not engine_ids:
            return
        with contextlib.suppress(EngineDeadError):  # a dead core holds nothing any more
            self.core.abort_requests(engine_ids)
        self._note_load()

    # The loop

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine. Returns the new outputs, possibly none.

        Raises EngineError or EngineDeadError if the step failed; all requests in flight have then ended.
        """
        return [output for _, output in self.step_with_ids()]

    def step_with_ids(self) -> list[tuple[str, RequestOutput]]:
        """`step`, with the engine's own id of each request, which is unique."""
        try:
            news = self.core.step()
        except Exception as error:
            self.abort_all()
            if isinstance(error, JaxLLMError):
                raise
            raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
        return self.take(news)

    def take(self, news: Iterable[EngineCoreOutput]) -> list[tuple[str, RequestOutput]]:
        """Convert the core's outputs of a step to outputs for callers, each with the engine's own id of its request."""
        processed = self._outputs.process(news)
        self._note_load()
        self._abort_in_core(processed.engine_ids_to_abort)
        if self._stat_logger is not None:
            self._stat_logger.tick()
        return processed.outputs

    def has_unfinished_requests(self) -> bool:
        """Whether any request still has output to come."""
        return len(self._outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        """How many requests still have output to come; n answers count once."""
        return len(self._outputs)

    # The rest

    @property
    def grammar_compiler(self) -> "GrammarCompiler":
        """The compiler of structured outputs to grammars, made on first use. Raises InvalidRequestError."""
        with self._grammar_lock:
            if self._grammar_compiler is None:
                from jaxllm.structured.compiler import GrammarCompiler
                from jaxllm.structured.token_table import Vocabulary

                eos_token_ids = self.input_processor.eos_token_ids
                vocabulary = Vocabulary.of(self.get_tokenizer(), self.model_config.vocab_size, eos_token_ids)
                self._grammar_compiler = GrammarCompiler(vocabulary)
            return self._grammar_compiler

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer, because skip_tokenizer_init was set")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the model's generation config."""
        return self.input_processor.default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """All metrics now. Raises ConfigError if disable_log_stats was set."""
        if self.metrics is None:
            raise ConfigError("there are no metrics, because disable_log_stats was set")
        self._note_load()
        return self.metrics.snapshot()

    def prometheus_registry(self) -> "CollectorRegistry":
        """The metrics for a Prometheus exporter; each call makes a registry."""
        from jaxllm.metrics.prometheus import registry

        if self.metrics is None:
            raise ConfigError("there are no metrics, because disable_log_stats was set")
        return registry(self.metrics.snapshot)

    def _note_load(self) -> None:
        if self.metrics is not None:
            self.metrics.load = self.core.stats()
            self.metrics.programs_compiled_after_warmup = self.core.num_compiled_after_warmup

    def call_core(self, name: str, *arguments: Any) -> Any:
        return getattr(self.core, name)(*arguments)

    def check_integrity(self) -> None:
        assert not len(self._outputs), f"{len(self._outputs)} requests are awaited"
        super().check_integrity()

    def shutdown(self) -> None:
        """End every request and free the device. The engine cannot be used afterwards."""
        if self._grammar_compiler is not None:
            self._grammar_compiler.shutdown()
        self.abort_all()
        self.core.shutdown()


def check_model(config: EngineConfig) -> None:
    """Raise the errors of a model's config.json, and of what proposes tokens for it, before JAX is imported."""
    options = config.model
    if unused := without_effect(config.lora):
        log.warn_once(f"{', '.join(unused)} changes nothing without enable_lora (--enable-lora)")
    directory = text_files(options.model, revision=options.revision, download_dir=options.download_dir)
    model_config = load_model_config(
        directory,
        overrides=options.hf_overrides,
        dtype=options.dtype,
        runner=options.runner,
        pooler_config=options.pooler_config,
        model_class=options.model_class,
    )
    model_config.for_tensor_parallel(config.parallel.tensor_parallel_size)
    check_speculative_config(config)


def _load_chat_template(text_or_file: str) -> str:
    from jaxllm.text.chat_template import load_chat_template  # imports Jinja

    return load_chat_template(text_or_file)


def _build_core(
    config: EngineConfig, progress: Progress | None, processors: "Sequence[Processor | str]", times: StartTimes
) -> Core:
    with times.part("imports"):
        from jaxllm.engine.core import EngineCore  # imports JAX

    return EngineCore(config, progress, processors, times)
