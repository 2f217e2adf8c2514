"""PipelineRunner: runs each step through the stages of a pipeline, one after the other, without waiting for any of them."""

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.pipeline.lost_peers import LostPeers
from jaxllm.pipeline.stages import EarlierStage, LastStage
from jaxllm.progress import Progress
from jaxllm.runner.batch import Batch
from jaxllm.runner.expert_counts import CountsInFlight
from jaxllm.runner.layout import Column
from jaxllm.runner.memory import entering_bytes
from jaxllm.runner.pending import StepInFlight
from jaxllm.runner.rows import Rows
from jaxllm.scheduler_output import SchedulerOutput

_MOST_IN_FLIGHT = 4
"""More steps than are in flight, for each stage."""


class PipelineRunner:
    """An executor over stages: `ModelRunner`'s methods, each for all of them.

    The last stage makes a step's batch, has the others run it first, and samples. What a stage leaves goes to the next one's devices
    as they become ready; so do drawn tokens from the last stage to the first. The host waits for neither. While a stage computes
    one step, those before it can compute later ones: see `Scheduler` for which requests these have.
    """

    def __init__(self, earlier: Sequence[EarlierStage], last: LastStage):
        self._earlier, self.last = tuple(earlier), last
        self.stages = (*self._earlier, last)
        last.run_earlier, last.on_drawn = self._run_earlier, self._send_back
        last.consumers = (*last.consumers, LostPeers(self._earlier))
        self._num_launched = 0
        self._drawn_in_N = np.full(last.buckets.max_rows + 1, -1)
        """The latest launch that drew a token of each row, by row; -1: the host knows its last token."""
        self._sent_back: deque[tuple[int, jax.Array]] = deque()
        """By launch, oldest first: the last token of each row, on the way to the first stage."""

    # Steps

    def dispatch(self, plan: SchedulerOutput) -> StepInFlight:
        """See ModelRunner."""
        return self.last.dispatch(plan)

    def _run_earlier(self, batch: Batch) -> jax.Array:
        """Start a step on all stages before the last."""
        self._take_tokens(batch)
        entering: tuple[jax.Array, ...] = ()
        for stage, following in zip(self.stages, self.stages[1:], strict=False):
            assert isinstance(stage, EarlierStage)
            entering = (jax.device_put(stage.pass_on(batch, entering), following.shapes.replicated),)
        return entering[0]

    def _take_tokens(self, batch: Batch) -> None:
        """Give the first stage the tokens of a step's requests that are not known to the host. None that were drawn later: the stage
        would wait for steps that this one need not wait for."""
        self._num_launched += 1
        self._drawn_in_N[[row.index for row in batch.admitted]] = -1
        columns_RC = batch.layout.views(batch.buffer).columns_RC
        newest = self._drawn_in_N[columns_RC[:, Column.ROW]].max()
        tokens = None
        # Tokens of old steps are there, whether or not a request goes on with them.
        newest = max(newest, self._num_launched - 1 - _MOST_IN_FLIGHT * len(self.stages))
        while self._sent_back and self._sent_back[0][0] <= newest:
            _, tokens = self._sent_back.popleft()
        if tokens is not None:
            self._earlier[0].take_tokens(tokens)
        self._drawn_in_N[columns_RC[:, Column.TOKEN_ROW]] = self._num_launched
        self._drawn_in_N[self.last.rows.trash] = -1

    def _send_back(self, last_token_N: jax.Array) -> None:
        """Send the tokens of the latest launch to the first stage."""
        tokens_N = jax.device_put(last_token_N, self._earlier[0].shapes.replicated)
        self._sent_back.append((self._num_launched, tokens_N))

    def start_over(self) -> None:
        """See ModelRunner."""
        for stage in reversed(self.stages):  # the last drains the launches of all
            stage.start_over()
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        self._sent_back.clear()
        self._drawn_in_N[:] = -1

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """See ModelRunner."""
        self.last.check_idle(finished_ids)

    def wait(self) -> None:
        """Wait until the devices have run all steps dispatched so far."""
        for stage in reversed(self.stages):
            stage.wait()

    # The start

    def start_programs(self, *, rare_later: bool) -> None:
        """See ModelRunner, as for the methods that follow."""
        for stage in self.stages:
            stage.start_programs(rare_later=rare_later)

    def start_programs_when_idle(self) -> None:
        for stage in self.stages:
            stage.start_programs_when_idle()

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        for stage in self.stages:
            stage.wait_for_programs(progress, rare=rare)

    def work_bytes(self) -> int:
        shapes = self.last.shapes
        waiting = entering_bytes(shapes.model, shapes.buckets.tokens[-1], len(self.stages))
        return max(stage.work_bytes() for stage in self.stages) + waiting

    def load_weights(self, model_dir: Path, progress: Progress) -> None:
        for stage in self.stages:
            stage.load_weights(model_dir, progress)

    def take_weights(self, other: "PipelineRunner") -> None:
        for stage, same in zip(self.stages, other.stages, strict=True):
            stage.take_weights(same)

    def allocate_caches(self) -> None:
        for stage in self.stages:
            stage.allocate_caches()

    def warm_up(self) -> None:
        for stage in self.stages:
            stage.warm_up()

    # Sleep

    def keep_weights(self) -> None:
        for stage in self.stages:
            stage.keep_weights()

    def forget_weights(self) -> None:
        for stage in self.stages:
            stage.forget_weights()

    def restore_weights(self) -> None:
        for stage in self.stages:
            stage.restore_weights()

    def drop_weights(self) -> None:
        for stage in self.stages:
            stage.drop_weights()

    def drop_caches(self) -> None:
        for stage in self.stages:
            stage.drop_caches()
        self._forget_tokens()

    # Adapters, which pipelines have none of

    def stage_adapter(self, packed: np.ndarray) -> Any:
        raise AssertionError("a pipeline has no adapters")

    def write_adapter(self, slot: int, staged: Any) -> None:
        raise AssertionError("a pipeline has no adapters")

    def take_expert_tokens(self) -> CountsInFlight:
        """See ModelRunner."""
        found = [stage.take_expert_tokens() for stage in reversed(self.stages)]  # the last drains the launches of all
        return CountsInFlight.joined(reversed(found))

    # Any time

    @property
    def params(self) -> tuple[jax.Array, ...]:
        """The weights of all stages."""
        return tuple(array for stage in self.stages for array in stage.params)

    @property
    def rows(self) -> Rows:
        return self.last.rows

    @property
    def num_steps(self) -> int:
        return self.last.num_steps

    @property
    def dispatch_seconds(self) -> float:
        return self.last.dispatch_seconds

    @property
    def launch_seconds(self) -> float:
        return self.last.launch_seconds

    @property
    def num_compiled(self) -> int:
        return sum(stage.num_compiled for stage in self.stages)

    @property
    def num_loaded(self) -> int:
        return sum(stage.num_loaded for stage in self.stages)

    @property
    def num_compiled_after_warmup(self) -> int:
        return sum(stage.num_compiled_after_warmup for stage in self.stages)

    @property
    def awaited_programs(self) -> tuple[int, int]:
        ready, total = zip(*(stage.awaited_programs for stage in self.stages), strict=True)
        return sum(ready), sum(total)

    def shutdown_programs(self) -> None:
        """End the threads that compile."""
        for stage in self.stages:
            stage.shutdown_programs()

    def delete_arrays(self) -> None:
        self._forget_tokens()
        for stage in reversed(self.stages):  # the last ends the launches of all
            stage.delete_arrays()
