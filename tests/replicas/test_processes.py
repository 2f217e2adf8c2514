"""The engine processes of a host."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import EngineDeadError
from jaxllm.replicas import processes
from jaxllm.replicas.processes import EngineProcesses

SLOW_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(0)))
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("size", "code", "again"), [(0, -9, False), (8, 0, False), (8, 0, True)])
def test_a_process_with_host_memory_for_blocks_gets_time_to_free_it(
    monkeypatch: pytest.MonkeyPatch, size: int, code: int, again: bool
) -> None:
    """again: before it would be started again."""
    monkeypatch.setattr(processes, "END_SECONDS", 0.01)
    start = EngineStart(EngineConfig.from_options(model="none", kv_offloading_size=size), "")
    stopping = asyncio.Event()
    stopping.set()
    engines = EngineProcesses(start, Path(), {0: {}}, stopping, client_index=0)
    with subprocess.Popen([sys.executable, "-c", SLOW_END], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        engines.each[0].process = process
        asyncio.run(engines.start_again(engines.each[0], EngineDeadError("it hangs")) if again else engines.end_all())
        assert process.returncode == code
