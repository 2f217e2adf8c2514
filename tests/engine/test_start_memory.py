"""Memory at an engine's start and end: all of it is freed, and a shortage is reported."""

import gc

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import OutOfMemoryError
from jaxllm.runner.runner import ModelRunner
from tests.helpers import engines, goldens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_to_collect")]

DEVICE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes"
NCCL = "INTERNAL: NCCL operation ncclCommInitRankConfig failed: Cuda failure 2 'out of memory'"
ADVICE = {DEVICE: "lower --max-num-batched-tokens", NCCL: "lower --gpu-memory-utilization"}


def open_llm(size: int, **options) -> LLM:
    return LLM(str(goldens.FOLDER / "llama_gqa"), tensor_parallel_size=size, **{**engines.SMALL, **options})


class NewArrays:
    """The arrays of this process on its devices that have come since."""

    def __init__(self) -> None:
        gc.collect()  # other tests may have left some to be collected
        self._known = jax.live_arrays()

    def __call__(self) -> list[jax.Array]:
        known = set(map(id, self._known))
        return [array for array in jax.live_arrays() if id(array) not in known and not array.is_deleted()]


def test_an_engine_that_has_ended_holds_nothing() -> None:
    alive = NewArrays()
    llm = open_llm(2)
    params = [
        SamplingParams(temperature=1.0, seed=1, presence_penalty=0.5, logprobs=1, max_tokens=3),
        SamplingParams(max_tokens=3),
    ]
    llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    assert alive()
    llm.shutdown()
    assert not alive()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("allocate_caches", NCCL),
        ("warm_up", DEVICE),
        ("_new_row_arrays", DEVICE),
        ("set_weights", NCCL),
    ],
)
def test_a_start_without_memory_is_told_and_holds_nothing(monkeypatch, place, text) -> None:
    def fail(self, *args):
        raise RuntimeError(text)

    alive = NewArrays()
    monkeypatch.setattr(ModelRunner, place, fail)
    with pytest.raises(OutOfMemoryError, match=ADVICE[text]) as held:
        open_llm(2, warmup="background" if place == "warm_up" else "lazy")
    assert not alive() and held.value.__cause__ is not None
