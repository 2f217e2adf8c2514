"""Work that tracing is spared."""

import sys
from importlib.abc import MetaPathFinder

import jax
import jax.numpy as jnp
import pytest

from jaxllm.runner.quick_tracing import spare_lookups
from pallas_kernels import sampling
from tests.helpers.lowering import a_gpu_to_lower_for


def test_the_operations_of_a_triton_kernel_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    class Noting(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            searched.append(name)

    spare_lookups()
    monkeypatch.setattr(sys, "meta_path", [Noting(), *sys.meta_path])
    greedy = jax.jit(lambda logits: sampling.argmax(logits, implementation="triton"))
    with a_gpu_to_lower_for():
        text = greedy.trace(jax.ShapeDtypeStruct((4, 4096), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    assert not [name for name in searched if name.endswith(".tt")]
