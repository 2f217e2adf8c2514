"""Items of prompts as a feature of the step, whatever encodes them: embeddings in the slab replace those of placeholder tokens.

A feature with an encoder derives from `ItemEmbeddings` and `ItemsOnHost`, and has a program that writes results into the slab.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.device_ops import DeviceOp, EncodeItem, UseItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.request import PromptItem
from jaxllm.runner.batch import Batch, Chunk
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.step_feature import StepFeature, StepRun

COMMON_TOKENS = 2048
"""Programs of at most so many tokens are made for items at the start, larger ones later."""
SLAB_ROW = 0
"""Index in the values of a token: 1 + its row of the slab; 0: the token keeps its own embedding."""


class ItemEmbeddings(StepFeature):
    """The slab: embeddings [rows, result_width] of each data-parallel rank, in pages that the scheduler gives to items.

    Programs that compute tokens up to the end of a prompt's last item take the row of the slab of each token.
    """

    sizes: EncoderSizes
    dtype: str

    is_optional = True
    is_in_decodes = False
    num_token_inputs = SLAB_ROW + 1

    @property
    def result_width(self) -> int:
        """Values of a row of the slab."""
        raise NotImplementedError

    @property
    def slab_shape(self) -> tuple[int, int]:
        return self.sizes.num_pages * self.sizes.page_embeddings, self.result_width

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        return {self.name: jax.ShapeDtypeStruct(self.slab_shape, jnp.dtype(self.dtype))}

    def is_needed(self, columns_RC: np.ndarray, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.row.data.items and chunk.start < chunk.row.data.items[-1].end for chunk in chunks)

    def computes(self, items: Sequence[PromptItem]) -> bool:
        return bool(items)

    def is_common(self, num_tokens: int) -> bool:
        return num_tokens <= COMMON_TOKENS

    def before(self, run: StepRun) -> None:
        row_T = run.token_inputs[self.name][SLAB_ROW] - 1
        run.step.is_given_T = row_T >= 0
        self.give(run, run.rows.of_features[self.name][jnp.maximum(row_T, 0)])

    def give(self, run: StepRun, found_TX: jax.Array) -> None:
        """Put what the slab has for each token into the step."""
        run.step.given_TD = found_TX


class ItemsOnHost(OpRunner):
    """Has the items of a plan encoded before its step, and maps the step's tokens to their embeddings. What waits to be encoded is a
    subclass's."""

    ops: tuple[type[DeviceOp], ...] = (EncodeItem, UseItem)

    def __init__(self, runner: Any, feature: ItemEmbeddings):
        self._runner, self._feature = runner, feature
        self._pages: dict[tuple[str, int], Sequence[int]] = {}
        """Pages of the items whose tokens the next step computes, by request and position."""

    def run(self, op: Any) -> None:
        if isinstance(op, UseItem):
            self._pages[op.request_id, op.position] = op.pages
        else:
            self.add(op)

    def before_step(self, batches: Sequence[Batch]) -> None:
        self.encode()
        self.forget()
        for batch in batches:
            inputs_IT = self._runner.shapes.inputs.token_inputs_of(batch, self._feature.name)
            if inputs_IT is not None:
                for chunk in batch.chunks:
                    if chunk.row.data.items:
                        self.fill(inputs_IT[:, chunk.first_token : chunk.first_token + chunk.count], chunk)
        self._pages.clear()

    def replace_lost(self) -> None:
        """Forget what waits for a step that does not come. The slab is one of the rows' arrays."""
        self._pages.clear()
        self.forget()

    def add(self, op: Any) -> None:
        """Keep what an operation brings until the next step."""
        raise NotImplementedError

    def encode(self) -> None:
        """Start to encode all that waits, of all ranks at the same time."""
        raise NotImplementedError

    def forget(self) -> None:
        """Nothing waits any more."""
        raise NotImplementedError

    def fill(self, inputs_IT: np.ndarray, chunk: Chunk) -> None:
        """Set the values of the tokens of a chunk whose request has items."""
        page_embeddings = self._feature.sizes.page_embeddings
        for item, first, last in spans(chunk):
            index = embedding_of_tokens(item)
            rows = slab_rows(self._pages[chunk.row.data.request_id, item.position], page_embeddings, index.max() + 1)
            found = np.where(index < 0, 0, 1 + rows[index])
            inputs_IT[SLAB_ROW, first - chunk.start : last - chunk.start] = found[first - item.position : last - item.position]


def spans(chunk: Chunk) -> Iterator[tuple[PromptItem, int, int]]:
    """The items that have tokens in a chunk; from where to where, in the prompt, they are."""
    for item in chunk.row.data.items:
        first, last = max(item.position, chunk.start), min(item.end, chunk.stop)
        if first < last:
            yield item, first, last


def slab_rows(pages: Sequence[int], page_embeddings: int, count: int) -> np.ndarray:
    """int32[count]: the rows of embeddings that lie in these pages."""
    rows = np.asarray(pages, np.int32)[:, None] * page_embeddings + np.arange(page_embeddings, dtype=np.int32)
    assert count <= rows.size, f"{count} embeddings in {len(pages)} pages"
    return rows.reshape(-1)[:count]


def embedding_of_tokens(item: PromptItem) -> np.ndarray:
    """int32[num_tokens]: which of an item's embeddings stands in place of each of its tokens; -1: none."""
    if not item.embedding_runs:
        return np.arange(item.num_tokens, dtype=np.int32)
    found, first = np.full(item.num_tokens, -1, np.int32), 0
    for offset, count in item.embedding_runs:
        found[offset : offset + count] = np.arange(first, first + count)
        first += count
    return found
