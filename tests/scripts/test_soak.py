import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from scripts import soak
from scripts.soaking.kinds import KINDS, Kind, choose, whole
from scripts.soaking.processes import MemoryCurve, MemorySampler, processes_below, resident_bytes
from tests.helpers.fake_engine_core import fake_stats
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over a fake engine."""
    core = fake_core(write_tokenizer(tmp_path_factory.mktemp("served")), max_model_len=4096)
    core.stats = lambda: fake_stats(num_running=len(core.running))  # type: ignore[method-assign]
    with AsyncLLM(core=core) as engine, LiveServer.start(engine) as server:
        yield f"http://{server.host}:{server.port}"


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = soak.main(list(arguments))
    return code, json.loads(capsys.readouterr().out)


def test_a_good_server_passes_every_kind_of_request(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    watched = ["--pid", str(os.getpid()), "--output", str(output)]
    code, report = report_of(capsys, "soak", "--url", url, "--requests", "150", "--concurrency", "16", *watched)
    assert (code, report["faults"], report["passed"]) == (0, [], True)
    assert sum(report["requests"].values()) == 150 and len(report["requests"]) > 12
    assert report["memory"]["is_flat"] is None, "too few to judge"
    assert json.loads(output.read_text())["memory_samples"][0]["samples"]


@pytest.mark.parametrize(("mode", "num_left"), [("hold", 0), ("disconnect", 30)])
def test_streams_are_whole_whoever_leaves(url: str, capsys: pytest.CaptureFixture[str], mode: str, num_left: int) -> None:
    code, report = report_of(capsys, mode, "--url", url, "--requests", "60", "--tokens", "40")
    assert (code, report["left"], report["whole"]) == (0, num_left, 60 - num_left)


def test_a_wrong_answer_is_a_fault(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Kind(1, "/v1/models", whole, lambda asker: {})
    monkeypatch.setattr(soak, "KINDS", {"wrong": wrong})
    monkeypatch.setattr(soak, "choose", lambda rng, count: ["wrong"] * count)
    code, report = report_of(capsys, "soak", "--url", url, "--requests", "3")
    assert (code, report["num_faults"]) == (1, 3) and "405" in report["faults"][0]


def test_every_kind_comes_as_often_as_it_weighs() -> None:
    drawn = choose(random.Random(0), 10_000)
    total = sum(kind.weight for kind in KINDS.values())
    assert all(drawn.count(name) == pytest.approx(10_000 * kind.weight / total, rel=0.5) for name, kind in KINDS.items())


def test_memory_that_grows_after_it_settled_is_not_flat() -> None:
    mib = 1 << 20
    samples = [(float(done), done, (100 if done < 2000 else 105 + done // 1000) * mib) for done in range(0, 20_001, 50)]
    flat = [(float(done), done, (300 if done > 500 else 50) * mib) for done in range(0, 20_001, 50)]
    report = soak.memory_report(MemoryCurve({1: "grows", 2: "settles"}, {1: samples, 2: flat}), 20_000)
    assert [process["is_flat"] for process in report["processes"]] == [False, True] and report["is_flat"] is False


@pytest.mark.slow
def test_processes_are_found_with_their_children() -> None:
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert waiting.pid in processes_below(os.getpid())
        assert (resident_bytes(waiting.pid) or 0) > 0
        sampler = MemorySampler(os.getpid())
        sampler.sample(0.0)
        assert {os.getpid(), waiting.pid} <= set(sampler.curve.samples)
    finally:
        waiting.communicate()
    assert resident_bytes(waiting.pid) is None and waiting.pid not in processes_below(os.getpid())
