"""The experiment's results, as results.json holds them and as the measuring processes report them."""

from typing import Any

import msgspec

from jaxllm.scaling.plan import Plan

PARTS = ("products", "attention", "communication", "other")
"""Parts of a step's time on the device."""
GPU_KERNELS, CPU_THUNKS = "gpu kernels", "cpu thunks"
"""Sources of a breakdown. A thunk is an operation that XLA runs on a CPU."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of work at one tensor-parallel size."""

    tensor_parallel_size: int
    work: str
    """One of plan.WORKS."""
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
    mean_context: float | None = None
    """Tokens in the cache of a request, mean over requests and steps of a decode."""
    step_seconds: list[float] = []
    """Each step of the fastest decode."""
    host_ms: dict[str, float] = {}
    """Per step: planning and launching (`dispatch`), launching alone (`launch`), waiting for the device (`wait`)."""
    note: str | None = None
    """Why the figure may not match the row's description."""


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
    top: list[tuple[str, str, float, float]] = []
    """The longest kernels of the first device: (name, part, ms per step, launches per step)."""


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


class Skipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Work that could not be measured."""

    tensor_parallel_size: int
    work: str
    num_requests: int
    reason: str

    def __str__(self) -> str:
        return f"{self.work}{f' of {self.num_requests}' if self.num_requests else ''}: {self.reason}"


class SizeResult(msgspec.Struct, forbid_unknown_fields=True):
    """The results of one tensor-parallel size."""

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
    """The error that ended the process early; what it reported before is valid."""

    def add(self, part: "SizeResult") -> None:
        """Add what the process reports as one part after the other."""
        for name in ("rows", "breakdowns", "all_reduces", "skipped"):
            getattr(self, name).extend(getattr(part, name))
        self.engine |= part.engine
        self.limits |= part.limits
        self.failure = self.failure or part.failure


class Results(msgspec.Struct, forbid_unknown_fields=True):
    """An experiment."""

    plan: Plan
    environment: dict[str, Any] = {}
    command: str = ""
    started_at: str = ""
    sizes: list[SizeResult] = []
    """In ascending order."""
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
    def problems(self) -> list[str]:
        """Work that is missing, with the reasons."""
        found = ["the experiment was interrupted"] if self.interrupted else []
        for size in self.sizes:
            where = f"tensor-parallel size {size.tensor_parallel_size}"
            found += [f"{where}, {skipped}" for skipped in size.skipped]
            found += [f"{where} failed: {size.failure}"] if size.failure else []
        return found
