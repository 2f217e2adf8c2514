"""Bits that change in host memory and files at random, while many tokens are loaded from there: no token of an answer is wrong.

`RANDOM_SCHEDULES=7 scripts/test -m slow -s tests/kv_tiers/test_corruption.py` loads a million tokens and prints what happened to them.
"""

import itertools
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from jaxllm.device_ops import CopyBlocks, FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.kv_tiers.disk.folder import open_root
from jaxllm.kv_tiers.disk.store import DiskStore
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.request import Request
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.fake_copies import AlwaysWorth, Block, FakeCopies
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler
from tests.kv_tiers.disk_engine import files
from tests.scheduler.test_random_schedules import TIMES

VOCAB, BLOCK, NUM_PROMPTS, PROMPT_TOKENS, NUM_OUTPUT = 50, 16, 12, 500, 2
NUM_LOADED_TOKENS = 150_000 * TIMES
NUM_SLOTS = 250
"""All prompts have 400 blocks, and the pool 100."""
SHARE_IN_MEMORY, SHARE_IN_FILES = 0.15, 0.03
"""Steps before which a bit changes."""


class ByteCopies(FakeCopies):
    """The SlotMemory of a store: slots have bytes, of which some change. What comes back is judged by the checksum of devices."""

    block_bytes = slot_bytes = BLOCK * 16

    def __init__(self, rng: random.Random):
        super().__init__(rng, num_slots=NUM_SLOTS, num_staging=5, max_blocks=8)
        self.words = np.zeros((NUM_SLOTS, BLOCK, 2), np.int64)
        self.sums = np.zeros((NUM_SLOTS, 1, 1), np.uint32)
        self.num_flips = 0

    def view(self, slot: int, count: int = 1) -> memoryview:
        return memoryview(self.words[slot : slot + count].reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def flip(self) -> None:
        """Change a bit of a content without any such: two in the highest bits of words would leave the device's checksum as it is."""
        slot = self.rng.randrange(self.num_slots)
        if checksum(self.words[slot]) != self.sums[slot, 0, 0]:
            return
        content = self.view(slot)
        content[self.rng.randrange(self.block_bytes)] ^= 1 << self.rng.randrange(8)
        self.num_flips += 1

    def _end(self, op: CopyBlocks) -> FinishedCopy:
        if isinstance(op, GatherBlocks):
            for slot, (content, _) in zip(op.slots, self.staging[op.staging], strict=True):
                self.words[slot] = content
                self.sums[slot] = checksum(self.words[slot])
        elif isinstance(op, LoadBlocks):
            self.slots = [([], [])] * self.num_slots
            for slot in op.slots:
                content = self.words[slot].copy()
                self.slots[slot] = [tuple(value) for value in content.tolist()], [checksum(content) == self.sums[slot, 0, 0]]
        return super()._end(op)

    def is_right(self, content: Block, stored: Block) -> bool:
        return bool(stored[0])


def checksum(words: np.ndarray) -> int:
    """As `jaxllm.runner.block_format.checksums` adds up words."""
    found = words.reshape(-1).view(np.uint32)
    return int((found * (2 * np.arange(len(found), dtype=np.uint32) + 1)).sum(dtype=np.uint32))


class Files:
    """A store of files in which bits change."""

    def __init__(self, root: Path, copies: ByteCopies):
        self.root, self.rng, self.num_flips = root, copies.rng, 0
        self.store = DiskStore(open_root(root), 1 << 30, copies, lambda: {"model": "a"}, copies.wake)

    def flip(self) -> None:
        """Change a bit of the content or the header of a file, or cut it short."""
        if not (found := sorted(files(self.root))):
            return
        path = self.rng.choice(found)
        with suppress(FileNotFoundError), path.open("r+b") as file:  # its thread may remove it just now, or begin to write it
            if not (size := os.fstat(file.fileno()).st_size):
                return
            self.num_flips += 1
            if self.rng.random() < 0.1:
                file.truncate(self.rng.randrange(size))
                return
            file.seek(position := self.rng.choice([self.rng.randrange(size), self.rng.randrange(200)]) % size)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_token_is_wrong(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("ERROR")
    rng = random.Random(1)
    copies = ByteCopies(rng)
    disk = Files(tmp_path / "kv", copies)
    tier = HostTier(copies, AlwaysWorth(), num_cold=16, stores=[disk.store], writes_at_once=True)
    scheduler = make_scheduler(
        tiers=(tier,), block_size=BLOCK, num_blocks=101, max_model_len=520, max_num_batched_tokens=600, max_num_seqs=3
    )
    check_integrity, num_checks = scheduler.check_integrity, itertools.count()
    scheduler.check_integrity = lambda: next(num_checks) % 20 or check_integrity()  # each time would take half of the test
    engine = FakeEngine(scheduler, vocab_size=VOCAB, depth=2)
    engine.runner.device.copies = copies
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    wanted = [oracle_tokens(prompt, NUM_OUTPUT, VOCAB) for prompt in prompts]
    live: list[tuple[int, Request]] = []
    tokens = Counter[str]()
    while tier._loads.num_loaded * BLOCK < NUM_LOADED_TOKENS:
        while len(live) < 4:
            number = rng.randrange(NUM_PROMPTS)
            tokens["requests"] += 1
            request = make_request(f"r{tokens['requests']}", prompts[number], max_tokens=NUM_OUTPUT)
            scheduler.add_request(request)
            live.append((number, request))
        for flip, share in ((copies.flip, SHARE_IN_MEMORY), (disk.flip, SHARE_IN_FILES)):
            if rng.random() < share:
                flip()
        engine.dispatch()
        if not engine.in_flight:
            time.sleep(0.0005)  # files are read meanwhile
        engine.collect()
        engine.plans.clear()
        for number, request in live:
            if request.status.is_finished:
                assert request.output_token_ids == wanted[number]
                tokens.update(request.loaded_tokens or {}, drawn=NUM_OUTPUT)
        live = [each for each in live if not each[1].status.is_finished]
    tier.close()
    stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0)
    tier.add_stats(stats)
    print(
        f"\nloaded {tier._loads.num_loaded * BLOCK} tokens, none wrong: {dict(tokens)}; bits changed {copies.num_flips} times in"
    )
    print(f"memory, {disk.num_flips} in files; noticed in {stats.num_damaged_blocks} blocks and {stats.num_bad_files} files")
    assert copies.num_flips > 150 and stats.num_damaged_blocks > 20
    assert tokens["disk"] > NUM_LOADED_TOKENS // 50 and stats.num_bad_files > 5
