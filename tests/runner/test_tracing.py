"""The traced program of a step."""

import pytest

from jaxllm.runner import runner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.shared_layers import LAYER
from tests.helpers import engines

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "num_kinds"), [("llama_gqa", 1), ("qwen2_window", 2)])
def test_layers_that_are_alike_share_one_lowering_of_their_attention(name: str, num_kinds: int) -> None:
    """Lowering the kernels of each of 32 layers anew made up most of an engine's start."""
    core = engines.make_core(name, warmup="lazy")
    programs = core.runner.shapes
    for key in programs.all_keys():
        if key.kind in ("decode", "forward"):
            text = programs.lower(key).as_text()
            assert text.count("call @_write_and_attend") == 2, "one call for each layer"
            assert text.count("func.func private @_write_and_attend") == num_kinds
    core.shutdown()


def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for one GPU: tracing and lowering each of 32 layers took longer than its kernels."""
    monkeypatch.setattr(runner, "traces_alike_once", lambda config, on_gpu: True)
    core = engines.make_core("llama_gqa", warmup="lazy", load_format="dummy", hf_overrides={"num_hidden_layers": 6})
    for key in (ProgramKey("decode", 4), ProgramKey("forward", 112)):
        text = core.runner.shapes.lower(key).as_text()
        assert text.count(f"call @{LAYER}") == 6
        assert text.count(f"func.func private @{LAYER}") <= 2, "behind the last may be another norm"
    core.shutdown()
