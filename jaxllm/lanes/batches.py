"""Brings the batches of lanes to one layout, because all lanes run the same program in a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.layout import FROM_ROW, Column, StepLayout, mixed_layout


def alike(batches: Sequence[Batch], builders: Sequence[BatchBuilder]) -> list[Batch]:
    """The same steps with the layout and the widths of the largest: of `decode` if that can run all of them, else of `forward`."""
    is_decode = all(batch.is_decode for batch in batches)
    if is_decode:
        layout = max((batch.layout for batch in batches), key=lambda layout: layout.num_rows)
    else:
        layout = _mixed(max(map(_num_tokens, batches)), builders[0])
    width, next_width = max(batch.width for batch in batches), max(batch.next_width for batch in batches)
    relaid = (_relaid(batch, builder, layout, is_decode) for batch, builder in zip(batches, builders, strict=True))
    return [replace(batch, width=width, next_width=next_width) for batch in relaid]


def _num_tokens(batch: Batch) -> int:
    return int(_counts(batch).sum()) if batch.is_decode else batch.layout.num_tokens


def _counts(batch: Batch) -> np.ndarray:
    """Tokens of each row."""
    return batch.layout.views(batch.buffer).columns_RC[:, Column.NUM_TOKENS]


def _mixed(num_tokens: int, builder: BatchBuilder) -> StepLayout:
    num_tokens = builder.buckets.fit_tokens(max(1, num_tokens))
    return mixed_layout(num_tokens, builder.buckets.rows_for_tokens(num_tokens), builder.block_size, builder.num_groups)


def _relaid(batch: Batch, builder: BatchBuilder, layout: StepLayout, is_decode: bool) -> Batch:
    """The same step in a layout that has room for it."""
    if batch.is_decode and not is_decode:
        batch = replace(_with_drafts_in_place(batch), sample_rows=builder.buckets.fit_sample(len(batch.sampled)))
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
