"""The experiment's results as plain values for JSON: rows, breakdowns, times of collectives, one result per size."""

from typing import Any, TypeVar

import msgspec

from jaxllm.errors import ConfigError

T = TypeVar("T")
DECODE, PREFILL, MIXED = WORKS = ("decode", "prefill", "mixed")
PARTS = ("products", "attention", "communication", "other")
"""Parts of a step's time on the device."""
GPU_KERNELS, CPU_THUNKS = "gpu kernels", "cpu thunks"
"""Sources of a breakdown. A thunk is an operation that XLA runs on a CPU."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of work at one tensor-parallel size."""

    tensor_parallel_size: int
    work: str
    """One of WORKS."""
    num_requests: int
    """At once for decode, in all for prefill and mixed."""
    num_tokens: int
    """In each run: output tokens of decode and mixed, prompt tokens of prefill."""
    num_steps: int
    """In the fastest run."""
    run_seconds: list[float]
    """Each run that counts; the fastest is the result."""
    least_seconds: float
    """Least time for the run's bytes and operations at the device's measured limits; excludes communication."""
    num_prompt_tokens: int
    """In all requests."""
    mean_context: float | None = None
    """Tokens in the cache of a request, mean over requests and steps of a decode."""
    step_seconds: list[float] = []
    """Each step of the fastest decode."""
    host_ms: dict[str, float] = {}
    """Per step: planning and launching (`dispatch`), launching alone (`launch`), waiting for the device (`wait`)."""
    note: str | None = None
    """Why the figure may not match the row's description."""

    @property
    def seconds(self) -> float:
        return min(self.run_seconds)

    @property
    def ms_per_step(self) -> float:
        """For decode the time per token of each request."""
        return self.seconds / self.num_steps * 1e3

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.tensor_parallel_size

    @property
    def share_of_limit(self) -> float:
        """1 would be as fast as bytes and operations allow."""
        return self.least_seconds / self.seconds


class Breakdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of a step goes, by a profiler's trace. Milliseconds per step, mean over the devices."""

    tensor_parallel_size: int
    work: str
    num_requests: int
    num_steps: int
    """Traced."""
    source: str
    """GPU_KERNELS or CPU_THUNKS."""
    parts_ms: dict[str, float | None]
    """By PARTS; None: cannot be determined. Time in which kernels of several parts run counts for the first of products, attention,
    other, communication."""
    hidden_communication_ms: float
    """Communication while other kernels run, whose parts have that time."""
    waiting_ms: float | None
    """Communication time spent waiting for the last device; None if the devices' kernels do not match, or on a CPU."""
    gaps_ms: float | None
    """Time of an untraced step in which no kernel runs; None on a CPU."""
    launches: float
    """Kernels per step and device."""
    traced_ms: float
    """A traced step; the profiler slows the host."""
    step_ms: float
    """An untraced step."""
    top: list[list[Any]] = []
    """The longest kernels of the first device: [name, part, ms per step, launches per step]."""


class AllReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sum over all devices of an array [rows, width]."""

    tensor_parallel_size: int
    rows: int
    width: int
    dtype: str
    num_bytes: int
    seconds: float
    per_step: int
    """How many a step of the model needs: two per layer."""
    implementation: str = "xla"
    """xla: XLA (NCCL on GPUs); peer: kernels that write into each other's memory."""

    @property
    def bus_bytes_per_second(self) -> float:
        """Bytes that each device sends and receives per second, by the algorithm of a ring."""
        n = self.tensor_parallel_size
        return self.num_bytes * 2 * (n - 1) / n / self.seconds


class Skipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Work that could not be measured."""

    tensor_parallel_size: int
    work: str
    num_requests: int
    reason: str

    def __str__(self) -> str:
        return f"{self.work}{f' of {self.num_requests}' if self.num_requests else ''}"


class SizeResult(msgspec.Struct, forbid_unknown_fields=True):
    """All results of one tensor-parallel size. `failure` is the error that ended it early; earlier results are valid."""

    tensor_parallel_size: int
    seconds: float = 0.0
    """Duration of the process."""
    engine: dict[str, Any] = {}
    """The process's report of device, versions, memory plan and start."""
    limits: dict[str, Any] = {}
    """Measured on one device: copy_bytes_per_second, gemm_flops_per_second, gemm_dtype."""
    rows: list[Row] = []
    breakdowns: list[Breakdown] = []
    all_reduces: list[AllReduce] = []
    skipped: list[Skipped] = []
    failure: str | None = None


class Results(msgspec.Struct, forbid_unknown_fields=True):
    """An experiment, as results.json holds it."""

    plan: dict[str, Any]
    environment: dict[str, Any] = {}
    command: str = ""
    started_at: str = ""
    sizes: list[SizeResult] = []
    interrupted: bool = False

    @property
    def rows(self) -> list[Row]:
        return [row for size in self.sizes for row in size.rows]

    @property
    def breakdowns(self) -> list[Breakdown]:
        return [breakdown for size in self.sizes for breakdown in size.breakdowns]

    @property
    def complete_sizes(self) -> set[int]:
        """The sizes that did not fail."""
        return {size.tensor_parallel_size for size in self.sizes if size.failure is None}

    @property
    def failed(self) -> bool:
        """Whether any requested result is missing."""
        return self.interrupted or any(size.failure or size.skipped for size in self.sizes)


def to_json(value: Any) -> Any:
    """A result as JSON's values."""
    return msgspec.json.decode(msgspec.json.encode(value))


def from_json(kind: type[T], value: Any) -> T:
    """A result, or a plan, from JSON's values. Raises ConfigError if they are not those of one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from None
