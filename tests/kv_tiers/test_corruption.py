"""Bits that change in host memory at random, while many tokens are loaded from it: no token of an answer is wrong."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxllm.device_ops import FinishedCopy
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.request import Request
from tests.helpers.fake_copies import AlwaysWorth, Block, FakeCopies
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler

VOCAB, BLOCK, NUM_PROMPTS, PROMPT_TOKENS, NUM_OUTPUT = 50, 16, 12, 500, 2
NUM_LOADED_TOKENS = 150_000


class FlippingCopies(FakeCopies):
    """Changes bits of slots between copies. What comes back is judged by the checksum of devices, not by comparison."""

    num_flips = 0

    def finished(self) -> list[FinishedCopy]:
        if self.rng.random() < 0.1:
            index = self.rng.randrange(self.num_slots)
            content, stored = self.slots[index]
            if content != ["empty"]:
                changed = list(content)
                position = self.rng.randrange(len(changed))
                digest, group = changed[position]
                changed[position] = digest ^ 1 << self.rng.randrange(60), group
                self.slots[index] = changed, stored
                self.num_flips += 1
        return super().finished()

    def is_right(self, content: Block, stored: Block) -> bool:
        return checksum(content) == checksum(stored)


def checksum(content: Sequence[tuple[int, int]]) -> int:
    """As `jaxllm.runner.block_format.checksums` adds up words."""
    words = np.array([word for digest, group in content for word in (digest & 0xFFFFFFFF, digest >> 32, group)], np.uint64)
    return int(((words & 0xFFFFFFFF) * (2 * np.arange(len(words), dtype=np.uint64) + 1)).sum() & 0xFFFFFFFF)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_token_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    rng = random.Random(1)
    copies = FlippingCopies(rng, num_slots=NUM_PROMPTS * 33, num_staging=5, max_blocks=8)
    tier = HostTier(copies, AlwaysWorth(), num_cold=16)
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
    num_requests = 0
    while tier._loads.num_loaded * BLOCK < NUM_LOADED_TOKENS:
        while len(live) < 4:
            number = rng.randrange(NUM_PROMPTS)
            num_requests += 1
            request = make_request(f"r{num_requests}", prompts[number], max_tokens=NUM_OUTPUT)
            scheduler.add_request(request)
            live.append((number, request))
        engine.dispatch()
        engine.collect()
        engine.plans.clear()
        for number, request in live:
            if request.status.is_finished:
                assert request.output_token_ids == wanted[number]
        live = [each for each in live if not each[1].status.is_finished]
    assert copies.num_flips > 150 and tier._loads.num_damaged > 45
