"""Reported number of prompt tokens still to compute."""

from jaxllm.scheduler_output import ModelRunnerOutput
from tests.helpers.scheduling import make_request, make_scheduler


def test_prompt_tokens_count_until_they_are_computed_and_half_while_they_are():
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_seqs=2, caching=False)

    def queued() -> int:
        return scheduler.stats().num_queued_tokens

    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 100, max_tokens=3))
    assert queued() == 300
    plan = scheduler.schedule()
    assert queued() == 236 + 63 // 2
    scheduler.update_from_output(plan, ModelRunnerOutput({}))
    assert queued() == 236
    plan = scheduler.schedule()  # the rest of a, the beginning of b; c waits for a seat
    assert queued() == 172 + 62 // 2
    scheduler.update_from_output(plan, ModelRunnerOutput({"a": [7]}))
    assert queued() == 172
    scheduler.schedule()
    scheduler.start_over()
    assert queued() == 300
    scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True) and queued() == 300
