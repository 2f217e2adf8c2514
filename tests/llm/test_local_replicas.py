"""`LLM(data_parallel_size=2)` over fake cores in processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, EngineError
from jaxllm.replicas import processes
from jaxllm.replicas.local import LocalReplicas
from tests.helpers.served_core import FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.replicas.test_processes import SLOW_END


def test_two_replicas_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.01)
    model = str(write_tokenizer(tmp_path))
    config = EngineConfig.from_options(model=model, data_parallel_size=2, max_num_seqs=4, kv_offloading_size=8)
    core = LocalReplicas(config, core_factory=FACTORY)
    llm = LLM.from_config(config, core=core)
    try:
        endless = SamplingParams(max_tokens=30, ignore_eos=True)
        outputs = llm.generate([f"hi {number}" for number in range(40)], endless, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [30] * 40
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["jaxllm:generation_tokens"].value == 40 * 30  # type: ignore[attr-defined]
        assert llm.reset_prefix_cache() is True
        llm.sleep()
        assert llm.is_sleeping() is True
        with pytest.raises(EngineError, match="sleeps"):
            llm.generate("hi", endless, use_tqdm=False)
        llm.wake_up()
        assert len(llm.generate("hi", endless, use_tqdm=False)[0].outputs[0].token_ids) == 30
        slow = subprocess.Popen([sys.executable, "-c", SLOW_END], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert slow.stdout is not None and slow.stdout.readline()
        core._processes.append(slow)
    finally:
        core.shutdown()
    assert slow.returncode == 0, "it got the time to free its host memory"
    slow.stdout.close()
    assert not any(Path(f"/proc/{process.pid}").exists() for process in core._processes)


@pytest.mark.slow
def test_a_request_that_ends_its_replica_runs_once_more(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(write_tokenizer(tmp_path)), data_parallel_size=3, max_num_seqs=4)
    core = LocalReplicas(config, core_factory=FACTORY)
    llm = LLM.from_config(config, core=core)
    try:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        (_, output), *_ = llm.generate_iter("kill", params)
        assert output.outputs[0].finish_reason == "error" and "has ended" in str(output.outputs[0].stop_reason)
        assert [process.poll() for process in core._processes].count(-signal.SIGKILL) == 2
        assert len(llm.generate(["hi"] * 8, params, use_tqdm=False)) == 8, "the third goes on"
    finally:
        core.shutdown()


def test_a_replica_that_is_killed_leaves_the_others(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(write_tokenizer(tmp_path)), data_parallel_size=2, max_num_seqs=4)
    core = LocalReplicas(config, core_factory=FACTORY)
    llm = LLM.from_config(config, core=core)
    try:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        # At least two seconds: a busy machine may be late to see that both have answered.
        long = SamplingParams(max_tokens=4000, ignore_eos=True)
        found: dict[int, str | None] = {}
        answered = set()
        for index, output in llm.generate_iter(["hi"] * 8, long):
            answered.add(index)
            if len(answered) > 4 and core._processes[1].poll() is None:  # both have answered: what has not would run again
                os.kill(core._processes[1].pid, signal.SIGKILL)
            if output.finished:
                found[index] = output.outputs[0].finish_reason
        assert sorted(found) == list(range(8)) and set(found.values()) == {"length", "error"}
        assert len(llm.generate(["hi"] * 8, params, use_tqdm=False)) == 8, "the other goes on"
    finally:
        core.shutdown()


def test_processors_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(write_tokenizer(tmp_path)), data_parallel_size=2)
    with pytest.raises(ConfigError, match='name them as "module:Name"'):
        LocalReplicas(config, processors=[object()])
