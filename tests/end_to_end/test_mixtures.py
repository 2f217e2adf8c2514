"""Mixtures of experts over several devices, by the experts' width. By whole experts: tests/expert_load, tests/data_parallel."""

import pytest

from jaxllm.errors import ConfigError
from tests.helpers import engines
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


def test_tensor_parallel() -> None:
    core = engines.make_core("mixtral", num_gpu_blocks_override=12, tensor_parallel_size=2)
    check("mixtral", core)
    assert core.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.parametrize(
    ("name", "size", "told"), [("qwen3", 2, "Qwen3ForCausalLM has no experts"), ("mixtral", 2, "does not divide 5 experts")]
)
def test_experts_that_cannot_be_given_to_devices(name: str, size: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        engines.make_core(name, tensor_parallel_size=size, enable_expert_parallel=True)
