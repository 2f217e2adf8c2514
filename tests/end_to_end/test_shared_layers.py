"""Engines whose programs run in pieces, so that layers that are alike are compiled once, compute what transformers does."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.runner import runner, split_program
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.shared_layers import LAYER
from jaxllm.runner.split_program import SplitProgram
from tests.helpers import engines, goldens
from tests.helpers.parity import check

NUM_PIECES = {
    "qwen3": (2, 1),
    "qwen3_next": (2, 2),
}
"""By golden: pieces of layers that a decode runs, and how many of them differ."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name != "qwen3" else ()) for name in NUM_PIECES])
@pytest.mark.slow
def test_layers_that_are_alike_are_compiled_once(name, monkeypatch):
    monkeypatch.setattr(split_program, "LAYERS_AT_ONCE", 1)
    core = engines.make_core(name, share_layers=True)
    try:
        check(name, core)
        program = core.runner.programs.get(ProgramKey("decode", 4))
        assert isinstance(program, SplitProgram)
        calls = [call.digest for call in program.wiring.calls]
        assert (len(calls) - 2, len(set(calls)) - 2) == NUM_PIECES[name], "beside what comes before and behind the layers"
        caches = sum(cache.nbytes for cache in core.runner.caches)
        program(core.runner.params, core.runner.caches, core.runner.row_arrays, *nothing(core, ProgramKey("decode", 4)))
        assert all(cache.is_deleted() for cache in core.runner.caches), "a copy of the cache was written"
        assert program.memory_analysis().temp_size_in_bytes < caches
    finally:
        core.shutdown()


@pytest.mark.slow
def test_a_whole_program_has_a_function_for_each_kind_of_layer(monkeypatch):
    """As programs for one GPU."""
    monkeypatch.setattr(runner, "traces_alike_once", lambda config, on_gpu: True)
    core = engines.make_core("gemma3")
    try:
        check("gemma3", core)
        text = core.runner.shapes.lower(ProgramKey("decode", 4)).as_text()
        assert text.count(f"call @{LAYER}") == core.model_config.num_layers
        assert text.count(f"func.func private @{LAYER}") == 3, (
            "with a window and without, and the last, behind which is another norm"
        )
    finally:
        core.shutdown()


def nothing(core, key):
    """A step without requests."""
    shapes = core.runner.shapes
    layout = shapes.kind_of(key).layout(shapes, key)
    return core.runner.send(layout, *core.runner.batches.empty(layout)), core.runner.workspace


def test_programs_for_several_devices_are_refused():
    with pytest.raises(
        ConfigError,
        match="share_layers is set, but only programs for one CPU device run in pieces, and these are for 2 devices",
    ):
        engines.make_core("qwen3", share_layers=True, tensor_parallel_size=2)


@pytest.mark.slow
def test_a_step_takes_a_larger_program_while_its_own_is_compiled_behind_it(monkeypatch):
    monkeypatch.setattr(split_program, "LAYERS_AT_ONCE", 2)  # of four
    core = engines.make_core("qwen3", share_layers=True, token_buckets=(16, 64), max_num_batched_tokens=64)
    try:
        own, larger = ProgramKey("forward", 16), ProgramKey("forward", 64)
        programs, prompt = core.runner.programs, goldens.golden("qwen3").results[0].prompt[:10]
        assert larger in programs and own not in programs
        tokens = []
        for wanted in (larger, own):
            expected, get = set(), programs.get
            programs.get = lambda key, get=get, expected=expected: (expected.add(key), get(key))[1]
            tokens.append(engines.run(core, [engines.request("a", prompt, max_tokens=3)])["a"].tokens)
            programs.get = get
            assert {key for key in expected if key.kind == "forward"} == {wanted}
            programs.wait([own])
        assert tokens[0] == tokens[1]
        calls = [call.digest for call in programs.get(own).wiring.calls]
        assert [len(calls), len(set(calls))] == [core.model_config.num_layers // 2 + 2, 3], "pieces of two layers"
    finally:
        core.shutdown()
