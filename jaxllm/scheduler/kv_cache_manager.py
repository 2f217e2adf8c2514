"""Allocates the blocks that each request's tokens need, shares blocks with equal content, and frees them.

Layers form groups (`jaxllm.cache_spec`). A request has a block table for each group, all of the same length; the policy of a group
says which blocks have expired, and which a cached prefix must have. All groups take their blocks from one pool.
"""

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from jaxllm.cache_policy import FULL, CachePolicy, num_blocks_for
from jaxllm.config import CacheOptions
from jaxllm.request import Request
from jaxllm.scheduler.block import KVCacheBlock
from jaxllm.scheduler.block_hash import HASH_BYTES
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.cache_observer import CacheObserver
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler.loading import Loading
from jaxllm.scheduler.prefix_states import PrefixStates
from jaxllm.scheduler.store_filter import StoreFilter

_Lookups = list[tuple[CachePolicy, Callable[[bytes], bool]]]


class _GroupTable:
    """The blocks of one request in one group."""

    __slots__ = ("blocks", "num_expired")

    def __init__(self, blocks: list[KVCacheBlock], num_expired: int):
        self.blocks = blocks
        self.num_expired = num_expired
        """Number of leading blocks that the request no longer holds; in a cached prefix they are the null block."""

    @property
    def held(self) -> list[KVCacheBlock]:
        return self.blocks[self.num_expired :]


@dataclass(frozen=True)
class CachedPrefix:
    """The prefix of a request that is already in the prefix cache."""

    groups: Sequence[_GroupTable] = ()
    num_computed_tokens: int = 0
    """Tokens that need not be computed: at most all but the last, whose hidden state gives the next token."""
    num_cached_tokens: int = 0
    """Tokens in the blocks of the prefix."""
    state_ids: Sequence[int] = ()
    """Blocks with the states by row behind the prefix, for layers that have some. The request does not hold them."""
    num_matched_tokens: int = 0
    """Tokens in blocks that are cached, of prompts that begin the same way: more than those of the prefix if states are missing."""

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The blocks that the request will share, group by group."""
        return [block for group in self.groups for block in group.held]


NO_PREFIX = CachedPrefix()


class _BlockTable:
    """The blocks of one request in all groups."""

    __slots__ = ("groups", "num_slots", "num_shared", "num_published")

    def __init__(self, groups: list[_GroupTable]):
        self.groups = groups
        self.num_slots = 0
        """Tokens that the tables have room for."""
        self.num_shared = self.num_published = len(groups[0].blocks)
        """Number of leading blocks found in the prefix cache at admission, and of those found there or added to it."""


class KVCacheManager:
    """Block tables by request, on top of a `BlockPool`."""

    def __init__(
        self,
        options: CacheOptions,
        num_blocks: int,
        *,
        max_step_tokens: int,
        policies: Sequence[CachePolicy] = (FULL,),
        num_lookahead: int = 0,
        block_size: int | None = None,
        tiers: Sequence[CacheTier] = (),
        observer: CacheObserver | None = None,
        num_state_blocks: int = 0,
    ):
        """max_step_tokens: most tokens of a request that one step computes. policies: of each group. num_lookahead: slots that a
        request gets behind the tokens of a step that draws, up to its most tokens, for a drafter to write to. block_size: tokens of a
        block over all devices that split it; None: the option's. tiers: asked in this order for blocks that the pool does not have.
        observer: notified of the contents of the pool, which is empty at first. num_state_blocks: blocks that hold the states of a row, if
        layers have some, and requests continue prefixes only with their states."""
        self.block_size = block_size or options.block_size
        self.enable_prefix_caching = bool(options.enable_prefix_caching)
        self.pool = BlockPool(num_blocks)
        self.pool.observer = observer
        if observer is not None:
            observer.cleared()
        self.policies = tuple(policies)
        self._max_step_tokens = max_step_tokens
        self._num_lookahead = num_lookahead
        self._suffixes = [index.to_bytes(2, "little") if index else b"" for index in range(len(policies))]
        """Suffixes that distinguish the hashes of equal tokens in different groups."""
        self.states = PrefixStates(num_state_blocks, self.block_size)
        self._lookups = self._lookups_in(self.pool.is_cached)
        self._tables: dict[str, _BlockTable] = {}
        tiers = tiers if self.enable_prefix_caching else ()
        self._store_filter = StoreFilter.of(options, self.block_size) if tiers else None
        self.loading = Loading(
            self,
            tiers,
            self._store_filter,
            stores_cold=not num_state_blocks,
            stores_computed=options.kv_offloading_write == "full",
        )

    def _lookups_in(self, is_cached: Callable[[bytes], bool]) -> _Lookups:
        """For each policy, whether a block is there in all groups of that policy."""
        suffixes_of: dict[CachePolicy, list[bytes]] = {}
        for policy, suffix in zip(self.policies, self._suffixes, strict=True):
            suffixes_of.setdefault(policy, []).append(suffix)

        def in_all(suffixes: list[bytes]) -> Callable[[bytes], bool]:
            return is_cached if suffixes == [b""] else lambda name: all(is_cached(name + suffix) for suffix in suffixes)

        return [(policy, in_all(suffixes)) for policy, suffixes in suffixes_of.items()]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time."""
        return num_blocks_for(self.policies, num_tokens, self.block_size, self._max_step_tokens)

    def block_ids(self, request_id: str) -> list[int]:
        """The block tables of a request, one after the other, as a new list. They have equal lengths."""
        table = self._tables.get(request_id)
        return [block.block_id for group in table.groups for block in group.blocks] if table else []

    def num_blocks_of(self, request_id: str) -> int:
        """Number of blocks that a request holds."""
        table = self._tables.get(request_id)
        return sum(len(group.blocks) - group.num_expired for group in table.groups) if table else 0

    def reads_cache(self, request: Request) -> bool:
        """Whether the request is looked up in the prefix cache."""
        return self.enable_prefix_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """Find the longest cached prefix of full blocks that serves every group. Changes nothing.

        If it covers the whole request, the last token is recomputed while all blocks stay shared.
        """
        if not self.reads_cache(request):
            return NO_PREFIX
        names, num_matched = self._longest_prefix_of(request, self.pool.is_cached, self._lookups)
        states = map(self.pool.find, self.states.names(names))
        num_cached = len(names) * self.block_size
        num_computed = min(num_cached, request.num_tokens - 1)
        groups = []
        for policy, suffix in zip(self.policies, self._suffixes, strict=True):
            num_expired = policy.num_expired(num_computed, self.block_size)
            found = [block for name in names[num_expired:] if (block := self.pool.find(name + suffix)) is not None]
            groups.append(_GroupTable([self.pool.null_block] * num_expired + found, num_expired))
        state_ids = [block.block_id for block in states if block is not None]
        return CachedPrefix(groups, num_computed, num_cached, state_ids, num_matched * self.block_size)

    def absent_names(self, request: Request, num_blocks: int | None = None) -> list[bytes]:
        """The names of the first `num_blocks` full blocks of a request, by default of all, that the pool does not have, in all groups, and
        of its states."""
        hashes = self.states.hashes(request)[:num_blocks]
        return self.pool.missing((*self._in_all_groups(hashes), *self.states.names(hashes)))

    def _in_all_groups(self, names: Sequence[bytes]) -> Sequence[bytes]:
        return names if len(self._suffixes) == 1 else [name + suffix for name in names for suffix in self._suffixes]

    def names_of_prefix(self, request: Request, others: Container[bytes]) -> tuple[list[bytes], int]:
        """The names of the blocks of the longest prefix of which the pool has a part and `others` are the names of the rest. In the order
        of the sequence, with the number of its tokens."""

        is_cached = self.pool.is_cached

        def is_there(name: bytes) -> bool:
            return name in others or is_cached(name)

        names, _ = self._longest_prefix_of(request, is_there, self._lookups_in(is_there))
        return self._names_in_groups(names), len(names) * self.block_size

    def num_blocks_of_prompt(self, request: Request) -> int:
        """Blocks of each group behind which another engine continues a prompt."""
        num_tokens = self.states.position(request) if self.states.num_blocks else request.num_prompt_tokens
        return num_tokens // self.block_size

    def names_of_prompt(self, request: Request) -> list[bytes]:
        """The names, in all groups, that another engine needs to continue behind the full blocks of a prompt."""
        return self._names_in_groups(request.block_hashes[: self.num_blocks_of_prompt(request)])

    def _names_in_groups(self, names: Sequence[bytes]) -> list[bytes]:
        """The names of a prefix in all groups, but for blocks that have expired behind it. In the order of the sequence; those of states
        behind it come last."""
        # Without these, `longest_prefix` would not find it: computation continues at the last of its tokens, or behind it.
        expired = [policy.num_expired(len(names) * self.block_size - 1, self.block_size) for policy in self.policies]
        if len(expired) == 1:
            return [*names[expired[0] :], *self.states.names(names)]
        in_groups = [
            name + suffix
            for index, name in enumerate(names)
            for num_expired, suffix in zip(expired, self._suffixes, strict=True)
            if index >= num_expired
        ]
        return in_groups + self.states.names(names)

    def _longest_prefix_of(
        self, request: Request, is_there: Callable[[bytes], bool], lookups: _Lookups
    ) -> tuple[list[bytes], int]:
        """The hashes of a request's longest prefix that is there, with the states behind it if layers have some; and how many blocks are
        there whatever states are."""
        longest = self._longest_prefix(self.states.hashes(request), lookups)
        num_matched = len(longest)
        while (count := self.states.longest(longest, is_there)) < len(longest):
            longest = self._longest_prefix(longest[:count], lookups)
        return longest, num_matched

    def _longest_prefix(self, names: list[bytes], lookups: _Lookups) -> list[bytes]:
        """Cut the hashes of a request's blocks down to the longest prefix that is there."""
        while True:
            longest = names
            for policy, is_cached in lookups:
                longest = longest[: policy.longest_prefix(longest, is_cached, self.block_size)]
            if len(lookups) == 1 or len(longest) == len(names):
                return longest
            names = longest  # what one policy allows may be too long for another

    def first_unheld_hash(self, request: Request, prefix: CachedPrefix) -> bytes | None:
        """Hash of the first block of a request, after those it does not need, that no running request holds.

        Of the first group: a request that holds a block of a prompt also holds those before it, as far as they are needed.
        """
        if not self.reads_cache(request):
            return None
        first = prefix.groups[0]
        held = range(first.num_expired, len(first.blocks))
        index = next((index for index in held if first.blocks[index].ref_count == 0), len(first.blocks))
        return request.block_hashes[index] if index < len(request.block_hashes) else None

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: CachedPrefix = NO_PREFIX,
        *,
        num_reserved_blocks: int = 0,
        whole_sequence_must_fit: bool = False,
    ) -> list[int] | None:
        """Allocate blocks for the next `num_new_tokens` of a request. Its first allocation also takes `prefix`.

        Returns the ids of the new blocks (without those of the prefix): those of the first group, as many of the second, and so
        on. Returns None if there are too few free blocks for these tokens, or for all known tokens if the whole sequence must
        fit; then nothing is allocated. The reserved blocks always stay free. Frees the request's blocks that have expired. Slots
        for a drafter are given where blocks are left: what it cannot write only makes its drafts worse.
        """
        num_tokens = request.num_computed_tokens + prefix.num_computed_tokens + num_new_tokens
        table = self._tables.get(request.request_id)
        if table is not None and num_tokens + self._num_lookahead <= table.num_slots:
            # The fast path of nearly every decode: it runs for each request in each step.
            if len(request.block_hashes) > table.num_published:
                self._publish(request, table, num_tokens)
            return []
        if table is None:
            found = prefix.groups or [_GroupTable([], 0)] * len(self.policies)
            groups = [_GroupTable(group.blocks.copy(), group.num_expired) for group in found]
        else:
            self._free_expired(table, request.num_computed_tokens - request.num_drafts_in_flight)
            groups = table.groups
        num_held = len(groups[0].blocks)
        num_new = max(0, -(-num_tokens // self.block_size) - num_held)
        num_needed = num_new * len(groups)
        if whole_sequence_must_fit:
            num_in_use = sum(len(group.blocks) - group.num_expired for group in groups)
            num_needed = max(num_needed, self.num_blocks_for(request.num_tokens) - num_in_use)
        shared = prefix.blocks
        # An unused cached block leaves the free queue, just like a new one.
        num_needed += sum(block.ref_count == 0 for block in shared)
        num_spare = self.pool.num_free_blocks - num_reserved_blocks - num_needed
        if num_spare < 0:
            return None
        num_ahead = min(self._num_lookahead, request.max_num_tokens - 1 - num_tokens)
        if num_ahead > 0 and num_tokens >= request.num_tokens:
            wanted = -(-(num_tokens + num_ahead) // self.block_size) - num_held
            num_new = max(num_new, min(wanted, num_new + num_spare // len(groups)))
        if table is None:
            self.pool.touch(shared)
            if self._store_filter is not None:
                for group in groups:
                    self._store_filter.note_found(request, enumerate(group.blocks))
            table = self._tables[request.request_id] = _BlockTable(groups)
            request.num_found_blocks = min(request.num_found_blocks, table.num_shared)
            request.most_found_blocks = max(request.most_found_blocks, table.num_shared)
            self._store(request, shared)
        new_blocks = self.pool.allocate(num_new * len(groups))
        for index, group in enumerate(groups):
            group.blocks += new_blocks[index * num_new : (index + 1) * num_new]
        table.num_slots = len(groups[0].blocks) * self.block_size
        self._publish(request, table, num_tokens)
        return [block.block_id for block in new_blocks]

    def _free_expired(self, table: _BlockTable, num_computed_tokens: int) -> None:
        """Free the blocks that no token from position `num_computed_tokens` on reads.

        Steps in flight may still read them. That is safe: the device runs steps in order, and what is planned now runs later.
        """
        for policy, group in zip(self.policies, table.groups, strict=True):
            num_expired = policy.num_expired(num_computed_tokens, self.block_size)
            if num_expired > group.num_expired:
                expired = group.blocks[group.num_expired : num_expired]
                group.num_expired = num_expired
                self.pool.free(expired[::-1])

    def free(self, request: Request, num_valid_tokens: int) -> None:
        """Free all blocks of a request. Blocks filled by the first `num_valid_tokens` stay in the prefix cache.

        Steps in flight may still write these blocks. That is safe: the device runs steps in order, so the next owner of a block
        writes it later.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        self._publish(request, table, num_valid_tokens)
        first_wrong = max(table.num_shared, num_valid_tokens // self.block_size)
        if first_wrong < table.num_published:
            wrong = request.block_hashes[first_wrong : table.num_published]
            self.loading.discard([name + suffix for name in wrong for suffix in self._suffixes])
        for index in range(first_wrong, table.num_published):
            for group, suffix in zip(table.groups, self._suffixes, strict=True):
                # A block that has expired may have other contents by now.
                if group.blocks[index].block_hash == request.block_hashes[index] + suffix:
                    self.pool.forget(group.blocks[index])
        # The end of a sequence is the least likely to be reused: evict it first.
        ends = zip_longest(*(group.held[::-1] for group in table.groups))
        self.pool.free([block for block in chain.from_iterable(ends) if block is not None])

    def discard_computed(self, request: Request) -> None:
        """Find no content any more that a request computed, whoever has blocks of it now. The request may run, wait or have ended."""
        own = request.block_hashes[request.num_found_blocks :]
        self.discard([name + suffix for name in own for suffix in self._suffixes])
        self.discard_states(request)

    def discard_all(self, request: Request) -> None:
        """Find no content any more that a request read or computed, whoever computed it."""
        hashes = request.block_hashes
        names = [name + suffix for name in hashes for suffix in self._suffixes]
        self.discard([*names, *(name for each in hashes for name in self.states.names([each]))])

    def discard_states(self, request: Request) -> None:
        """Find no states any more that a request stored."""
        self.discard([name for position in request.stored_states for name in self.states.names_at(request, position)])

    def store_states(self, request: Request, position: int) -> list[KVCacheBlock]:
        """Take free blocks for the states of a request before its token at `position`, in which they are found until others take them.
        Returns none if the states are there, or too few blocks are free."""
        names = self.states.names_at(request, position)
        found = [block for name in names if (block := self.pool.find(name)) is not None]
        if len(found) == len(names):
            self.pool.renew(found)
            return []
        if len(names) > self.pool.num_free_blocks:
            return []
        for block in found:  # parts of states computed another time: all parts are to be of one
            self.pool.forget(block)
        blocks = self.pool.allocate(len(names))
        for block, name in zip(blocks, names, strict=True):
            self.pool.publish(block, name)
        self.pool.free(blocks[::-1])
        request.stored_states.add(position)
        return blocks

    def renew_states(self, request: Request, position: int) -> None:
        """States of a request are in use: have them evicted as late as what is free from now on."""
        self.pool.renew(
            [block for name in self.states.names_at(request, position) if (block := self.pool.find(name)) is not None]
        )

    def discard(self, names: Sequence[bytes]) -> None:
        """Find these contents no more, neither in the pool nor in tiers: they were computed wrongly."""
        for name in names:
            while (block := self.pool.find(name)) is not None:
                self.pool.forget(block)
        self.loading.discard(names)

    def _publish(self, request: Request, table: _BlockTable, num_tokens: int) -> None:
        """Add the blocks filled by the first `num_tokens` to the prefix cache, as far as their tokens are known."""
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        observer = self.pool.observer
        for index in range(table.num_published, num_full):
            for group, suffix in zip(table.groups, self._suffixes, strict=True):
                if index >= group.num_expired:
                    name, block = request.block_hashes[index] + suffix, group.blocks[index]
                    if self.pool.publish(block, name) and observer is not None:
                        observer.stored(name, request, index)
                    if self._store_filter is not None:
                        self._store_filter.note_computed(request, index, block)
        new = range(table.num_published, num_full)
        self._store(request, [group.blocks[index] for index in new for group in table.groups if index >= group.num_expired])
        table.num_published = max(table.num_published, num_full)

    def publish_loaded(self, request: Request, loaded: Iterable[tuple[KVCacheBlock, bytes]]) -> None:
        """Add blocks of a request that a tier has filled to the prefix cache, each with its name."""
        observer = self.pool.observer
        index_of = {} if observer is None else {name: index for index, name in enumerate(request.block_hashes)}
        for block, name in loaded:
            if self.pool.publish(block, name) and observer is not None:
                observer.stored(name, request, index_of[name[:HASH_BYTES]])

    def _store(self, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        """Store blocks of a request that it computed or found, if another engine continues it or tiers get all of them."""
        self.loading.note_computed(blocks)
        if request.is_kept_for_decode:
            self.loading.keeping.keep([block.block_hash for block in blocks if block.block_hash is not None])

    def reset_prefix_cache(self) -> bool:
        """Discard all cached content. Does nothing and returns False while any request holds blocks."""
        return self.pool.reset()

    def check_integrity(self, requests: Collection[Request], *, has_drafts: bool = False) -> None:
        """Raise AssertionError unless these requests have the tables, and blocks are shared only where content is equal.

        has_drafts: requests may hold slots for drafts that were wrong; their next tokens take them.
        """
        self.pool.check_integrity()
        assert self._tables.keys() == {request.request_id for request in requests}, "tables of requests that do not run"
        uses = [0] * len(self.pool.blocks)
        content: dict[int, tuple[int, bytes]] = {}
        for request in requests:
            table = self._tables[request.request_id]
            num_blocks, num_spare = len(table.groups[0].blocks), table.num_slots - request.num_computed_tokens
            assert table.num_slots == num_blocks * self.block_size, "slots differ from blocks"
            assert num_spare >= 0 and (num_spare < self.block_size or has_drafts), "blocks differ from tokens"
            assert table.num_shared <= table.num_published <= len(request.block_hashes), "published blocks of unknown content"
            held = [block.block_id for group in table.groups for block in group.held]
            assert len(set(held)) == len(held), "a block twice in the tables of one request"
            for policy, group, suffix in zip(self.policies, table.groups, self._suffixes, strict=True):
                assert len(group.blocks) == num_blocks, "a table has another length"
                num_expired = policy.num_expired(request.num_computed_tokens, self.block_size)
                assert group.num_expired <= num_expired, "a block was freed that the next token reads"
                for index in range(group.num_expired, num_blocks):
                    block = group.blocks[index]
                    uses[block.block_id] += 1
                    if index < table.num_published:
                        name = request.block_hashes[index] + suffix
                        # None if the content proved invalid after other requests had found it.
                        assert block.block_hash in (None, name), f"{block} is published under a wrong hash"
                        assert content.setdefault(block.block_id, (index, name)) == (index, name), f"{block} is shared wrongly"
                    else:
                        assert block.block_hash is None and block.ref_count == 1, f"{block} is shared before it is full"
        self.loading.check_integrity()
        for _, held_blocks in self.loading.holders():
            for block in held_blocks:
                uses[block.block_id] += 1
        assert uses == [block.ref_count for block in self.pool.blocks], "reference counts differ from the tables"
