"""Brings the batches of lanes to one layout, because all lanes run the same program in a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.layout import StepLayout, mixed_layout


def alike(batches: Sequence[Batch], builders: Sequence[BatchBuilder]) -> list[Batch]:
    """The same steps with the layout of the largest: of `decode` if that can run all of them, else of `forward`."""
    is_decode = all(batch.is_decode for batch in batches)
    if is_decode:
        layout = max((batch.layout for batch in batches), key=lambda layout: layout.num_rows)
    else:
        layout = _mixed(max(map(_num_tokens, batches)), builders[0])
    return [_relaid(batch, builder, layout, is_decode) for batch, builder in zip(batches, builders, strict=True)]


def _num_tokens(batch: Batch) -> int:
    return len(batch.sampled) if batch.is_decode else batch.layout.num_tokens


def _mixed(num_tokens: int, builder: BatchBuilder) -> StepLayout:
    num_tokens = builder.buckets.fit_tokens(max(1, num_tokens))
    return mixed_layout(num_tokens, builder.buckets.rows_for_tokens(num_tokens), builder.block_size, builder.num_groups)


def _relaid(batch: Batch, builder: BatchBuilder, layout: StepLayout, is_decode: bool) -> Batch:
    """The same step in a layout that has room for it. A step of `decode` has its tokens one after the other, as those of `forward`."""
    if batch.layout == layout:
        return replace(batch, is_decode=is_decode)
    buffer = builder.empty(layout)
    old, new = batch.layout.views(batch.buffer), layout.views(buffer)
    num_rows, num_tokens = min(len(old.columns_RC), layout.num_rows), min(len(old.token_ids_T), layout.num_tokens)
    new.columns_RC[:num_rows] = old.columns_RC[:num_rows]
    new.token_ids_T[:num_tokens] = old.token_ids_T[:num_tokens]
    is_update = old.update_index_U != np.iinfo(np.int32).max
    updates = old.update_index_U[is_update], old.update_block_U[is_update]
    beyond = builder.fill_updates(layout, buffer, *updates)
    assert beyond is None, "a larger layout has room for fewer blocks"
    return replace(batch, buffer=buffer, layout=layout, is_decode=is_decode)
