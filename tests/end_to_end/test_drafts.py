"""Steps with drafts give the tokens of steps without, whatever happens and whoever proposes them."""

from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine import features
from jaxllm.engine.core import EngineCore
from tests.helpers import draft_workout, engines, scripted_drafts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """An engine with keys and values alone, and one with states by row, which wrong drafts must not change. With states of another kind:
    Kimi Linear in test_parity.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "DRAFTERS", scripted_drafts.REGISTRATION)
        core = engines.make_core(request.param, speculative_config={"method": "scripted"}, num_gpu_blocks_override=300)
        yield core
    core.shutdown()


@pytest.mark.parametrize(
    ("core", "work_out"),
    [
        *((draft_workout.NAME, work_out) for work_out in draft_workout.WORKOUTS),
        ("granite_hybrid", draft_workout.interruptions_of_few_kinds),
    ],
    indirect=["core"],
)
def test_tokens_are_those_of_an_engine_without_drafts(core: EngineCore, work_out: Callable[[EngineCore], None]) -> None:
    engines.renew(core)
    work_out(core)
