"""Faults and ends of requests at every stage of loads and stores: what clients see, and that nothing is left behind."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.engine.failures import FailurePolicy
from jaxllm.engine.fault_points import Fault, injected
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.runner.features.block_copies.cuda_libraries import CudaError
from jaxllm.runner.features.block_copies.transfer import PlainTransfer
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.fake_copies import AlwaysWorth, FakeCopies
from tests.helpers.fake_runner import FakeEngine, oracle_tokens
from tests.helpers.scheduling import make_request, make_scheduler
from tests.kv_tiers.test_offloading import expected, make, tier_of

VOCAB = 50
PLACES = ["kv.match", "kv.gather", "kv.copy_out", "kv.copy_in", "kv.scatter", "kv.verdict"]
PROMPTS = make_prompts(6, seed=1)


class Errors(Client):
    """A client that also notes errors."""

    failed: set[str]

    def take(self, outputs: Sequence[EngineCoreOutput]) -> None:
        super().take(outputs)
        self.failed = {
            *getattr(self, "failed", ()),
            *(output.request_id for output in outputs if output.finish_reason is FinishReason.ERROR),
        }


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return expected("qwen3", PROMPTS)


def settle(core: EngineCore) -> None:
    """Wait for the copies under way; nothing may be left in use behind them."""
    tier = tier_of(core)
    for _ in range(200):
        if not (tier._gathering or tier._stored or tier._loads.copying):
            break
        core.loop.scheduler.wait_for_blocks(0.01)
        tier.wait(0.01)
        tier.begin_step(tier._step_id + 1, tier._step_id + 1)
    tier.check_integrity()
    assert len(tier._free_staging) == tier._copies.num_staging and not tier._loads.under_way
    assert not any(content.num_uses for content in tier.contents._all())
    core.check_integrity()


@pytest.mark.slow
def test_a_fault_ends_few_requests_and_leaves_nothing(wanted: list[list[int]]) -> None:
    core = make("qwen3")
    for place, kind in [*((place, "error") for place in PLACES), ("kv.gather", "oom"), ("kv.copy_in", "oom")]:
        check_fault(core, wanted, place, kind)
        core._failures = FailurePolicy()
    core.shutdown()


def check_fault(core: EngineCore, wanted: list[list[int]], place: str, kind: str) -> None:
    client, before = Errors(core, PROMPTS), core.stats()
    assert client.run() == wanted
    with injected(f"{place}:3:{kind}"):
        for _ in range(3):
            if place in ("kv.gather", "kv.copy_out"):  # or all that it could store is there already
                core.reset_prefix_cache(reset_external=True)
            ids = client.send()
            while core.has_unfinished_requests():
                client.take(core.step())
            for name, tokens in zip(ids, wanted, strict=True):
                assert client.received[name] == tokens[: len(client.received[name])]
                assert name in client.failed or client.received[name] == tokens
    # A plan that fails ends its request, or those of its step; memory that runs out, and what fails between steps, ends none.
    most = {"kv.match": 1, "kv.gather": len(PROMPTS), "kv.scatter": len(PROMPTS)}
    assert len(client.failed) <= (most.get(place, 0) if kind == "error" else 0)
    after = core.stats()
    assert after.num_retried_steps - before.num_retried_steps + after.num_lost_steps - before.num_lost_steps == 1, (place, kind)
    assert client.run() == wanted
    settle(core)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["kv.copy_in", "kv.verdict"])
def test_a_lost_device_ends_the_engine(place: str) -> None:
    core = make("qwen3")
    client = Client(core, PROMPTS)
    client.run()
    with injected(f"{place}:2:fatal"), pytest.raises(EngineDeadError, match="CUDA_ERROR"):
        for _ in range(3):
            client.run()
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_a_copy_that_cuda_refuses_ends_the_engine(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    core = make("qwen3")
    client = Client(core, PROMPTS)
    client.run()

    def fail(*args: Any) -> None:
        raise CudaError("cudaMemcpy2DAsync failed: cudaErrorIllegalAddress")

    monkeypatch.setattr(PlainTransfer, direction, fail)
    with pytest.raises(EngineDeadError, match="cudaMemcpy2DAsync failed"):
        for _ in range(3):
            client.run()
    core.shutdown()


@pytest.mark.slow
def test_bits_that_change_in_host_memory_change_no_token(wanted: list[list[int]]) -> None:
    core = make("qwen3")
    client = Client(core, PROMPTS)
    client.run()
    with injected("kv.copy_in:1-:corrupt"):
        for _ in range(4):
            assert client.run() == wanted
    assert core.stats().num_damaged_blocks > 4
    settle(core)
    core.shutdown()


def test_a_bit_changes_only_where_stored_bytes_are_read() -> None:
    with pytest.raises(ConfigError, match="use .*kv.copy_in"):
        Fault.parse("kv.copy_out:1:corrupt")


@pytest.mark.slow
def test_a_pause_during_loads_changes_nothing(wanted: list[list[int]]) -> None:
    core = make("qwen3")
    client = Client(core, PROMPTS)
    client.run()
    tier_of(core).patience_seconds = 0.2
    num_paused = 0
    for _ in range(3):
        ids = client.send()
        while core.has_unfinished_requests():
            client.take(core.step())
            if core.scheduler.cache_manager.loading.holders():
                core.pause("keep")
                tier_of(core).wait(0.005)
                core.resume()
                num_paused += 1
        assert [client.received[name] for name in ids] == wanted
    assert num_paused > 3 and not core.stats().num_damaged_blocks
    settle(core)
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 3])
def test_an_engine_stops_at_any_stage_of_loads(last: int, wanted: list[list[int]]) -> None:
    """By sleep, and at the end by a shutdown."""
    core = make("qwen3")
    client = Client(core, PROMPTS)
    client.run()
    for num_steps in (last + 1, 2 * last - 1, last):
        client.send()
        while not core.scheduler.cache_manager.loading.holders():
            client.take(core.step())
        for _ in range(num_steps):
            client.take(core.step())
        if num_steps != last:
            core.sleep(1)
            core.wake_up()
            assert client.run() == wanted
            settle(core)
    core.shutdown()


# With a fake device, where each copy is over at the next step


class Ready(random.Random):
    """Every copy is over at the next step."""

    def random(self) -> float:
        return 0.0


def engine_with(num_slots: int, **sizes: int) -> tuple[FakeEngine, HostTier]:
    """An engine whose pool has forgotten prompts 0 and 1."""
    copies = FakeCopies(Ready(1), num_slots=num_slots, **{"num_staging": 2, "max_blocks": 2, **sizes})
    copies.share_damaged = -1.0
    tier = HostTier(copies, AlwaysWorth(), num_cold=8)
    scheduler = make_scheduler(tiers=(tier,), block_size=4, num_blocks=21, max_model_len=48)
    engine = FakeEngine(scheduler, vocab_size=VOCAB)
    engine.runner.device.copies = copies
    for number in (0, 1, 5, 6, 7, 8):
        add(engine, f"{number} first")
        finish(engine)
    return engine, tier


def add(engine: FakeEngine, name: str) -> Request:
    request = make_request(name, [1 + int(name[0])] * 33, max_tokens=3)
    engine.scheduler.add_request(request)
    return request


def finish(engine: FakeEngine) -> None:
    """Step until every request has ended, and no copy is under way."""
    for _ in range(300):
        engine.step()
        if not engine.scheduler.has_requests() and not engine.in_flight:
            return
    raise AssertionError("a request never ends")


def check_free(engine: FakeEngine, tier: HostTier) -> None:
    tier.begin_step(tier._step_id + 1, tier._step_id + 1)
    tier.begin_step(tier._step_id + 1, tier._step_id + 1)
    tier.check_integrity()
    assert len(tier._free_staging) == tier._copies.num_staging and not tier._loads.under_way
    assert not any(content.num_uses for content in tier.contents._all())
    assert not engine.scheduler.holds_blocks


EVENTS = ["abort", "hold", "need of blocks", "reset", "start over"]


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("event", EVENTS)
def test_a_load_ends_at_any_stage(event: str, num_steps: int) -> None:
    engine, tier = engine_with(60)
    scheduler = engine.scheduler
    first, second = add(engine, "0 again"), add(engine, "0 too")
    for _ in range(num_steps):
        engine.step()
    if event == "abort":
        scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    elif event == "hold":
        scheduler.hold_requests([first.request_id])
    elif event == "need of blocks":
        scheduler.cache_manager.loading.end_latest()
    elif event == "reset":
        engine.in_flight.clear()
        scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        engine.start_over()
    scheduler.check_integrity()
    scheduler.release_requests([first.request_id])
    finish(engine)
    for request in [second] if event == "abort" else [first, second]:
        assert request.output_token_ids == oracle_tokens(request.spec.prompt_token_ids, 3, VOCAB)
    check_free(engine, tier)


def test_a_single_slot_serves() -> None:
    engine, tier = engine_with(1, num_staging=1)
    for number in (0, 1, 5, 0, 1, 5):
        request = add(engine, f"{number} again")
        finish(engine)
        assert request.output_token_ids == oracle_tokens(request.spec.prompt_token_ids, 3, VOCAB)
    check_free(engine, tier)


def test_slots_that_are_all_held_hold_up_no_request() -> None:
    engine, tier = engine_with(20)
    engine.scheduler.cache_manager.loading._patience_seconds = 0.0
    held = [content for content in tier.contents._all() if content.is_ready]
    assert len(held) == 20
    for content in held:
        tier.contents.hold(content)
    tier.check_integrity = lambda: None  # type: ignore[method-assign]  # it knows no holder
    for number in range(4):
        request = add(engine, f"{number} again")
        finish(engine)
        assert request.output_token_ids == oracle_tokens(request.spec.prompt_token_ids, 3, VOCAB)
    for content in held:
        tier.contents.release(content)
    del tier.check_integrity
    check_free(engine, tier)
