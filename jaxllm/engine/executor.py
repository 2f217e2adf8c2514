"""The interface between an engine core and what computes its steps. Does not import JAX.

A `ModelRunner` is the executor of one process. Calls after the start take and return only values that can be sent to another host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxllm.foreseen import Foreseen, Needs
from jaxllm.progress import Progress
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import jax


class PendingStep(Protocol):
    """A step in flight."""

    @property
    def mask_TW(self) -> np.ndarray | None:
        """With masked requests: what request i of `sampled_ids` may get behind its last token is in row i * width, and behind its d-th
        draft in row i * width + d: bit b of word w allows token 32 w + b. Allows every token at first."""

    @property
    def width(self) -> int:
        """Tokens that a request may sample: 1, and drafts."""

    @property
    def sampled_ids(self) -> list[str]:
        """The requests that get a token."""

    @property
    def was_sampled_late(self) -> bool:
        """Whether the forward pass was over before `sample`, so that the device had nothing to do."""

    def drafts(self) -> list[list[int]]:
        """The drafts that each request of `sampled_ids` computes in this step, if any is masked. Waits until they are proposed."""

    def set_next_drafts(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Set drafts of some requests of `sampled_ids`, by index: the last token expected from this step, then drafts for the next, which
        count only if that token is drawn. Called before `sample`."""

    def sample(self) -> None:
        """With masked requests: start sampling under `mask_TW`. Returns at once."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its results. Raises the error of a launch or of a device."""

    def op_results(self) -> ModelRunnerOutput:
        """Wait for the plan's operations and return their results, which are also among those of the step. Raises as `result`."""


class ExecutorPrograms(Protocol):
    """The programs of an executor. Safe to read from any thread."""

    @property
    def num_queued(self) -> int:
        """Programs that are compiled or loaded in the background now, or will be."""

    @property
    def num_compiled(self) -> int: ...
    @property
    def num_loaded(self) -> int: ...
    @property
    def num_compiled_after_warmup(self) -> int:
        """Compilations that a step waited for."""

    @property
    def awaited(self) -> tuple[int, int]:
        """Programs that a step waits for now: how many are ready, and the total."""

    def listen(self, on_made: Callable[[], None]) -> None:
        """Call this from now on whenever a program was made, in the thread that made it."""

    def finish(self) -> None:
        """Wait until all programs that were started are ready. Raises the first error."""

    def shutdown(self) -> None:
        """Start no more programs and wait for those being made."""


MemoryAction = Literal["keep", "drop", "restore"]
MemoryPart = Literal["weights", "copies", "kv_cache"]


class Executor(Protocol):
    """Holds weights, caches and rows on devices and runs steps on them, in the order of its calls. All calls but `stage` come from one
    thread."""

    @property
    def programs(self) -> ExecutorPrograms: ...

    @property
    def encoder_totals(self) -> tuple[int, int]:
        """Patches that steps have encoded since the start, padding included, and runs of the encoder."""

    def run_new_program(self) -> bool:
        """Run a common program that was made after the start on empty steps, as `warm_up` does. Returns whether there was one. Called
        while no step is in flight."""

    def foresee(self, needs: Needs) -> Foreseen:
        """Have what the steps of such a request need made next, if programs are compiled ahead and it is missing. Returns at once.

        Returns what the request waits for: nothing where its first step makes what is missing, as with several
        hosts, which would have to agree on what each of them has."""

    def dispatch(self, plan: SchedulerOutput) -> PendingStep:
        """Run the plan's operations, start its step and return at once. A plan with masked requests needs the step's `sample` before the
        next dispatch of one with rows. Raises DeviceOpError if an operation fails, before anything else is done.
        """

    def stage(self, handle: int, data: np.ndarray) -> None:
        """Send data to the devices for an operation of a later plan, which names the handle; it has arrived when this returns. Any thread
        may call it. After an error some devices may have it: see `DropStaged`."""

    def start_over(self) -> None:
        """Free all rows and reallocate all arrays that steps change, after a failure that may have lost any of them.

        Raises the device's error if it cannot.
        """

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """Raise AssertionError if any request other than `finished_ids`, whose rows the next step frees, holds a row."""

    def memory(self, action: MemoryAction, part: MemoryPart) -> None:
        """Keep, drop or restore what takes memory, for sleep; no step may be in flight.

        keep weights: copy them to the host. drop copies: release these. drop weights: release their memory. restore weights: set them from
        the copies, or from the checkpoints if there are none; raises ModelLoadError. drop kv_cache: free all rows and the arrays that steps
        change. restore kv_cache: as `start_over`.
        """

    def close(self) -> None:
        """End the threads and release all device memory. May be called again."""


@runtime_checkable
class TokenTaker(Protocol):
    """An executor of a pipeline on a host above 0, whose first stage may wait for tokens that the last one samples on host 0."""

    def take_tokens(self, tokens: Sequence[int]) -> None:
        """The tokens that the next step sampled, in the order of its requests. Called for each step, in order."""


class DeviceRunner(Executor, Protocol):
    """An executor on the devices of this process, while it is made and measured."""

    # The start, in this order

    def start_programs(self, *, rare_later: bool) -> None:
        """Start threads that load or compile all programs: first those that a start waits for; with `rare_later`, the rare ones in the
        background while serving."""

    def start_programs_when_idle(self) -> None:
        """Start a thread that loads or compiles all programs while the engine is idle."""

    def begin_ops(self) -> None:
        """Prepare what operations of plans need in addition to the devices, e.g. host memory, in the background."""

    def load_weights(self, model_dir: Path, progress: Progress) -> None:
        """Read the weights. Waits until they are on the devices. Raises ModelLoadError."""

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        """Wait until the programs that a start waits for, or with `rare` all programs, are ready."""

    def allocate_caches(self) -> None:
        """Allocate the KV cache, zeroed, on every device."""

    def warm_up(self) -> None:
        """Run the programs that a start waits for on empty steps. From then on, compilations that a request waits for are counted."""

    # Measurements

    def work_bytes(self) -> int:
        """Temporary and output bytes per device of the largest step, read from its compiled program."""

    def take_weights(self, other: Any) -> None:
        """Take over the weights, and what operations have begun, of a runner of the same kind and models, which loses them."""

    def wait(self) -> None:
        """Wait until the devices have run all steps dispatched so far."""

    @property
    def params(self) -> "tuple[jax.Array, ...]":
        """The weights."""

    num_steps: int
    dispatch_seconds: float
    """Total host time of starting all steps."""

    @property
    def launch_seconds(self) -> float:
        """Total host time of all launches, inside `dispatch` or in a thread."""
