"""Items of prompts without a model: the device that encodes them, which checks each embedding that a step reads.

The embedding of an item's token is a number that depends on the item's content and the token's place in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.device_ops import CopyBlocks, DeviceOp, EncodeItem, EncodeParts, UseItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.model_config import ModelConfig
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler.encoder_cache import EncoderCache

PLACEHOLDER = 0
"""The token that stands where an item does."""
PAGE = 4
"""Embeddings of a page."""
NUM_LAYERS = 5
"""Most parts that an item is encoded in."""


def encoder(
    *, item: int = 8, step: int = 8, pages: int = 8, decode_step: int = 0, least: int = 0, **options: Any
) -> EncoderCache:
    """An encoder cache whose patches are embeddings. item: most of them in an item. step: most that a step encodes. pages: of PAGE each.
    decode_step: most that a step encodes in which requests decode; 0: as in others. least: patches
    that an item counts at least."""
    programs = (*(size for size in (2, 4, 8, 16) if size < item), item)
    sizes = EncoderSizes(1, item, step, pages, PAGE, decode_step, programs, NUM_LAYERS, min_item_patches=least)
    return EncoderCache(sizes, **options)


def image(content: bytes, position: int, num_tokens: int, *, has_breaks: bool = False) -> PromptItem:
    """An item; its payload is the number of its embeddings and the content. has_breaks: every third of its tokens keeps its id."""
    runs = [(start, min(2, num_tokens - start)) for start in range(0, num_tokens, 3)] if has_breaks else [(0, num_tokens)]
    payload = bytes([sum(count for _, count in runs)]) + content
    own_runs = tuple(runs) if has_breaks else ()
    return PromptItem("image", bytes([num_tokens]) + payload, position, num_tokens, payload, embedding_runs=own_runs)


def embedded(item: PromptItem) -> list[int]:
    """The positions of the prompt where an embedding of the item stands."""
    runs = item.embedding_runs or ((0, item.num_tokens),)
    return [item.position + start + offset for start, count in runs for offset in range(count)]


class ItemToken(NamedTuple):
    request_id: str
    position: int
    """The position of the item."""
    offset: int
    """Among the item's embeddings."""
    end: int
    """Behind the item."""


def embeddings(payload: bytes) -> list[int]:
    """Fake embeddings of an item, one integer for each of its tokens."""
    return [1000 + 97 * offset + sum(payload) * 7919 % 1009 for offset in range(payload[0])]


def effective_prompt(prompt: Sequence[int], items: Sequence[PromptItem]) -> list[int]:
    """The prompt with embeddings in place of placeholder tokens."""
    found = list(prompt)
    for item in items:
        for position, embedding in zip(embedded(item), embeddings(item.payload), strict=True):
            found[position] = embedding
    return found


@dataclass
class FakeDevice:
    """Runs the ops of plans."""

    requests: dict[str, Request] = field(default_factory=dict)
    """Requests with items, by which it knows what is right."""
    slab: dict[int, list[int]] = field(default_factory=dict)
    """Embeddings by page."""
    uses: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Pages of each item whose tokens the step computes, by request and position."""
    copies: Any = None
    """`FakeCopies` of blocks."""
    rank: int = 0
    whole_items: bool = False
    """Whether a step computes all that is left of an item."""
    begun: EncodeItem | None = None
    """The item that is encoded in parts."""
    num_done: int = 0
    """Its parts so far."""
    sizes: EncoderSizes = EncoderSizes(1, 0, 0, 0)
    step_costs: list[int] = field(default_factory=list)
    """Costs of the items and parts that the step encodes: see EncoderSizes."""
    num_encoded: int = 0

    def begin_step(self) -> None:
        """The operations of a step follow."""
        self.uses.clear()
        self.step_costs.clear()

    def check_costs(self) -> None:
        """Requests that decode do not wait for more than they may."""
        most = self.sizes.max_decode_patches
        assert not most or len(self.step_costs) < 2 or sum(self.step_costs) <= most, "the step encodes too much"

    def run(self, op: DeviceOp, memory: list[Any]) -> None:
        """Run an op. memory: of blocks."""
        match op:
            case EncodeItem():
                assert op.rank == self.rank and len(op.pages) == len({*op.pages}) == -(-op.payload[0] // PAGE)
                if self.sizes.num_parts(op.payload[0]) > 1:
                    self.begun, self.num_done = op, 0
                self._encode(op, op.num_parts)
            case EncodeParts():
                assert op.rank == self.rank and self.begun is not None, "no item is encoded in parts"
                self._encode(self.begun, op.num_parts)
            case UseItem():
                assert op.rank == self.rank
                self.uses[op.request_id, op.position] = op.pages
            case CopyBlocks():
                self.copies.run(op, memory)
            case _:
                op.copy(memory)  # type: ignore[attr-defined]

    def _encode(self, item: EncodeItem, num_parts: int) -> None:
        """Run parts of an item. Its embeddings are there with the last one; before, its pages have nothing."""
        num_patches, found = item.payload[0], embeddings(item.payload)
        most = self.sizes.num_parts(num_patches)
        self.step_costs += [self.sizes.part_cost(num_patches)] * num_parts
        num_done = num_parts
        if item is self.begun:
            self.num_done = num_done = self.num_done + num_parts
        assert 0 < num_parts <= num_done <= most, "an item has other parts"
        for number, page in enumerate(item.pages):
            self.slab[page] = found[number * PAGE : (number + 1) * PAGE] if num_done == most else [-1] * PAGE
        if num_done == most:
            self.num_encoded += 1
            self.begun = None if item is self.begun else self.begun

    def items_of(self, request_id: str, items: Sequence[PromptItem], token_ids: list[int]) -> dict[int, ItemToken]:
        """Tokens of items in a request's prompt, by position. Writes their embeddings into `token_ids`."""
        request = self.requests.get(request_id)
        if request is None:
            assert not items
            return {}
        own = request.spec.items
        assert [(item.position, item.num_tokens, item.content_hash, item.payload) for item in items] == [
            (item.position, item.num_tokens, item.content_hash, b"") for item in own
        ]
        token_ids[: request.num_prompt_tokens] = effective_prompt(request.spec.prompt_token_ids, own)
        return {
            position: ItemToken(request_id, item.position, offset, item.end)
            for item in own
            for offset, position in enumerate(embedded(item))
        }

    def check_embedding(self, token: ItemToken, right: int, chunk_end: int) -> None:
        """The device has the embedding of a token that is computed now, and with it the rest of its item if that must be."""
        page, offset = divmod(token.offset, PAGE)
        found = self.slab[self.uses[token.request_id, token.position][page]]
        assert found[offset] == right, "the page has another item"
        assert not self.whole_items or chunk_end >= token.end, "an item is cut"

    def start_over(self, failed: Iterable[DeviceOp] = ()) -> None:
        """Lose everything. failed: operations of steps whose results are lost."""
        self.slab.clear()
        self.uses.clear()
        self.begun = None
        if self.copies is not None:
            self.copies.start_over(failed)


class Items:
    """Makes an encoder cache for each scheduler of an engine."""

    in_steps = ()
    described: Mapping[str, Any] = {"pages": 4}

    def new_room(self) -> EncoderCache:
        """See jaxllm.engine.features.Items."""
        return encoder(pages=4)


def make_items(config: EngineConfig, model_config: ModelConfig) -> Items | None:
    """For engines that cache prefixes."""
    return Items() if config.cache.enable_prefix_caching else None
