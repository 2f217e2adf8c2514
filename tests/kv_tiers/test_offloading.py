"""Engines whose blocks leave for host memory and come back: the tokens are those of prompts that are computed alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.cache_events import CacheEvents
from jaxllm.device_ops import GatherBlocks
from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.errors import ConfigError
from jaxllm.kernel_policy import CPU
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.request import EngineCoreRequest
from jaxllm.routing.balancer import Balancer
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_hash import hashes_of
from tests.helpers import goldens, peft_files
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.engines import make_core
from tests.helpers.fake_copies import AlwaysWorth
from tests.helpers.slow import slow_except
from tests.speculative import checkpoints

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CASES: list[list[Any]] = [
    ["qwen3", {}],
    ["qwen3", {"kv_cache_dtype": "fp8"}],
    ["glm_moe_dsa", {"tensor_parallel_size": 2, "async_scheduling": False}],
    ["llama_gqa", {"speculative_config": NGRAM}],
    ["qwen2", {"tensor_parallel_size": 4, "async_scheduling": False}],  # more devices than KV heads
    ["qwen3", {"kv_offloading_write": "full"}],
    ["gpt_oss", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "block_size": 8}],
]
NUM_BLOCKS = 20


def make(name: str, **options: Any) -> EngineCore:
    """An engine with few blocks and a tier that loads whatever it can."""
    options = {"kv_offloading_size": 0.02, "num_gpu_blocks_override": NUM_BLOCKS, **options}
    core = make_core(name, shares_programs=True, **options)
    tier_of(core)._worth, tier_of(core)._min_tokens = AlwaysWorth(), 1
    return core


def tier_of(core: EngineCore) -> HostTier:
    """The tier of an engine."""
    (tier,) = core.scheduler.cache_manager.loading.tiers
    assert isinstance(tier, HostTier)
    return tier


def expected(name: str, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """The tokens of an engine without a tier that computes each prompt alone and whole."""
    of_tier = {"kv_offloading_write": "cold"}
    core = make_core(name, shares_programs=True, **{"num_gpu_blocks_override": NUM_BLOCKS, **options, **of_tier})
    tokens = []
    for prompt in prompts:
        core.reset_prefix_cache()
        tokens += Client(core, [prompt]).run()
    core.shutdown()
    return tokens


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES), ids=str)
def test_tokens_are_those_without_a_tier(case: list[Any]) -> None:
    name, options = case
    prompts = make_prompts(8)
    wanted = expected(name, prompts, **options)
    core = make(name, **options)
    client = Client(core, prompts)
    for _ in range(4):
        assert client.run() == wanted
    stats = core.stats()
    assert stats.num_stored_blocks > NUM_BLOCKS and stats.num_loaded_blocks > NUM_BLOCKS and not stats.num_damaged_blocks
    assert 16 * NUM_BLOCKS < stats.external_prefix_cache_hits < stats.external_prefix_cache_queries
    assert stats.external_prefix_cache_hits <= stats.prefix_cache_hits + stats.resumed_prefix_cache_hits
    core.check_integrity()
    core.shutdown()


@pytest.mark.slow
def test_devices_that_split_the_tokens_of_steps_load_blocks() -> None:
    prompts = make_prompts(8)
    wanted = expected("llama_gqa", prompts)
    policy = replace(CPU, min_shared_tokens=16)  # steps of the tiny model are shared out too
    core = make("llama_gqa", kernel_policy=policy, prefill_context_parallel_size=2, block_size=8)
    client = Client(core, prompts)
    for _ in range(3):
        assert client.run() == wanted
    assert core.stats().num_loaded_blocks > NUM_BLOCKS and not core.stats().num_damaged_blocks
    core.shutdown()


@pytest.mark.slow
def test_balancers_know_what_host_memory_has() -> None:
    prompts = make_prompts(8)
    core = make("qwen3")
    balancer = Balancer(2, block_size=16, max_num_seqs=4)
    for replica in range(2):
        balancer.set_up(replica)
    core.publish_cache_events()
    client = Client(core, prompts)
    for _ in range(2):
        client.run()
        sent = msgspec.msgpack.encode(core.take_cache_events())
        balancer.note_events(1, msgspec.msgpack.decode(sent, type=CacheEvents))
    pool, tier = core.scheduler.cache_manager.pool, tier_of(core)
    num_in_host = 0
    for prompt in prompts:
        request = EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=1))
        hashes = list(hashes_of(prompt, 16, "sha256", {}))
        found = balancer._cached_of(request)
        assert found is not None and found.on_devices[0] == found.in_host[0] == 0
        on_devices = len(list(itertools.takewhile(pool.is_cached, hashes)))
        anywhere = len(list(itertools.takewhile(lambda name: pool.is_cached(name) or tier.is_in_host(name), hashes)))
        assert (found.on_devices[1], found.in_host[1]) == (16 * on_devices, 16 * (anywhere - on_devices))
        num_in_host += anywhere - on_devices
    assert num_in_host > 5
    assert core.cache_snapshot().with_host is not None
    core.shutdown()


@pytest.fixture(scope="module")
def shared() -> Any:
    """An engine for several tests, the prompts and their tokens."""
    prompts = make_prompts(6, seed=1)
    wanted = expected("qwen3", prompts)
    core = make("qwen3")
    yield core, prompts, wanted
    core.shutdown()


@pytest.mark.slow
def test_preempted_requests_load_their_blocks(shared: Any) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts)
    client.run()
    before = core.stats()
    ids = client.send()
    for _ in range(6):
        client.take(core.step())
    for request in list(core.scheduler.running):
        core.hold_requests([request.request_id])
        core.release_requests([request.request_id])
    while core.has_unfinished_requests():
        client.take(core.step())
    assert [client.received[name] for name in ids] == wanted
    assert core.stats().num_loaded_blocks > before.num_loaded_blocks


@pytest.mark.slow
def test_salts_are_kept_apart_in_host_memory(shared: Any) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts[1:3])  # without a common beginning
    for salt, is_found in (("a", False), ("a", True), ("b", False), ("a", True)):
        filler = Client(core, make_prompts(4, seed=9))
        filler.run(cache_salt=f"filler {client.num_sent}")
        assert client.run(cache_salt=salt) == wanted[1:3]
        assert [count > 0 for count in list(client.num_cached.values())[-2:]] == [is_found] * 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bits", "another block"])
def test_damaged_contents_are_computed_again(shared: Any, damage: str) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts)
    client.run()
    words, before = core.runner.op_runner(GatherBlocks).arena.words, core.stats()
    if damage == "bits":
        words[::2] ^= np.random.default_rng(0).integers(0, 2**32, words[::2].shape, np.uint32)
    else:
        words[:] = np.roll(words, 1, axis=0)
    for _ in range(3):
        assert client.run() == wanted
    assert core.stats().num_damaged_blocks > before.num_damaged_blocks


@pytest.mark.slow
def test_a_failed_step_loses_no_request_and_no_right_content(shared: Any) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts)
    for _ in range(2):
        client.run()
    ids = client.send()
    for index in range(60):
        if index in (2, 5, 9):
            core.loop.start_over()
        client.take(core.step())
        core.scheduler.check_integrity()
    while core.has_unfinished_requests():
        client.take(core.step())
    assert [client.received[name] for name in ids] == wanted
    contents = tier_of(core).contents
    ready = [content for content in contents._all() if content.is_ready]
    assert len(ready) > NUM_BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["op:2:oom", "op:5:oom", "kv.copy_out:1:error", "kv.verdict:2:error"])
def test_a_failed_copy_ends_no_request(fault: str) -> None:
    prompts = make_prompts(6, seed=1)
    core = make("qwen3")
    client = Client(core, prompts)
    wanted = client.run()

    def has_failed() -> bool:
        return core.stats().num_retried_steps == 1 if fault.startswith("op") else bool(core._failures._failure_times)

    with injected(fault):
        # How many blocks come back at a time, and so how often, depends on how busy the machine is.
        runs = itertools.takewhile(lambda _: not has_failed(), range(20))
        assert all(client.run() == wanted for _ in runs) and client.run() == wanted
    assert has_failed()
    tier_of(core).check_integrity()
    core.check_integrity()
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_prefixes_outlive_sleep_if_the_weights_do(shared: Any, level: int) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts)
    client.run()
    num_used = core.stats().num_used_host_slots
    assert num_used
    core.sleep(level)
    core.wake_up()
    assert core.stats().num_used_host_slots == (num_used if level == 1 else 0)
    loaded = core.stats().num_loaded_blocks
    assert client.run() == wanted
    assert level == 2 or core.stats().num_loaded_blocks > loaded


@pytest.mark.slow
def test_reset_drops_what_is_in_host_memory(shared: Any) -> None:
    core, prompts, wanted = shared
    client = Client(core, prompts)
    client.run()
    client.send()
    for _ in range(3):
        client.take(core.step())
    assert core.reset_prefix_cache(reset_running_requests=True)
    while core.has_unfinished_requests():
        client.take(core.step())
    assert core.reset_prefix_cache() and core.stats().num_used_host_slots == 0
    assert client.run() == wanted


@pytest.mark.slow
def test_adapters_with_other_files_have_other_blocks(tmp_path: Any) -> None:
    model = goldens.golden("llama_gqa").directory
    paths = [peft_files.write(tmp_path / name, model, seed=seed) for seed, name in enumerate(("a", "b"))]
    prompts = make_prompts(4, seed=2)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    rounds: list[list[list[list[int]]]] = []
    alone = make_core("llama_gqa", shares_programs=True, **options, num_gpu_blocks_override=NUM_BLOCKS)
    for core in (alone, make("llama_gqa", **options)):
        client = Client(core, prompts)
        for name, path in zip("ab", paths, strict=True):
            number = core.add_adapter(name, str(path))
            while core.adapter_state(number).state == "loading":
                pass
        rounds.append([client.run(adapter=adapter) for adapter in ("a", "b", None, "a", "b", None)])
        num_loaded = core.stats().num_loaded_blocks
        core.shutdown()
    assert rounds[0] == rounds[1] and rounds[0][0] != rounds[0][2] and num_loaded > 0


@pytest.mark.slow
def test_a_drafter_with_blocks_of_its_own_changes_no_token(tmp_path: Any) -> None:
    head = checkpoints.write(tmp_path / "head", checkpoints.CONFIG_3, checkpoints.head_tensors(is_third=True))
    prompts = make_prompts(8, seed=3)
    wanted = expected("llama_gqa", prompts)
    core = make("llama_gqa", speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    client = Client(core, prompts)
    for _ in range(3):
        assert client.run() == wanted
    assert core.stats().num_loaded_blocks > NUM_BLOCKS and core.stats().num_draft_tokens > 0
    core.shutdown()


DECODE = {"kv_role": "decode"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3_next", {}, "no prefix of it is kept in host memory; leave the option out, or set kv_role"),
        ("qwen3_next", {**DECODE, "kv_offloading_disk": "d", "kv_offloading_disk_size": 1.0}, "kv_offloading_disk would keep"),
        (
            "qwen3_next",
            {**DECODE, "kv_events_config": {"enable_kv_cache_events": True}},
            "prefill engines pass on whole prompts",
        ),
        ("qwen3_next", {**DECODE, "kv_offloading_write": "full"}, "kv_offloading_write would keep or tell prefixes"),
        ("qwen3_next", {"kv_role": "prefill", "enable_chunked_prefill": False}, "takes its states between two chunks"),
        ("qwen3", {"kv_offloading_size": 1e-6}, "less than a block"),
        ("qwen3", {"kv_offloading_size": 900_000.0}, "of memory are free"),
        ("qwen3", {"kv_offloading_size": 900_000.0, "data_parallel_size": 900_000}, "for 900000 engines together"),
        ("qwen3", {"kv_offloading_size": -1.0}, "must be at least 0"),
        ("qwen3", {"enable_prefix_caching": False}, "prefix caching, which is off"),
        ("qwen3", {"kv_offloading_size": float("nan")}, "is nan, must be at least 0"),
        ("qwen3", {"pipeline_parallel_size": 2}, "each stage has blocks of its own layers"),
        ("qwen3", {"tensor_parallel_size": 2, "nnodes": 2}, "nnodes 2, but the host memory of one host is used"),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}, "data-parallel ranks"),
    ],
)
def test_what_excludes_a_tier_is_said(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(name, **{"kv_offloading_size": 0.01, **options})
