"""RequestProcessor: the text side of an engine. Turns prompts into requests to a core and the core's outputs into RequestOutputs."""

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.core_interface import Core
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.hub import CONFIG_FILES, short_name
from jaxllm.kv_transfer import KVTransfer
from jaxllm.media import load_processor
from jaxllm.metrics.engine_metrics import EngineMetrics, cache_labels
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Metric
from jaxllm.metrics.stat_logger import StatLogger
from jaxllm.models.load_config import read_config_json
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_stats import LOAD_SECONDS
from jaxllm.start_times import StartTimes
from jaxllm.text.built_in_templates import OF_ARCHITECTURES
from jaxllm.text.generation_config import GenerationConfig, load_generation_config
from jaxllm.text.input_processor import InputProcessor, ParentRequest
from jaxllm.text.model_files import text_files
from jaxllm.text.output_processor import OutputProcessor, ProcessedStep
from jaxllm.text.prompt_media import PromptMedia
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from jaxllm.structured.compiler import GrammarCompiler


@dataclass(frozen=True)
class Texts:
    """The files of a model's directory that text processing reads."""

    generation_config: GenerationConfig
    tokenizer: Tokenizer | None
    chat_template: str | None
    directory: Path
    """The model's own."""


def load_texts(config: EngineConfig, times: StartTimes | None = None) -> Texts:
    """Load tokenizer, chat template and generation config. Raises ConfigError or ModelLoadError."""
    options = config.model
    directory = model_directory = text_files(options.model, revision=options.revision, download_dir=options.download_dir)
    generation_config = load_generation_config(options.generation_config, directory, options.override_generation_config)
    tokenizer: Tokenizer | None = None
    if not options.skip_tokenizer_init:
        if options.tokenizer is not None:
            directory = text_files(options.tokenizer, download_dir=options.download_dir)
        with (times or StartTimes()).part("tokenizer"):
            tokenizer = load_tokenizer(directory, name=options.tokenizer or options.model)
    template = options.chat_template
    if template is None and tokenizer is not None and not tokenizer.chat_templates:
        template = _built_in_template(model_directory)
    template = None if template is None else _load_chat_template(template)
    return Texts(generation_config, tokenizer, template, model_directory)


class RequestProcessor:
    """Text processing of an engine core, and the requests that this process has sent to it. All runs in one thread or event loop.

    If several processes share a core, each has a `namespace` for the ids of its requests.
    """

    def __init__(self, core: Core, texts: Texts, *, log_stats: bool = True, namespace: str = ""):
        self.core = core
        self.tokenizer = texts.tokenizer
        self.chat_template = texts.chat_template
        self.config = core.config
        self.model_config = core.model_config
        self.max_model_len = core.max_model_len
        self._metrics: list[EngineMetrics] = []
        """Metrics of each replica; none with disable_log_stats."""
        self._load_is_due = 0.0
        self._stat_logger: StatLogger | None = None
        if not self.config.observe.disable_log_stats:
            labels, model_name = cache_labels(self.config.cache), short_name(self.config.model.model)
            count = partial(EngineMetrics, model_name, self.max_model_len, cache_config=labels)
            self._metrics = [count(engine=str(replica)) for replica in range(len(core.loads()))]
            self._stat_logger = StatLogger(self._metrics) if log_stats else None
        images = self.config.multimodal
        # Scripts may say how their images are prepared; servers ask `check_trusted` whether clients may.
        of_scripts = replace(images, trust_request_mm_kwargs=True)
        media = PromptMedia(load_processor(texts.directory, self.model_config, of_scripts), images)
        if self._metrics and media.kinds:
            self._metrics[0].media_counts, self._metrics[0].media_kinds = media.counts, media.kinds
        self.input_processor = InputProcessor(
            self.config,
            self.model_config,
            self.max_model_len,
            self.tokenizer,
            texts.generation_config,
            processor_arguments=core.processor_arguments,
            namespace=namespace,
            compile_grammar=None if self.tokenizer is None else lambda form: self.grammar_compiler.compile(form),
            media=media,
        )
        self._grammar_compiler: GrammarCompiler | None = None
        self._grammar_lock = threading.Lock()
        self._outputs = OutputProcessor(
            self.tokenizer,
            metrics=self._metrics,
            stream_interval=self.config.scheduler.stream_interval,
            cached_block_tokens=self.config.block_tokens if self.config.cache.enable_prefix_caching else None,
        )

    # Requests

    def add(self, request: ParentRequest) -> None:
        """Queue a request that the input processor made. If the core rejects one of its answers, none is queued."""
        added: list[str] = []
        try:
            for child in request.children:
                self.core.add_request(child)
                added.append(child.request_id)
            self._outputs.add(request, self.core.replica_of(added[0]))
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

    def moved(self, engine_id: str, replica: int, transfer: KVTransfer | None) -> None:
        """Another replica computes a request, by the engine's id of an answer, than it was added to. transfer: where blocks of its prompt
        come from."""
        self._outputs.moved(engine_id, replica, transfer)

    def internal_id_of(self, engine_id: str) -> str | None:
        """The engine's own id of the request that one of the core's is an answer of. None if it has already ended."""
        return self._outputs.internal_id_of(engine_id)

    def internal_ids(self) -> list[str]:
        """The engine's own ids of all unfinished requests."""
        return list(self._outputs.internal_ids())

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

    def take(self, outputs: Iterable[EngineCoreOutput]) -> list[tuple[str, RequestOutput]]:
        """Convert the core's outputs of a step to outputs for callers, each with the engine's own id of its request."""
        processed = self._outputs.process(outputs)
        self._abort_in_core(processed.engine_ids_to_abort)
        if not len(self._outputs) or time.monotonic() >= self._load_is_due:
            self._note_load()
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

    def get_default_sampling_params(self, *, chat: bool = False) -> SamplingParams:
        """SamplingParams with the values of the model's generation config. `chat`: with those of llama.cpp where it has none."""
        return self.input_processor.default_sampling_params(chat=chat)

    def get_metrics(self) -> list[Metric]:
        """All metrics now. Raises ConfigError if disable_log_stats was set."""
        self._check_metrics()
        self._note_load()
        return self.snapshot()

    def snapshot(self, *, of_engine: bool = True) -> list[Metric]:
        """The metrics as of the latest step, with or without those that the core counts for all API servers together."""
        return merged(metrics.snapshot(of_engine=of_engine) for metrics in self._metrics)

    def prometheus_registry(self) -> "CollectorRegistry":
        """The metrics for a Prometheus exporter, the load at most LOAD_SECONDS before the latest step; each call makes a registry."""
        from jaxllm.metrics.prometheus import registry

        self._check_metrics()
        return registry(self.snapshot)

    def _check_metrics(self) -> None:
        if not self._metrics:
            raise ConfigError("there are no metrics, because disable_log_stats was set")

    def _note_load(self) -> None:
        if self._metrics:
            self._load_is_due = time.monotonic() + LOAD_SECONDS
            for metrics, load in zip(self._metrics, self.core.loads(), strict=True):
                metrics.load, metrics.programs_compiled_after_warmup = load

    def close(self) -> None:
        """End every request, the processes that compile grammars, and the threads that prepare images."""
        if self._grammar_compiler is not None:
            self._grammar_compiler.shutdown()
        self.input_processor.media.close()
        self.abort_all()


def _built_in_template(directory: Path) -> str | None:
    """The name of the template for the model in a directory; None: there is none."""
    if not any((directory / name).is_file() for name in CONFIG_FILES):
        return None
    named = read_config_json(directory).get("architectures")
    return OF_ARCHITECTURES.get(str(named[0])) if isinstance(named, list) and named else None


def _load_chat_template(text_or_file: str) -> str:
    from jaxllm.text.chat_template import load_chat_template  # imports Jinja

    return load_chat_template(text_or_file)
