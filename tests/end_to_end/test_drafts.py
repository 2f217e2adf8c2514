"""Steps with drafts give the tokens of steps without, whatever happens and whoever proposes them."""

from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine import features
from jaxllm.engine.core import EngineCore
from tests.helpers import draft_workout, engines, scripted_drafts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "DRAFTERS", scripted_drafts.REGISTRATION)
        core = engines.make_core(draft_workout.NAME, speculative_config={"method": "scripted"})
        yield core
    core.shutdown()


@pytest.mark.parametrize("work_out", draft_workout.WORKOUTS)
def test_tokens_are_those_of_an_engine_without_drafts(core: EngineCore, work_out: Callable[[EngineCore], None]) -> None:
    engines.renew(core)
    work_out(core)
