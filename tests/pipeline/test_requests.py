"""An engine in two stages answers requests of every kind as one device does, and its stages compute different steps at a time."""

import jax
import jax.numpy as jnp
import pytest

from scripts.gpu_checks.sampled_apart import sampling_apart
from tests.helpers import engines, every_kind, goldens
from tests.helpers.every_kind import check
from tests.pipeline.conftest import NAME

pytestmark = pytest.mark.slow

PROMPTS = [result.prompt for result in goldens.golden(NAME).results]


def requests():
    return every_kind.requests(PROMPTS)


@pytest.fixture(scope="module")
def expected(one_device):
    engines.renew(one_device)
    return engines.run(one_device, requests())


@pytest.fixture
def core(two_stages, monkeypatch):
    monkeypatch.setattr("jaxllm.engine.loop.LONG_STEP_SECONDS", float("inf"))
    engines.renew(two_stages)
    yield two_stages
    two_stages._dead = None
    two_stages.wake_up()


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16},
        {"num_blocks": 8, "max_in_flight": 3},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_requests_of_every_kind_have_the_answers_of_one_device(core, expected, options):
    """Fewer and more steps in flight, prompts in chunks, requests preempted, and one at a time."""
    every_kind.check_twice(core, requests, expected, **options)


def test_decodes_sampled_apart_have_the_answers_of_one_device_too(core, expected):
    with sampling_apart(core) as sizes:
        every_kind.check_twice(core, requests, expected, max_in_flight=3)
    assert sizes


def test_aborted_requests_leave_the_others_as_they_are(core, expected):
    def abort(step, answers):
        if step % 3 == 2:
            name = ("penalties", "greedy", "vector", "late 2", "late 5")[step // 3 % 5]
            core.abort_requests([name])
            answers.pop(name, None)
            core.add_request(engines.request(f"late {step}", PROMPTS[step % 5], max_tokens=20)) if step < 30 else None

    found = engines.run(core, requests(), after_step=abort)
    check(
        {name: answer for name, answer in found.items() if name in ("seeded", "logprobs", "grammar", "prompt logprobs")},
        expected,
    )
    core.check_integrity()


@pytest.mark.parametrize("faults", ["step:2:oom", "draw:2:oom", "result:1:oom,launch:5:oom"])
def test_after_failed_steps_every_request_has_the_tokens_it_would_have_had(core, expected, faults):
    every_kind.check_after_failed_steps(core, requests, expected, faults)


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_the_stages_have_their_weights_and_caches_again(core, expected, level):
    every_kind.check_after_sleep(core, requests, expected, level)


def test_each_stage_has_its_own_part_of_the_model(core, one_device):
    devices = [{array.sharding.mesh.devices.flat[0] for array in (*s.params, *s.caches)} for s in core.runner.stages]
    assert devices == [{jax.devices()[0]}, {jax.devices()[1]}]
    whole = sum(array.nbytes for array in one_device.runner.params)
    embedding = one_device.model_config.vocab_size * one_device.model_config.hidden_size * 4
    first, last = (sum(array.nbytes for array in stage.params) for stage in core.runner.stages)
    assert first + last == whole + embedding  # which is the last stage's head
    assert [len(stage.caches) for stage in core.runner.stages] == [2, 2]
    assert len(one_device.runner.caches) == 4


# Several steps in flight


def note_plans(core, monkeypatch):
    plans, schedule = [], core.scheduler.schedule

    def noted(**options):
        plan = schedule(**options)
        if plan.num_tokens:
            plans.append(({row.request_id for row in plan.rows}, len(core.loop._in_flight)))
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", noted)
    return plans


def test_steps_in_a_row_are_of_different_requests_in_equal_parts(core, monkeypatch):
    plans = note_plans(core, monkeypatch)
    engines.run(core, [engines.request(str(i), PROMPTS[i], max_tokens=20) for i in range(4)])
    decodes = plans[3:-4]
    assert len(decodes) > 20
    assert all(not a & b for (a, _), (b, _) in zip(decodes, decodes[1:], strict=False))
    assert {len(ids) for ids, _ in decodes} == {2}
    assert all(in_flight >= 2 for _, in_flight in decodes)  # in addition to the step that is planned


def test_without_async_scheduling_no_token_is_in_flight_when_its_request_is_planned(core, monkeypatch):
    engines.reschedule(core, async_scheduling=False)
    plans, schedule = note_plans(core, monkeypatch), core.scheduler.schedule

    def checked(**options):
        waiting = {id_ for id_, request in core.scheduler.requests.items() if request.num_output_placeholders}
        plan = schedule(**options)
        assert not waiting & {row.request_id for row in plan.rows}
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", checked)
    engines.run(core, [engines.request(str(i), PROMPTS[i], max_tokens=10) for i in range(4)])
    assert max(in_flight for _, in_flight in plans) == 1  # in addition to the step that is planned


def test_the_first_stage_computes_a_step_while_the_last_one_computes_an_earlier(core, monkeypatch):
    """The last stage is given seconds of work before one step. The first stage has ended the next one long before."""
    first, last = core.runner.stages
    held_up, was_over = [], []

    def pass_on(batch, entering):
        leaving = type(first).pass_on(first, batch, entering)
        if len(held_up) == 3:
            leaving.block_until_ready()
            was_over.append(held_up[2].is_ready())
        return leaving

    run_earlier = last.enter

    def enter(batch):
        (x,) = run_earlier(batch)
        held_up.append(hold_up(x) if len(held_up) == 2 else x)
        return (held_up[-1],)

    @jax.jit
    def hold_up(x):
        some = jnp.full((512, 512), 1 / 512)
        return x + jnp.minimum(0, jax.lax.fori_loop(0, 200, lambda _, y: y @ some, some)[0, 0])

    hold_up.lower(jax.ShapeDtypeStruct((4, 64), "float32")).compile()
    monkeypatch.setattr(first, "pass_on", pass_on)
    monkeypatch.setattr(last, "enter", enter)
    engines.run(core, [engines.request(str(i), PROMPTS[i], max_tokens=6) for i in range(4)])
    assert was_over == [False]
