"""Engines whose blocks leave host memory for files: the tokens are those of engines with room for all, also in engines that start later."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.contents import Contents
from jaxllm.kv_tiers.disk.store import DiskStore
from jaxllm.outputs import EngineCoreOutput
from jaxllm.scheduler.block_hash import hashes_of
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.engines import make_core
from tests.helpers.slow import slow_except
from tests.helpers.waiting import wait_until
from tests.kv_tiers.disk_engine import files
from tests.kv_tiers.test_offloading import expected, make, tier_of

CASES: list[list[Any]] = [
    ["qwen3", {}],
    ["gpt_oss", {"num_gpu_blocks_override": 40}],
]
DISK = {"kv_offloading_size": 0.01, "kv_offloading_disk": "DIR", "kv_offloading_disk_size": 1.0}
FAULTS = ["kv.disk_read:1-5:corrupt", "kv.disk_write:2-9:corrupt", "kv.disk_read:1-:eio", "kv.disk_write:3:enospc"]
NUM_SLOTS = 24
"""In host memory: fewer than what the prompts need."""
FEWEST = 4
"""Files that are written and read in any case: how many depends on when writes are over."""


def make_with_disk(directory: Path, name: str = "qwen3", num_slots: int = NUM_SLOTS, **options: Any) -> EngineCore:
    """An engine with few blocks and slots, and files in this directory."""
    core = make(name, **{**DISK, "kv_offloading_disk": str(directory), **options})
    tier = tier_of(core)
    tier.contents = tier._stores._contents = tier._loads._contents = Contents(num_slots)
    tier._stores._num_cold = num_slots // 4
    wait_until(lambda: store_of(core)._folder is not None)
    return core


def store_of(core: EngineCore) -> DiskStore:
    (store,) = tier_of(core)._stores._stores
    assert isinstance(store, DiskStore)
    return store


def write_all(core: EngineCore, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """Run the prompts until much of them is in files."""
    client = Client(core, prompts)
    for _ in range(3):
        assert client.run() == wanted
        wait_until(lambda: store_of(core)._num_queued_writes == 0)


class CountingClient(Client):
    """Counts the loaded tokens by where they came from."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sources: Counter[str] = Counter()

    def take(self, outputs: Sequence[EngineCoreOutput]) -> None:
        super().take(outputs)
        for output in outputs:
            self.sources.update(output.loaded_tokens or {})


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES), ids=str)
def test_another_engine_reads_what_one_wrote_and_writes_the_same_tokens(case: list[Any], tmp_path: Path) -> None:
    name, options = case
    prompts = make_prompts(8)
    wanted = expected(name, prompts, **options)
    core = make_with_disk(tmp_path / "kv", name, **options)
    write_all(core, prompts, wanted)
    first = core.stats()
    assert first.num_disk_writes > FEWEST and not first.num_bad_files and not first.num_damaged_blocks
    assert any("." in path.name for path in files(tmp_path)), "blocks of such a model share files"
    core.check_integrity()
    core.shutdown()
    core = make_with_disk(tmp_path / "kv", name, 200, **options)
    client = CountingClient(core, prompts)
    assert client.run() == wanted
    second = core.stats()
    assert client.sources["disk"] > 0
    assert second.num_disk_reads > FEWEST and second.external_prefix_cache_hits > 0
    assert not second.num_bad_files and not second.num_damaged_blocks
    core.check_integrity()
    core.shutdown()


@pytest.mark.slow
def test_full_writes_files_while_nothing_leaves_the_devices(tmp_path: Path) -> None:
    prompts = make_prompts(3)
    wanted = expected("qwen3", prompts)
    options: dict[str, Any] = {"num_slots": 200, "num_gpu_blocks_override": 200, "kv_offloading_write": "full"}
    core = make_with_disk(tmp_path / "kv", **options)
    client = Client(core, prompts)
    assert client.run() == wanted and not tier_of(core).is_storing
    found = core.scheduler.cache_manager.pool.cached_hashes()
    assert store_of(core).known.files.keys() >= set(found), "steps come until all is written"
    assert core.stats().num_host_slots == 200 and core.stats().num_loaded_blocks == 0
    other = CountingClient(make_with_disk(tmp_path / "kv", **options), prompts)  # of an engine that runs at the same time
    assert other.run() == wanted and other.sources["disk"] > 16 * len(prompts)
    for level in (1, 2):
        core.sleep(level)
        assert not core.has_unfinished_requests()
        core.wake_up()
    assert client.run() == wanted
    describe, may_describe = store_of(core)._describe, threading.Event()
    store_of(core)._describe = lambda: may_describe.wait(60) and describe()
    assert core.reset_prefix_cache()
    Client(core, new := make_prompts(2, seed=3)).send()
    while core.scheduler.requests:
        core.step()
    may_describe.set()  # and only now the directory is opened again
    core.shutdown()
    names = [name for prompt in new for name in hashes_of(prompt, 16, "sha256", {})]
    assert store_of(core).known.files.keys() >= set(names), "the rest is stored before it ends"
    other.core.check_integrity()
    other.core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("qwen2", (4, 2), {}),
        ("qwen2", (2, 4), {}),
        ("qwen2", (2, 1), {"prefill_context_parallel_size": 2, "block_size": 8}),
    ],
)
def test_files_do_not_depend_on_how_many_devices_share_the_heads(
    name: str, sizes: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    prompts = make_prompts(8)
    wanted = expected(name, prompts)
    for size, is_first in zip(sizes, (True, False), strict=True):
        core = make_with_disk(tmp_path / "kv", name, NUM_SLOTS if is_first else 200, tensor_parallel_size=size, **options)
        if is_first:
            write_all(core, prompts, wanted)
        else:
            assert Client(core, prompts).run() == wanted
            stats = core.stats()
            assert stats.num_disk_reads > FEWEST and not stats.num_bad_files and not stats.num_damaged_blocks
        core.shutdown()


@pytest.mark.slow
def test_other_weights_find_nothing(tmp_path: Path) -> None:
    prompts = make_prompts(8)
    for seed in (1, 2, 1):
        core = make_with_disk(tmp_path / "kv", load_format="dummy", seed=seed)
        Client(core, prompts).run()
        Client(core, make_prompts(8, seed=5)).run()
        wait_until(lambda core=core: store_of(core)._num_queued_writes == 0)
        assert (core.stats().num_disk_writes > 0) and (seed == 2 or len(list((tmp_path / "kv").iterdir())) <= 4)
        core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["kv.disk_read:1-5:corrupt", "kv.disk_write:2-9:corrupt", "kv.disk_read:1-:eio", "kv.disk_write:3:enospc"]
)
def test_tokens_are_right_whatever_the_disk_does(fault: str, tmp_path: Path) -> None:
    prompts = make_prompts(8)
    wanted = expected("qwen3", prompts)
    with injected(fault):
        core = make_with_disk(tmp_path / "kv")
        write_all(core, prompts, wanted)
        first = core.stats()
        core.shutdown()
        core = make_with_disk(tmp_path / "kv")
        for _ in range(2):
            assert Client(core, prompts).run() == wanted
        stats = core.stats()
        assert fault.endswith("enospc") or first.num_bad_files + stats.num_bad_files > 0
        assert not first.num_damaged_blocks and not stats.num_damaged_blocks
        core.check_integrity()
        core.shutdown()


def test_a_reset_during_sleep_does_not_settle_which_weights_contents_are_of(tmp_path: Path) -> None:
    core = make_with_disk(tmp_path / "kv")
    core.sleep(2)
    assert core.reset_prefix_cache(reset_external=True)
    wait_until(lambda: store_of(core)._folder is not None)
    core.wake_up()
    assert store_of(core)._folder is None, "the weights are looked at again"
    core.shutdown()


@pytest.mark.slow
def test_sleep_keeps_files_and_a_reset_of_external_contents_does_not(tmp_path: Path) -> None:
    prompts = make_prompts(8)
    wanted = expected("qwen3", prompts)
    core = make_with_disk(tmp_path / "kv")
    write_all(core, prompts, wanted)
    for level in (1, 2):
        core.sleep(level)
        core.wake_up()
        before = core.stats().num_disk_reads
        store_of(core).find([b""])  # opens the directory again
        wait_until(lambda: store_of(core)._folder is not None)
        assert store_of(core).known.files
        write_all(core, prompts, wanted)
        assert core.stats().num_disk_reads > before
    assert core.reset_prefix_cache()
    store_of(core).find([b""])
    wait_until(lambda: store_of(core)._folder is not None)
    assert store_of(core).known.files
    assert core.reset_prefix_cache(reset_external=True)
    wait_until(lambda: store_of(core)._folder is not None)
    before = core.stats().num_disk_reads
    assert not store_of(core).known.files and Client(core, prompts[:1]).run() == wanted[:1]
    assert core.stats().num_disk_reads == before
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": None}, "by way of host memory, of which there is none; give kv_offloading_size too"),
        ({"kv_offloading_size": 0}, "by way of host memory, of which there is none; give kv_offloading_size too"),
        ({"kv_offloading_disk_size": None}, "kv_offloading_disk_size does not say how much it may hold"),
        ({"kv_offloading_disk": None}, "kv_offloading_disk names no directory"),
        ({"kv_offloading_disk": ""}, "kv_offloading_disk names no directory"),
        ({"kv_offloading_disk_size": 0.0}, "kv_offloading_disk_size.*must be above 0"),
        ({"kv_offloading_disk_size": -1.0}, "kv_offloading_disk_size.*must be above 0"),
        ({"kv_offloading_disk_size": 1e-6}, "too little for what is written at a time"),
        ({"kv_offloading_disk": "DIR/missing/kv"}, "is no directory; make it, or mount"),
        ({"kv_offloading_disk": "/proc/kv"}, "cannot be used"),
    ],
)
def test_what_a_disk_needs_is_said(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {
        name: value.replace("DIR", str(tmp_path)) if isinstance(value, str) else value
        for name, value in {**DISK, **options}.items()
    }
    with pytest.raises(ConfigError, match=message):
        make_core("qwen3", num_gpu_blocks_override=20, warmup="lazy", **given)
