"""Adapters come and go under load in an engine with a tiny model: every request gets the tokens of its adapter, or its own error."""

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.device_ops import DeviceOp, WriteAdapter
from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.errors import AdapterNotFoundError
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.request_options import RequestOptions
from jaxllm.runner.features.adapters import Adapters
from tests.helpers import engines, goldens, peft_files
from tests.helpers.engines import Answer

pytestmark = pytest.mark.slow

MODEL = "llama_gqa"
PROMPTS = [result.prompt for result in goldens.golden(MODEL).results][:3]
NUM_TOKENS = 12
NUM_WEIGHTS = 5
TARGETS = ["o_proj", "down_proj"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of different adapters, of different ranks."""
    root, model = tmp_path_factory.mktemp("adapters"), goldens.golden(MODEL).directory
    ranks = (8, 3, 8, 1, 5)
    return [
        peft_files.write(root / str(seed), model, rank=ranks[seed], seed=seed, targets=TARGETS, strength=1.5)
        for seed in range(NUM_WEIGHTS)
    ]


@pytest.fixture(scope="module")
def shared_core() -> Iterator[EngineCore]:
    core = engines.make_core(
        MODEL,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_cpu_loras=3,
        lora_target_modules=TARGETS,
    )
    yield core
    core.shutdown()


@pytest.fixture
def core(shared_core: EngineCore) -> Iterator[EngineCore]:
    engines.renew(shared_core)
    yield shared_core
    for info in shared_core.list_adapters():
        shared_core.remove_adapter(info.name)
    shared_core.check_integrity()


def request(request_id: str, adapter: str | None, prompt: int = 0, **params: object) -> EngineCoreRequest:
    return replace(
        engines.request(request_id, PROMPTS[prompt], max_tokens=NUM_TOKENS, **params), options=RequestOptions(adapter=adapter)
    )


def add(core: EngineCore, name: str, directory: Path, *, replace: bool = False) -> str:
    """Add an adapter to an idle engine. Returns the error, if any."""
    number = core.add_adapter(name, str(directory), replace)
    while (state := core.adapter_state(number)).state == "loading":
        time.sleep(0.001)
    return state.error


@pytest.fixture(scope="module")
def alone(shared_core: EngineCore, weights: list[Path]) -> dict[tuple[int | None, int], list[int]]:
    """The tokens of each adapter and prompt when nothing else runs."""
    engines.renew(shared_core)
    found: dict[tuple[int | None, int], list[int]] = {}
    for value in (None, *range(NUM_WEIGHTS)):
        name = None if value is None else "only"
        if value is not None:
            assert add(shared_core, "only", weights[value]) == ""
        for prompt in range(len(PROMPTS)):
            found[value, prompt] = engines.run(shared_core, [request("r", name, prompt)])["r"].tokens
        if value is not None:
            shared_core.remove_adapter("only")
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    shared_core.check_integrity()
    return found


def wait_for_adapters(core: EngineCore) -> None:
    while core.adapters._new:  # type: ignore[union-attr]
        core.list_adapters()
        time.sleep(0.001)


class _Load:
    """A random series of events between the steps of an engine."""

    def __init__(self, core: EngineCore, weights: list[Path], seed: int):
        self.core, self.weights, self.rng = core, weights, random.Random(seed)
        self.values: dict[int, int] = {}
        """Which weights an adapter has, by its number."""
        self.asked: dict[str, tuple[int | None, int]] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        for name in "abcd":
            self.add(name)
        wait_for_adapters(core)

    def add(self, name: str) -> None:
        value = self.rng.randrange(NUM_WEIGHTS)
        self.values[self.core.add_adapter(name, str(self.weights[value]), True)] = value

    def event(self) -> None:
        rng, core = self.rng, self.core
        kind = rng.random()
        if kind < 0.5:
            self.ask()
        elif kind < 0.53:
            self.add(rng.choice("abcd"))
        elif kind < 0.54:
            core.remove_adapter(rng.choice("abcd"))
        elif kind < 0.57 and core.scheduler.requests:
            chosen = rng.choice(sorted(core.scheduler.requests))
            self.aborted.add(chosen)
            core.abort_requests([chosen])
        elif kind < 0.58:
            core.reset_prefix_cache(reset_running_requests=True)
            core.loop.forget()

    def ask(self) -> None:
        adapter, prompt = self.rng.choice([None, *"abcd"]), self.rng.randrange(len(PROMPTS))
        request_id = f"r{len(self.asked)}"
        with contextlib.suppress(AdapterNotFoundError):
            self.core.add_request(request(request_id, adapter, prompt))
            bound = self.core.scheduler.requests[request_id].adapter
            self.asked[request_id] = None if bound is None else self.values[bound.number], prompt  # type: ignore[attr-defined]
            self.answers[request_id] = Answer()

    def step(self) -> None:
        for output in self.core.step():
            if output.request_id not in self.aborted:
                self.answers[output.request_id].take(output)
        self.core.scheduler.check_integrity()
        self.core.adapters.check_integrity(self.core.scheduler.requests.values())  # type: ignore[union-attr]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.event()
            self.step()
        for _ in range(2000):
            if not self.core.has_unfinished_requests():
                break
            self.step()


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (1, ""),
        (
            2,
            "adapter.read:5:error,adapter.read:9-10:error,adapter.stage:3:error,adapter.stage:7:oom,op:4:error,op:9:oom",
        ),
        (
            3,
            "adapter.read:4-5:hang=0.05,adapter.stage:2-4:hang=0.02,op:6:oom,step:20:oom,result:60:error,launch:90:oom",
        ),
    ],
    ids=["no faults", "faults of loading", "slow loading and failed steps"],
)
def test_adapters_come_and_go_under_load(core, weights, alone, seed, faults):
    load, before = _Load(core, weights, seed), core.stats()
    with injected(faults):
        load.run(200)
    num_failed = 0
    for request_id, answer in load.answers.items():
        expected = alone[load.asked[request_id]]
        if request_id in load.aborted or answer.finish_reason is FinishReason.ERROR:
            assert answer.tokens == expected[: len(answer.tokens)]
            num_failed += answer.finish_reason is FinishReason.ERROR
            assert (
                request_id in load.aborted
                or answer.error_kind in (ErrorKind.ADAPTER, ErrorKind.INTERNAL)
                and answer.stop_reason
            )
        else:
            assert answer.tokens == expected, request_id
    wait_for_adapters(core)
    core.check_integrity()
    stats = core.stats()
    assert len(load.answers) > 60 and stats.num_adapter_evictions > before.num_adapter_evictions
    assert (num_failed > 0) == bool(faults) and num_failed < 30


def test_slots_whose_arrays_were_lost_are_made_anew_and_filled_again(core, weights, alone, monkeypatch):
    assert add(core, "a", weights[0]) == "" == add(core, "b", weights[1])
    assert engines.run(core, [request("a", "a")])["a"].tokens == alone[0, 0]
    run_op, runner = core.runner.run_op, core.runner

    def lose(op: DeviceOp) -> Any:
        if not isinstance(op, WriteAdapter):
            return run_op(op)
        monkeypatch.setattr(runner, "run_op", run_op)
        last = getattr(runner, "last", runner)
        for array in last.params[last.shapes.functions.get(Adapters).part]:
            array.delete()
        raise RuntimeError("a fault")

    monkeypatch.setattr(runner, "run_op", lose)
    answers = engines.run(core, [request("a", "a", 1), request("b", "b"), request("plain", None)])
    assert answers["b"].error_kind is ErrorKind.INTERNAL
    assert (answers["a"].tokens, answers["plain"].tokens) == (alone[0, 1], alone[None, 0])
    assert engines.run(core, [request("b", "b")])["b"].tokens == alone[1, 0]
    assert core.stats().num_retried_steps == 1


def test_adapters_survive_sleep_and_a_directory_that_is_gone(core, weights, alone, tmp_path):
    gone = shutil.copytree(weights[0], tmp_path / "gone")
    assert add(core, "gone", gone) == "" == add(core, "b", weights[1])

    def ask(*names: str) -> dict[str, Answer]:
        return engines.run(core, [request(name, name) for name in names])

    assert {name: answer.tokens for name, answer in ask("gone", "b").items()} == {"gone": alone[0, 0], "b": alone[1, 0]}
    num_loads = core.stats().num_adapter_loads
    shutil.rmtree(gone)
    for level, more in ((1, 0), (2, 2)):
        core.sleep(level)
        core.wake_up()
        assert {name: answer.tokens for name, answer in ask("gone", "b").items()} == {"gone": alone[0, 0], "b": alone[1, 0]}
        assert core.stats().num_adapter_loads == num_loads + more
    for value in (2, 3, 4):
        assert add(core, f"n{value}", weights[value]) == ""
        assert ask(f"n{value}")[f"n{value}"].tokens == alone[value, 0]
    answers = ask("gone", "b")
    assert answers["b"].tokens == alone[1, 0]
    assert answers["gone"].error_kind is ErrorKind.ADAPTER and "gone" in str(answers["gone"].stop_reason)
    infos = {info.name: info.where for info in core.list_adapters()}
    assert infos["gone"] == "disk" and infos["b"] == "device"
