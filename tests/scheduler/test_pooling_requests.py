"""Pooling requests: their prompt is computed, nothing is sampled, and they end with a vector."""

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import FinishReason, RequestStatus
from tests.helpers.fake_runner import FakeEngine, digests
from tests.helpers.scheduling import make_request, make_scheduler

EMBED = PoolingParams(task="embed")


def pooled(engine) -> dict[str, list[int]]:
    """The vectors of all requests, each of which must end with its vector."""
    found = {}
    while engine.scheduler.has_requests():
        engine.dispatch()
        for output in engine.collect():
            if output.pooled is not None:
                assert output.finish_reason is FinishReason.STOP and output.new_token_ids == []
                found[output.request_id] = output.pooled.tolist()
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompts_are_computed_in_chunks_beside_generation(depth):
    scheduler = make_scheduler(max_num_batched_tokens=16, async_scheduling=depth > 1)
    engine = FakeEngine(scheduler, depth=depth)
    text, short, long = (
        make_request("text", 10, max_tokens=8),
        make_request("short", 5, pooling=EMBED),
        make_request("long", 50, pooling=EMBED),
    )
    for request in (text, short, long):
        scheduler.add_request(request)
    assert pooled(engine) == {r.request_id: digests(r.spec.prompt_token_ids) for r in (short, long)}
    assert engine.runner.num_computed_tokens == 10 + 7 + 5 + 50
    assert text.num_output_tokens == 8


def test_a_prompt_may_fill_the_context_and_the_cache():
    scheduler = make_scheduler(max_model_len=64, num_blocks=5)
    scheduler.add_request(make_request("whole", 64, pooling=EMBED))
    assert list(pooled(FakeEngine(scheduler))) == ["whole"]
    with pytest.raises(InvalidRequestError, match="65 tokens, the model takes 64"):
        scheduler.add_request(make_request("longer", 65, pooling=EMBED))
    with pytest.raises(InvalidRequestError, match="with at least 1 of output"):
        scheduler.add_request(make_request("text", 64))


def test_a_cached_prompt_computes_its_last_token_alone():
    scheduler = make_scheduler()
    engine = FakeEngine(scheduler)
    for name, num_computed in (("first", 48), ("again", 49)):
        scheduler.add_request(make_request(name, [7] * 48, pooling=EMBED))
        assert list(pooled(engine)) == [name]
        assert engine.runner.num_computed_tokens == num_computed
    scheduler.add_request(make_request("all", [7] * 48, pooling=PoolingParams(skip_reading_prefix_cache=True)))
    pooled(engine)
    assert engine.runner.num_computed_tokens == 49 + 48


def test_a_vector_that_comes_after_the_abort_is_dropped():
    scheduler = make_scheduler(async_scheduling=True)
    engine = FakeEngine(scheduler, depth=2)
    scheduler.add_request(make_request("a", 20, pooling=EMBED))
    engine.dispatch()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.collect() == [] and scheduler.cache_manager.pool.num_free_blocks == 999


def test_a_vector_on_its_way_ends_a_request_that_was_preempted_meanwhile():
    scheduler = make_scheduler(async_scheduling=True)
    engine = FakeEngine(scheduler, depth=2)
    request = make_request("a", 20, pooling=EMBED)
    scheduler.add_request(request)
    engine.dispatch()
    scheduler.running.remove(request)
    scheduler._preempt(request)
    assert [output.finish_reason for output in engine.collect()] == [FinishReason.STOP]
    assert not scheduler.has_requests() and not len(scheduler.waiting)
