"""The interface of an engine core, and the calls that control it, from which messages to the engine process derive."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from jaxllm.cache_events import CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.kernel_verdicts import OpReport
from jaxllm.kv_transfer import KVTransfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.served_model import ServedModel
from jaxllm.start_times import StartTimes

SleepMode = Literal["abort", "refuse"]
"""How `sleep` treats unfinished requests."""
PauseMode = Literal["abort", "wait", "keep"]
"""How `pause` treats unfinished requests."""


class Core(Protocol):
    """Interface of an engine core, in this or another process."""

    config: EngineConfig
    max_model_len: int
    processor_arguments: Mapping[str, int]
    """Logits processors that requests may name, with the number of arguments of each."""
    kernels: dict[str, OpReport]
    """The implementation of each op and the result of its check."""

    @property
    def model_config(self) -> ServedModel: ...
    @property
    def num_compiled_after_warmup(self) -> int: ...
    @property
    def sleep_level(self) -> int: ...
    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def end_lease(self, transfer: KVTransfer) -> None:
        """Blocks that a prefill engine keeps for a request, this one or another, will not be fetched by it: free them. Returns at once."""

    def replica_of(self, request_id: str) -> int:
        """The replica that computes an unfinished request."""

    def stats(self) -> SchedulerStats: ...
    def loads(self) -> list[tuple[SchedulerStats, int]]:
        """Statistics of each replica, and the number of programs that it compiled after its warm-up."""

    def shutdown(self) -> None: ...


class SteppedCore(Core, Protocol):
    """A core that computes when its `step` is called. It also has the methods that PauseCalls names."""

    start_times: StartTimes

    @property
    def awaited_programs(self) -> tuple[int, int]: ...
    @property
    def prefill_address(self) -> KVTransfer | None:
        """Where decode engines find this one, without a lease; None if it is no prefill engine."""

    def meet(self, transfer: KVTransfer) -> None:
        """A prefill engine has this address, whose blocks requests will name: connect to it now."""

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        """Let a request run that awaits its first token: behind these tokens of its output, which another engine has drawn and reported, or
        from its prompt on, if there are none. Ignores other requests."""

    def step(self) -> list[EngineCoreOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def run_between_steps(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Use this to have the loop of steps run a call between two of them, or while it waits for requests. Called by the loop."""

    def publish_cache_events(self) -> None:
        """Start to collect events of the prefix cache."""

    def take_cache_events(self) -> CacheEvents | None:
        """Events since the last call; None if there are none."""

    def cache_snapshot(self) -> CacheEvents:
        """All that is in the prefix cache."""


class ControlCalls:
    """Each call runs the engine core's method of its name between two steps and returns the result; AsyncLLM's are awaited.

    All raise EngineDeadError if the engine cannot serve.
    """

    def call_core(self, name: str, *arguments: Any) -> Any:
        """Run a method of the engine core."""
        raise NotImplementedError

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> Any:
        """Discard all cached prefixes, on devices and in host memory; reset_external: also on disk, for all engines with this model that
        share it. Returns False if blocks are in use."""
        return self.call_core("reset_prefix_cache", reset_running_requests, reset_external)

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> Any:
        """Release device memory: discard the KV cache, and move the weights to the host (level 1) or discard them (level 2).

        Aborts unfinished requests, or raises EngineError if there are any ("refuse"). New requests are rejected with
        EngineSleepingError. Does nothing if the engine already sleeps at this level or a deeper one. Raises
        InvalidRequestError for another level.
        """
        return self.call_core("sleep", level, mode)

    def wake_up(self, tags: Collection[str] | None = None) -> Any:
        """Restore the memory of `tags` ("weights", "kv_cache"; None: both) and serve again once both are restored.

        Raises InvalidRequestError for another tag. Raises OutOfMemoryError or ModelLoadError if that fails; the engine then
        stays asleep.
        """
        return self.call_core("wake_up", tags)

    def is_sleeping(self) -> Any:
        """Whether the engine sleeps."""
        return self.call_core("is_sleeping")

    def start_profile(self) -> Any:
        """Start a trace with JAX's profiler. Raises ConfigError without `profiler_dir`, EngineError during a trace."""
        return self.call_core("start_profile")

    def stop_profile(self) -> Any:
        """End the trace and write it. Raises EngineError if there is none."""
        return self.call_core("stop_profile")

    def expert_load(self) -> Any:
        """How many tokens each expert of a mixture got since the start: {"layers": numbers of the layers that have one, "tokens": for
        each of them a list by expert}. Waits for the steps in flight. Raises ConfigError if they are not counted (expert_load)."""
        return self.call_core("expert_load")

    def finish_compiling(self) -> Any:
        """Wait until background compilation is done, e.g. before a measurement."""
        return self.call_core("finish_compiling")

    def check_integrity(self) -> Any:
        """Raise AssertionError if a request leaked resources. Call without unfinished requests.

        If the engine runs in its own process, raises EngineError instead.
        """
        return self.call_core("check_integrity")

    # LoRA adapters, by name. All raise ConfigError if the engine was started without enable_lora.

    def add_adapter(self, name: str, path: str, replace: bool = False) -> Any:
        """Start to read and check the adapter in the local directory `path`. Returns a number for `adapter_state`.

        Requests may name it once it is ready. Raises InvalidRequestError if there is one of this name, unless it is to be
        replaced; requests that run keep the one they began with.
        """
        return self.call_core("add_adapter", name, path, replace)

    def adapter_state(self, number: int) -> Any:
        """How far `add_adapter` has got, as an AdapterState."""
        return self.call_core("adapter_state", number)

    def remove_adapter(self, name: str) -> Any:
        """Refuse new requests for an adapter, and free its memory when those that run have ended.

        Returns False if there is none of this name.
        """
        return self.call_core("remove_adapter", name)

    def list_adapters(self) -> Any:
        """The adapters that requests may name, as a list of AdapterInfo; empty without enable_lora."""
        return self.call_core("list_adapters")

    def pin_adapter(self, name: str) -> Any:
        """Keep an adapter on the device until it is removed. Raises AdapterNotFoundError, or InvalidRequestError if all others
        are pinned already."""
        return self.call_core("pin_adapter", name)


class PauseCalls(ControlCalls):
    """Control calls of engines that accept requests during a pause. LLM has none of them: its methods would wait for ever."""

    def pause(self, mode: PauseMode = "abort") -> Any:
        """Hold back new requests until `resume`. Unfinished ones are aborted ("abort"), run to completion ("wait"; see
        `is_draining`) or suspended ("keep"). Raises InvalidRequestError for another mode.
        """
        return self.call_core("pause", mode)

    def resume(self) -> Any:
        """Continue computing, and queue the requests that arrived during the pause."""
        return self.call_core("resume")

    def is_paused(self) -> Any:
        """Whether requests are held back."""
        return self.call_core("is_paused")

    def is_draining(self) -> Any:
        """Whether the engine is paused while earlier requests run to completion."""
        return self.call_core("is_draining")

    def hold_requests(self, request_ids: list[str]) -> Any:
        """Give the places and blocks of requests, by the engine's own ids, to others until `release_requests`. Ignores unknown ids."""
        return self.call_core("hold_requests", request_ids)

    def release_requests(self, request_ids: list[str]) -> Any:
        """Continue requests that are held, as soon as there are places and blocks for them. Ignores unknown ids."""
        return self.call_core("release_requests", request_ids)
