"""An engine core without a model: each request outputs a given list of token ids, one per step, by the real core's rules."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.cache_events import CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.errors import AdapterNotFoundError, EngineDeadError, EngineSleepingError, InvalidRequestError
from jaxllm.kernel_verdicts import OpReport
from jaxllm.kv_transfer import KVTransfer
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, Norm, Rope
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest, FinishReason
from jaxllm.scheduler_output import TokenLogprobs
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.start_times import StartTimes

WIDTH = 8


def fake_stats(**given: Any) -> SchedulerStats:
    """Statistics in which all that is not given is 0."""
    required = [field.name for field in fields(SchedulerStats) if field.default is MISSING]
    return SchedulerStats(**(dict.fromkeys(required, 0) | given))


def tiny_model_config(vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """A model config of which only the vocabulary matters."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        layers=(Layer(Attention(1, 1, 8, Rope()), MLP(8), Norm("input_layernorm"), Norm("post_attention_layernorm")),),
        norm=Norm("model.norm"),
        max_position=4096,
        eos_token_ids=eos_token_ids,
    )


def fake_logprobs(token_ids: Sequence[int], count: int, vocab_size: int) -> TokenLogprobs:
    """A token t has the logprob -0.5 and rank 2; the likeliest others are t+1, t+2, …"""
    ids = [[(token + offset) % vocab_size for offset in range(1 + count)] for token in token_ids]
    logprobs = [[-0.5, *(-0.1 * (offset + 1) for offset in range(count))] for _ in token_ids]
    shape = (len(ids), 1 + count)
    ranks = np.full(len(ids), 2, np.int32)
    return TokenLogprobs(np.array(ids, np.int32).reshape(shape), np.array(logprobs, np.float32).reshape(shape), ranks)


def fake_vectors(request: EngineCoreRequest) -> np.ndarray:
    """How often each token id modulo the width occurs in a prompt: texts with the same tokens are alike. Per token if asked."""
    params = request.pooling_params
    assert params is not None
    by_token = np.eye(WIDTH, dtype=np.float32)[np.array(request.prompt_token_ids) % WIDTH]
    vectors = by_token if params.task == "token_embed" else by_token.sum(axis=0)
    vectors = vectors[..., : params.dimensions]
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12) if params.use_activation else vectors


class FakeAdapters:
    """The calls for adapters: one whose directory has no adapter_config.json fails. It is loaded when it is asked for again."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.adapter_faults: dict[str, str] = {}
        """Why the loading of an adapter fails, by its name."""
        self.calls: list[tuple[Any, ...]] = []
        self._loading: list[tuple[str, str]] = []

    def add_adapter(self, name: str, path: str, replace: bool = False) -> int:
        self.calls.append(("add", name, path, replace))
        if name in self.adapters and not replace:
            raise InvalidRequestError(f"adapter {name!r} is loaded already", "name")
        self._loading.append((name, path))
        return len(self._loading)

    def adapter_state(self, number: int) -> AdapterState:
        name, path = self._loading[number - 1]
        if self.calls[-1] != ("state", number):
            self.calls.append(("state", number))
            return AdapterState("loading")
        if not (Path(path) / "adapter_config.json").is_file():
            return AdapterState("failed", f"adapter {name!r}: {path}/adapter_config.json is missing")
        if name in self.adapter_faults:
            return AdapterState("failed", self.adapter_faults[name])
        self.adapters[name] = AdapterInfo(name, path, 8, 1024, False, "host")
        return AdapterState("ready")

    def remove_adapter(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None

    def list_adapters(self) -> list[AdapterInfo]:
        return list(self.adapters.values())

    def pin_adapter(self, name: str) -> None:
        self.adapters[name] = msgspec.structs.replace(self.adapters[name], is_pinned=True)


@dataclass
class _Running:
    request: EngineCoreRequest
    script: list[int]
    said: list[int] = field(default_factory=list)
    waits: bool = False
    """Whether another engine gives its first token."""


class FakeEngineCore(FakeAdapters):
    """`script(request)` gives the token ids that a request outputs; after them it outputs 0 forever."""

    def __init__(
        self,
        script: Callable[[EngineCoreRequest], Sequence[int]],
        *,
        vocab_size: int = 1000,
        max_model_len: int = 128,
        tokens_per_step: int = 1,
        config: EngineConfig | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ):
        super().__init__()
        self.config = config or EngineConfig()
        self.model_config = tiny_model_config(vocab_size, eos_token_ids)
        self.max_model_len = max_model_len
        self.num_compiled_after_warmup = 0
        self.awaited_programs = (0, 0)
        self.start_times = StartTimes()
        self.processor_arguments: dict[str, int] = {}
        self.kernels = {"paged_attention": OpReport("triton", "passed", {"mosaic": "ragged batch: error 0.97, allowed 0.015"})}
        self.requests: list[EngineCoreRequest] = []
        """Every request that was ever added."""
        self.running: dict[str, _Running] = {}
        self.aborted: list[str] = []
        self.ended_leases: list[KVTransfer] = []
        self.held: set[str] = set()
        self.num_steps = 0
        self.before_step: Callable[[], None] = lambda: None
        """Called at each step; may raise."""
        self.is_shut_down = False
        self._sleeps = False
        self.paused: str | None = None
        self.outputs: list[EngineCoreOutput] = []
        """Further outputs of the next step."""
        self._script = script
        self._tokens_per_step = tokens_per_step

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.is_shut_down:
            raise EngineDeadError("the engine was shut down")
        if self._sleeps:
            raise EngineSleepingError("the engine sleeps")
        assert request.request_id not in self.running
        if request.options.adapter is not None and request.options.adapter not in self.adapters:
            raise AdapterNotFoundError(f"there is no adapter {request.options.adapter!r}; add it first", "adapter")
        self.requests.append(request)
        said = list(request.output_token_ids)
        self.running[request.request_id] = _Running(request, list(self._script(request)), said, request.awaits_first_token)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        if (running := self.running.get(request_id)) is not None and running.waits:
            running.said, running.waits = list(output_token_ids), False

    prefill_address = None

    def meet(self, transfer: KVTransfer) -> None:
        """It fetches no blocks."""

    def end_lease(self, transfer: KVTransfer) -> None:
        self.ended_leases.append(transfer)

    def hold_requests(self, request_ids: list[str]) -> None:
        self.held |= self.running.keys() & request_ids

    def release_requests(self, request_ids: list[str]) -> None:
        self.held -= set(request_ids)

    def run_between_steps(self, post) -> None:
        """There is nothing to run."""

    def finish_compiling(self) -> None:
        """There is nothing to compile."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.outputs or (self.running.keys() - self.held and self.paused != "keep"))

    def step(self) -> list[EngineCoreOutput]:
        self.num_steps += 1
        self.before_step()
        outputs, self.outputs = self.outputs, []
        ready = [name for name, running in self.running.items() if name not in self.held and not running.waits]
        return outputs + [self._advance(self.running[name]) for name in ready]

    def _advance(self, running: _Running) -> EngineCoreOutput:
        request, params = running.request, running.request.sampling_params
        if request.pooling_params is not None:
            del self.running[request.request_id]
            return EngineCoreOutput(request.request_id, [], FinishReason.STOP, pooled=fake_vectors(request))
        is_first = not running.said
        new: list[int] = []
        reason: FinishReason | None = None
        stop_reason: int | None = None
        while len(new) < self._tokens_per_step and reason is None:
            place = len(running.said)
            token = running.script[place] if place < len(running.script) else 0
            running.said.append(token)
            new.append(token)
            if token in request.eos_token_ids and not params.ignore_eos:
                reason, stop_reason = FinishReason.STOP, None if token == request.eos_token_ids[0] else token
            elif token in (params.stop_token_ids or ()):
                reason, stop_reason = FinishReason.STOP, token
            elif len(running.said) >= (params.max_tokens or 0):
                reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[request.request_id]
        vocab_size = self.model_config.vocab_size
        count = params.logprobs if params.logprob_token_ids is None else len(params.logprob_token_ids)
        logprobs = None if count is None else self.logprobs(request, new, count)
        prompt_logprobs = None
        if is_first and params.prompt_logprobs is not None:
            prompt_logprobs = fake_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs, vocab_size)
        return EngineCoreOutput(request.request_id, new, reason, stop_reason, logprobs, prompt_logprobs)

    def logprobs(self, request: EngineCoreRequest, new_token_ids: list[int], count: int) -> TokenLogprobs:
        """The logprobs of new tokens; a test may put its own in place."""
        return fake_logprobs(new_token_ids, count, self.model_config.vocab_size)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        return reset_running_requests or not self.running

    @property
    def sleep_level(self) -> int:
        return int(self._sleeps)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.outputs += [EngineCoreOutput(request_id, [], FinishReason.ABORT) for request_id in self.running]
        self.running.clear()
        self._sleeps = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._sleeps = bool(tags) and set(tags or ()) != {"weights", "kv_cache"}

    def pause(self, mode: str = "abort") -> None:
        self.paused = mode
        if mode == "abort":
            self.outputs += [EngineCoreOutput(request_id, [], FinishReason.ABORT) for request_id in self.running]
            self.running.clear()

    def resume(self) -> None:
        self.paused = None

    def is_paused(self) -> bool:
        return self.paused is not None

    def is_draining(self) -> bool:
        return self.paused == "wait" and bool(self.running)

    def is_sleeping(self) -> bool:
        return self._sleeps

    def expert_load(self) -> dict[str, Any]:
        return {"layers": [1], "tokens": [[3, 0]]}

    def start_profile(self) -> None:
        """There is nothing to trace."""

    def stop_profile(self) -> None:
        """There is nothing to trace."""

    def check_integrity(self) -> None:
        assert not self.running

    def stats(self) -> SchedulerStats:
        return fake_stats(num_running=len(self.running), cache_usage=0.25, prefix_cache_queries=8, prefix_cache_hits=2)

    def publish_cache_events(self) -> None:
        self.publishes = True

    def take_cache_events(self) -> CacheEvents | None:
        return None

    def cache_snapshot(self) -> CacheEvents:
        return CacheEvents(cleared=True)

    def replica_of(self, request_id: str) -> int:
        return 0

    def loads(self) -> list[tuple[SchedulerStats, int]]:
        return [(self.stats(), self.num_compiled_after_warmup)]

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.running.clear()
