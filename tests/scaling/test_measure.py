"""Real engines over tiny checkpoints, one and two devices: each measurement is reported with consistent figures."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from jaxllm.llm import LLM
from jaxllm.measuring.limits import Ceilings
from jaxllm.scaling.measure import Measurer, one_line
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.results import SizeResult
from tests.helpers import engines

pytestmark = pytest.mark.slow

CEILINGS = Ceilings(1e12, 1e12, "float32")


def plan_of(size: int, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "batch_sizes": (2,),
        "input_len": 12,
        "output_len": 6,
        "scalings": ("strong",),
        "prefill_prompts": 3,
        "requests": ((9, 4), (20, 2), (5, 7)),
        "trace_steps": 2,
    }
    return Plan(model="tiny", tensor_parallel_sizes=(size,), **(values | changes))


def make_core(size: int, **options: Any) -> EngineCore:
    return engines.make_core("llama_gqa", tensor_parallel_size=size, enable_prefix_caching=False, **options)


@pytest.fixture(scope="module", params=[1, 2])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = make_core(request.param)
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def small_pool() -> Iterator[EngineCore]:
    core = make_core(1, num_gpu_blocks_override=8)
    yield core
    core.shutdown()


def measure(plan: Plan, core: EngineCore) -> SizeResult:
    """The results of a plan's only size, which is the engine's."""
    llm = LLM.from_config(core.config, core=core)
    result = SizeResult(core.config.parallel.tensor_parallel_size)

    def hear(message: SizeResult | str) -> None:
        if isinstance(message, SizeResult):
            result.add(message)

    Measurer(plan, llm, CEILINGS, hear).measure_all()
    llm.llm_engine.check_integrity()
    assert not llm.llm_engine.has_unfinished_requests()
    return result


def test_every_piece_of_work_is_measured(core: EngineCore) -> None:
    size = core.config.parallel.tensor_parallel_size
    found = measure(plan_of(size), core)
    assert not found.skipped
    decode, prefill, mixed = found.rows
    assert (decode.work, decode.num_requests, decode.num_steps, decode.num_tokens) == ("decode", 2, 5, 10)
    assert decode.note is None and len(decode.run_seconds) == 2
    assert sum(decode.step_seconds) == pytest.approx(min(decode.run_seconds))
    assert decode.mean_context is not None and 12 < decode.mean_context < 60
    assert (prefill.num_requests, prefill.num_tokens, prefill.num_prompt_tokens) == (3, 36, 36)
    assert (mixed.num_requests, mixed.num_tokens, mixed.num_prompt_tokens) == (3, 13, 34)
    for row in (decode, prefill, mixed):
        assert row.tensor_parallel_size == size and 0 < row.least_seconds < min(row.run_seconds)
        assert set(row.host_ms) == {"dispatch", "launch", "wait"} and all(ms >= 0 for ms in row.host_ms.values())
    assert [(each.work, each.source) for each in found.breakdowns] == [("decode", "cpu thunks"), ("prefill", "cpu thunks")]
    for each in found.breakdowns:
        assert ((each.parts_ms["communication"] or 0) > 0) == (size > 1)
        assert each.parts_ms["attention"] is None and each.gaps_ms is None and each.launches > 1
    assert [each.rows for each in found.all_reduces] == ([] if size == 1 else [2, 112])
    assert all(each.seconds > 0 and each.num_bytes == each.rows * each.width * 4 for each in found.all_reduces)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch_sizes": (5,)}, "5 requests of 47 tokens are too many for max_num_seqs 4,"),
        ({"output_len": 90}, "2 requests of 131 tokens are too many for max_num_seqs 4, max_model_len 112"),
        (
            {"batch_sizes": (4,)},
            "4 requests of 47 tokens are too many for max_num_seqs 4, max_model_len 112 or a KV cache of 112 ",
        ),
    ],
)
def test_what_cannot_be_measured_says_why(small_pool: EngineCore, changes: dict[str, Any], reason: str) -> None:
    [skipped] = measure(plan_of(1, works=("decode",), **changes), small_pool).skipped
    assert skipped.reason.startswith(reason) and skipped.work == "decode"


def test_work_that_fails_leaves_the_rest(small_pool: EngineCore) -> None:
    found = measure(plan_of(1, works=("prefill", "mixed"), requests=((100, 40),), trace_steps=0), small_pool)
    assert [skipped.work for skipped in found.skipped] == ["mixed"] and [row.work for row in found.rows] == ["prefill"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (RuntimeError("\nRESOURCE_EXHAUSTED: no more\nx"), "RuntimeError: RESOURCE_EXHAUSTED: no more"),
        (ConfigError("block_size is 7"), "block_size is 7"),
        (KeyError(), "KeyError"),
    ],
)
def test_errors_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line
