"""What tracing is spared."""

import gc
import sys
from importlib.abc import MetaPathFinder

import jax
import jax.numpy as jnp
import pytest

from jaxllm.runner.quick_tracing import no_collections, spare_lookups
from pallas_kernels import sampling


def test_the_operations_of_a_triton_kernel_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    class Noting(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            searched.append(name)

    spare_lookups()
    monkeypatch.setattr(sys, "meta_path", [Noting(), *sys.meta_path])
    greedy = jax.jit(lambda logits: sampling.argmax(logits, implementation="triton"))
    text = greedy.trace(jax.ShapeDtypeStruct((4, 4096), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    assert not [name for name in searched if name.endswith(".tt")]


def test_the_collector_rests_while_a_program_is_traced() -> None:
    with no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled(), "another thread still traces"
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
