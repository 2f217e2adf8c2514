"""Makes the batches of a step, one of each data-parallel rank, in one layout, because all ranks run the same programs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jaxllm.ranks_plan import RanksPlan
from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.layout import FROM_ROW, Column, StepLayout
from jaxllm.runner.rows import Rows
from jaxllm.scheduler_output import SchedulerOutput


class RankBatches:
    """The builders of all ranks, also of those that other hosts have: the largest batch decides which programs run."""

    def __init__(self, builders: Sequence[BatchBuilder]):
        """builders: of each rank, alike but for their rows."""
        self.builders = tuple(builders)

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of each rank."""
        return tuple(builder.rows for builder in self.builders)

    def apply(self, plan: SchedulerOutput) -> list[Batch]:
        """The batch of each rank, after rows were freed and given as the plan says."""
        if len(self.builders) == 1:
            return [self.builders[0].apply(plan)]
        assert isinstance(plan, RanksPlan), "a plan of one data-parallel rank"
        batches = [builder.apply(part) for builder, part in zip(self.builders, plan.ranks, strict=True)]
        return alike(batches, self.builders)

    def empty(self, layout: StepLayout) -> list[np.ndarray]:
        """The buffers of a step without requests."""
        return [builder.empty(layout) for builder in self.builders]

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """Raise AssertionError if any request other than `finished_ids`, whose rows the next step frees, holds a row."""
        finished_ids = list(finished_ids)
        for rows in self.rows:
            rows.check_idle(finished_ids)

    def clear(self) -> None:
        """Free all rows."""
        for rows in self.rows:
            rows.clear()


def alike(batches: Sequence[Batch], builders: Sequence[BatchBuilder]) -> list[Batch]:
    """Pad the batches of a step to the largest layout, that of `decode` if it can run all of them, else of `forward`."""
    inputs, needed = builders[0].inputs, {name for batch in batches for name in batch.features}
    of_decode = inputs.of_decode(needed) if all(batch.is_decode for batch in batches) else None
    is_decode, features = of_decode is not None, inputs.of_mixed(needed) if of_decode is None else of_decode
    if is_decode:
        layout = max((batch.layout for batch in batches), key=lambda layout: layout.num_rows)
    else:
        num_tokens = max(1, *map(_num_tokens, batches))
        layout = builders[0].mixed_layout(builders[0].buckets.fit_tokens(num_tokens), features)
    relaid = [_relaid(batch, builder, layout, is_decode) for batch, builder in zip(batches, builders, strict=True)]
    return [
        replace(
            batch,
            width=max(each.width for each in relaid),
            next_width=max(each.next_width for each in relaid),
            variant=max(each.variant for each in relaid),
            logprobs=max(each.logprobs for each in relaid),
            sample_rows=max(each.sample_rows for each in relaid),
            features=features,
        )
        for batch in relaid
    ]


def _num_tokens(batch: Batch) -> int:
    return int(_counts(batch).sum()) if batch.is_decode else batch.layout.num_tokens


def _counts(batch: Batch) -> np.ndarray:
    """Tokens of each row."""
    return batch.layout.views(batch.buffer).columns_RC[:, Column.NUM_TOKENS]


def _relaid(batch: Batch, builder: BatchBuilder, layout: StepLayout, is_decode: bool) -> Batch:
    """Move a step to a layout that has room for it."""
    if batch.is_decode and not is_decode:
        sample_rows = builder.buckets.fit_sample(len(batch.sampled)) if batch.sampled else 0
        batch = replace(_with_drafts_in_place(batch), samples_apart=True, sample_rows=sample_rows)
    elif batch.layout == layout:
        return batch
    buffer = builder.empty(layout)
    old, new = batch.layout.views(batch.buffer), layout.views(buffer)
    num_rows, num_tokens = min(len(old.columns_RC), layout.num_rows), min(len(old.token_ids_T), layout.num_tokens)
    new.columns_RC[:num_rows] = old.columns_RC[:num_rows]
    new.token_ids_T[:num_tokens] = old.token_ids_T[:num_tokens]
    is_update = old.update_index_U != np.iinfo(np.int32).max
    updates = old.update_index_U[is_update], old.update_block_U[is_update]
    beyond = builder.fill_updates(layout, buffer, *updates)
    return replace(batch, buffer=buffer, layout=layout, is_decode=is_decode, extra_updates=_joined(batch.extra_updates, beyond))


def _with_drafts_in_place(batch: Batch) -> Batch:
    """A step of `decode`, whose buffer has a token of each row, with all tokens one after the other, as those of `forward`."""
    old, count_R = batch.layout.views(batch.buffer), _counts(batch)
    first_R = np.cumsum(count_R) - count_R
    token_ids_T = np.full(count_R.sum(), FROM_ROW, np.int32)
    token_ids_T[first_R[count_R > 0]] = old.token_ids_T[count_R > 0]
    parts = (old.columns_RC.ravel(), token_ids_T, old.update_index_U, old.update_block_U)
    return replace(
        batch,
        buffer=np.concatenate(parts),
        layout=replace(batch.layout, num_tokens=len(token_ids_T)),
        chunks=[replace(chunk, first_token=int(first_R[chunk.place])) for chunk in batch.chunks],
    )


def _joined(*updates: tuple[np.ndarray, np.ndarray] | None) -> tuple[np.ndarray, np.ndarray] | None:
    found = [each for each in updates if each is not None]
    if len(found) < 2:
        return found[0] if found else None
    index, block = zip(*found, strict=True)
    return np.concatenate(index), np.concatenate(block)
