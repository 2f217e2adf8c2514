"""An engine serves once few programs are ready; they stand in for the others until those are compiled."""

import logging
import threading

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.runner.split_program import Lowered
from jaxllm.runner.step_programs import StepPrograms
from jaxllm.sampling.variants import Variant
from tests.helpers import engines, goldens

pytestmark = pytest.mark.slow

NAME = "llama_gqa"


class Gate:
    """Lets the programs that a start need not wait for be compiled one by one."""

    def __init__(self):
        self.permits = threading.Semaphore(0)
        self.first: set = set()

    def lowered(self, key, program: Lowered) -> Lowered:
        return program if key in self.first else _Gated(program, self.permits)


class _Gated:
    def __init__(self, program: Lowered, permits: threading.Semaphore):
        self._program, self._permits = program, permits

    def compile(self, **options):
        assert self._permits.acquire(timeout=120)
        return self._program.compile(**options)


def make_core(**options) -> EngineCore:
    model = str(goldens.golden(NAME).directory)
    sizes = {"token_buckets": (16, 112), "num_gpu_blocks_override": 60}
    config = EngineConfig.from_options(**{**engines.SMALL, **sizes, "model": model, "warmup": "background", **options})
    return EngineCore(config)


@pytest.fixture
def gate(monkeypatch):
    gate, lower = Gate(), StepPrograms.lower

    def gated(self, key):
        gate.first = gate.first or set(self.first_keys())
        return gate.lowered(key, lower(self, key))

    monkeypatch.setattr(StepPrograms, "lower", gated)
    yield gate
    gate.permits.release(1000)


def test_tokens_do_not_depend_on_which_programs_are_ready(gate, caplog):
    """Programs that a request needs are made next, before all others."""
    caplog.set_level(logging.INFO, logger="jaxllm")
    core = make_core(compile_threads=2, decode_buckets=(1, 4))
    try:
        programs, golden = core.runner.programs, goldens.golden(NAME).results
        assert len(programs) == len(gate.first) < len(core.runner.shapes.start_keys())
        assert f"{len(programs)} programs compiled and 0 loaded, {programs.num_queued} follow in the background" in caplog.text
        used, get = [], programs.get
        programs.get = lambda key: (used.append(key), get(key))[1]

        def answers(after_step=lambda step, answers: None):
            requests = [engines.request(str(i), golden[i].prompt, max_tokens=20) for i in range(3)]
            requests.append(engines.request("random", golden[0].prompt, max_tokens=30, temperature=0.9, seed=5))
            return {name: answer.tokens for name, answer in engines.run(core, requests, after_step=after_step).items()}

        expected = {str(i): golden[i].tokens[:20] for i in range(3)}
        while_few = answers()
        assert set(used) <= gate.first and {key.variant for key in used if key.kind == "decode"} == {Variant.RANDOM}
        penalised = engines.request("a", [1, 2, 3], max_tokens=3, repetition_penalty=1.2, logprobs=2, prompt_logprobs=0)
        core.add_request(penalised)
        (foreseen,) = core.needed_programs._waiting.values()
        assert set(foreseen.awaited) == {"sample 4 full top", "new_state", "admit"}
        core.abort_requests(["a"])
        wanted = {("prompt_logprobs", 16), ("prompt_logprobs", 112)}
        assert {(key.kind, key.size) for key in list(programs._later)[: len(wanted)]} == wanted
        while_they_come = answers(lambda step, answers: gate.permits.release())
        gate.permits.release(1000)
        core.finish_compiling()
        used.clear()
        when_all_are_ready = answers()
        assert {(key.size, key.variant) for key in used if key.kind == "decode"} == {(4, Variant.RANDOM), (1, Variant.RANDOM)}
        assert while_few == while_they_come == when_all_are_ready == {**expected, "random": while_few["random"]}
        assert core.num_compiled_after_warmup == 0, "no request waited"
        assert f"all {len(programs)} programs are ready" in caplog.text and not programs.num_queued
        assert not core.runner._never_run, "programs that came later ran on empty steps too"
    finally:
        core.shutdown()
