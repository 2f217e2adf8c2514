"""LLMEngine: takes prompts and returns RequestOutputs, one step at a time. Everything here runs in the caller's thread."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm import address_space, log
from jaxllm.at_exit import shut_down_at_exit
from jaxllm.collector import no_collections
from jaxllm.config import EngineConfig
from jaxllm.core_interface import PauseCalls, SteppedCore
from jaxllm.engine import fault_points
from jaxllm.engine.features import check_own_store, check_speculative_config
from jaxllm.engine.parallel_backends import check_backend
from jaxllm.engine_args import FromOptions
from jaxllm.errors import ConfigError, EngineError, JaxLLMError
from jaxllm.lora_calls import LoraCalls, loras_in_this_thread, run_now
from jaxllm.lora_request import LoRARequest
from jaxllm.media import load_processor
from jaxllm.models.load_config import load_model_config
from jaxllm.options.eplb import tell_unused_keys
from jaxllm.options.kv_transfer import check_policies
from jaxllm.options.lora import without_effect
from jaxllm.outputs import RequestOutput
from jaxllm.parallel.topology import Topology
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.request_options import RequestOptions
from jaxllm.request_processor import RequestProcessor, Texts, load_texts
from jaxllm.sampling_params import SamplingParams
from jaxllm.start_times import StartTimes, process_age_seconds
from jaxllm.text.input_processor import Prompt
from jaxllm.text.model_files import text_files
from jaxllm.vllm_compat.kv_connectors import tell_unused_connector_keys

if TYPE_CHECKING:
    from jaxllm.sampling.processors import Processor


class LLMEngine(FromOptions, LoraCalls, PauseCalls, RequestProcessor):
    """An engine core with its tokenizer and the requests in flight.

    Builds the core from the config and the logits processors (`jaxllm.sampling.processors`) unless a core is given.
    `progress` reports loading and compiling. Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """

    core: SteppedCore

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        core: SteppedCore | None = None,
        log_stats: bool = True,
        logits_processors: "Sequence[Processor | str]" = (),
    ):
        core, texts = make_core(config, progress=progress, core=core, logits_processors=logits_processors)
        super().__init__(core, texts, log_stats=log_stats)
        self.loras = loras_in_this_thread(self.config, self.call_core)
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
        options = RequestOptions(priority=priority, adapter=adapter)
        self.add(self.input_processor.process(request_id, prompt, params, options, arrival_time=arrival_time))

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine. Returns the new outputs, possibly none.

        Raises EngineError or EngineDeadError if the step failed; all requests in flight have then ended.
        """
        return [output for _, output in self.step_with_ids()]

    def step_with_ids(self) -> list[tuple[str, RequestOutput]]:
        """`step`, with the engine's own id of each request, which is unique."""
        try:
            outputs = self.core.step()
        except Exception as error:
            self.abort_all()
            if isinstance(error, JaxLLMError):
                raise
            raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
        return self.take(outputs)

    def call_core(self, name: str, *arguments: Any) -> Any:
        return getattr(self.core, name)(*arguments)

    def check_integrity(self) -> None:
        assert not self.has_unfinished_requests(), f"{self.get_num_unfinished_requests()} requests are awaited"
        super().check_integrity()

    def shutdown(self) -> None:
        """End every request and free the device. The engine cannot be used afterwards."""
        self.close()
        self.core.shutdown()


def make_core(
    config: EngineConfig | None = None,
    *,
    progress: Progress | None = None,
    core: SteppedCore | None = None,
    logits_processors: "Sequence[Processor | str]" = (),
) -> tuple[SteppedCore, Texts]:
    """Build the core of a config, unless one is given, and load its texts. Raises as LLMEngine does."""
    log.set_up_if_asked()
    fault_points.install_from_environment("client")
    times = StartTimes()
    if (age := process_age_seconds()) is not None:
        times.add("process before the engine", age)
    if core is not None:
        if logits_processors:
            raise ConfigError("logits_processors are compiled into an engine core; give them to the one that is passed")
        return core, load_texts(config or core.config, times)
    config = config or EngineConfig()
    address_space.check()
    # Load the small files first, so that a fault in them is found before the weights are loaded.
    check_model(config)
    texts = load_texts(config, times)
    return _build_core(config, progress, logits_processors, times), texts


def check_model(config: EngineConfig) -> None:
    """Raise the errors of a model's config.json, and of what proposes tokens for it, before JAX is imported."""
    options = config.model
    if unused := without_effect(config.lora):
        log.warn_once(f"{', '.join(unused)} changes nothing without enable_lora (--enable-lora)")
    tell_unused_keys(config.parallel.eplb_config)
    tell_unused_connector_keys(config.cache.kv_transfer_config)
    directory = text_files(options.model, revision=options.revision, download_dir=options.download_dir)
    model_config = load_model_config(
        directory,
        overrides=options.hf_overrides,
        dtype=options.dtype,
        quantize_lm_head=options.quantize_lm_head,
        runner=options.runner,
        pooler_config=options.pooler_config,
        model_class=options.model_class,
        language_model_only=config.multimodal.language_model_only,
    )
    load_processor(directory, model_config, config.multimodal)
    path = config.multimodal.allowed_local_media_path
    if path is not None and not config.parallel.node_rank and not Path(path).expanduser().is_dir():
        raise ConfigError(f"allowed_local_media_path is {path!r}, must be an existing directory")
    model_config.for_tensor_parallel(Topology.of(config.parallel).tensor)
    check_speculative_config(config)
    check_own_store(config)
    check_policies(config.kv_transfer)
    check_backend(config, model_config)


def _build_core(
    config: EngineConfig, progress: Progress | None, processors: "Sequence[Processor | str]", times: StartTimes
) -> SteppedCore:
    if config.parallel.num_replicas > 1:
        if config.parallel.nnodes > 1 or config.parallel.distributed_executor_backend == "ray":
            raise ConfigError(
                f"data_parallel_size is {config.parallel.data_parallel_size} with nnodes {config.parallel.nnodes} or through Ray: only "
                "`jaxllm serve` has replicas on several hosts; leave nnodes and distributed_executor_backend out, or send requests to "
                "such a server"
            )
        from jaxllm.replicas.local import LocalReplicas

        return LocalReplicas(config, progress, processors)
    with times.part("imports"), no_collections():
        from jaxllm.engine.core import EngineCore  # imports JAX

    return EngineCore(config, progress, processors, times)
