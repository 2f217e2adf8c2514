"""Memory that runs out while an engine takes what tiers need: the start ends with what was asked for and the way out, and holds nothing."""

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.device_ops import GatherBlocks
from jaxllm.engine.fault_points import injected
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError, OutOfMemoryError
from jaxllm.kv_tiers.workers import Workers, pair
from tests.helpers.core_client import Client, make_prompts
from tests.helpers.waiting import wait_until
from tests.kv_tiers.test_offloading import expected, make

STAGING = (
    r"the device has no memory for \d+ buffers of [\d.]+ MiB, through which blocks are copied to host memory and back "
    r"\(RESOURCE_EXHAUSTED: injected fault\); lower gpu_memory_utilization, or leave kv_offloading_size out$"
)


class Held:
    """The arrays, threads of tiers, and memory without a name of this process."""

    def __init__(self) -> None:
        gc.collect()
        self._arrays = set(map(id, jax.live_arrays()))
        self._switch_interval, self._before = sys.getswitchinterval(), self._others()

    @staticmethod
    def _others() -> tuple[list[str], int]:
        threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))
        return threads, sum("jaxllm-kv" in link for link in map(_link, Path("/proc/self/fd").iterdir()))

    def check(self) -> None:
        """Nothing more than before; threads end a little later."""
        assert all(id(array) in self._arrays or array.is_deleted() for array in jax.live_arrays())
        wait_until(lambda: self._others() == self._before, f"{self._others()}, not {self._before}", 5)
        assert sys.getswitchinterval() == self._switch_interval


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the folder itself
        return ""


@pytest.mark.slow
@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize(
    ("fault", "error", "told", "options"),
    [
        ("kv.staging:3:oom", OutOfMemoryError, STAGING, {}),
        (
            "kv.memory:1:enomem",
            ConfigError,
            r"kv_offloading_size is 0.02 GiB: the system gives no \d+ bytes \(injected fault\); lower it, or leave it out$",
            {"kv_role": "prefill", "kv_port": 0},
        ),
        (
            "kv.workers:5:enomem",
            OutOfMemoryError,
            r"the system has no memory or no threads for 2 threads kv-disk-write, each with \d+ bytes \(.*injected fault\); raise",
            {"kv_offloading_disk": "", "kv_offloading_disk_size": 1.0},
        ),
    ],
)
def test_a_start_without_memory_is_told_and_holds_nothing(
    tmp_path: Path, fault: str, error: type[JaxLLMError], told: str, options: dict[str, Any]
) -> None:
    if "kv_offloading_disk" in options:
        options = {**options, "kv_offloading_disk": str(tmp_path)}
    held = Held()
    with injected(fault), pytest.raises(error, match=told) as caught:
        make("qwen3", **options)
    held.check()  # though the error is still known
    assert caught.value.__cause__ is not None


@pytest.mark.slow
@pytest.mark.usefixtures("little_to_collect")
def test_an_engine_without_memory_to_wake_up_stays_asleep_and_one_that_starts_over_ends() -> None:
    prompts = make_prompts(4)
    wanted = expected("qwen3", prompts)
    held = Held()
    core = make("qwen3")
    client = Client(core, prompts)
    assert client.run() == wanted
    core.sleep(level=1)
    with injected("kv.staging:2:oom"), pytest.raises(OutOfMemoryError, match=f"the engine cannot wake up: {STAGING}"):
        core.wake_up()
    assert not core.runner.op_runner(GatherBlocks)._staging
    core.wake_up()
    assert client.run() == wanted
    client.send()
    with injected("step:1:error,kv.staging:2:oom"), pytest.raises(EngineDeadError, match=f"could not start over: {STAGING}"):
        while core.has_unfinished_requests():
            core.step()
    core.shutdown()
    held.check()


def test_threads_that_read_end_if_there_is_no_memory_for_those_that_write() -> None:
    with (
        injected("kv.workers:4:enomem"),
        pytest.raises(OutOfMemoryError, match="2 threads kv-test-write, each with 4096 bytes"),
    ):
        pair(lambda: Workers("kv-test-read", 2, 4096, 1.0), lambda: Workers("kv-test-write", 2, 4096, 1.0))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-test")]
