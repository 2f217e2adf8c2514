"""After warm-up nothing compiles, whatever the traffic; no donation fails; dispatching a step never waits for the device."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.request import FinishReason, Grammar
from jaxllm.sampling.processors import Processor
from jaxllm.sampling.variants import Variant
from tests.helpers import engines, goldens
from tests.helpers.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.slow

NAME = "llama_gqa"
_COMPILED: list[str] = []


def _record(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_record)


def only_low(logits_RV, context):
    return jnp.where(jnp.arange(logits_RV.shape[1]) < context.arguments_RA[:, :1], logits_RV, -jnp.inf)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated.*")
        core = engines.make_core(
            NAME,
            tokenizer=str(tokenizer),
            processors=(Processor("only_low", only_low, num_arguments=1),),
            warmup="background",
            block_size=8,
            num_gpu_blocks_override=25,
            max_num_batched_tokens=48,
            token_buckets=(16, 48),
        )
    core.finish_compiling()
    yield core
    core.shutdown()


def slowly(array: jax.Array, num_rounds: jax.Array) -> jax.Array:
    """The array, after so many rounds of work that the result depends on."""
    work = jax.lax.fori_loop(0, num_rounds, lambda _, x: jnp.sin(x @ x), jnp.eye(256))
    return array + (work[0, 0] * 0).astype(array.dtype)


def test_the_listener_hears_compilations():
    before = len(_COMPILED)
    jax.jit(lambda x: x * 3 + 1)(np.arange(7.0)).block_until_ready()
    assert len(_COMPILED) > before


def test_a_failed_donation_is_an_error():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated.*")
        with pytest.raises(UserWarning, match="donated"):
            jax.jit(lambda x: x[:1], donate_argnums=0).lower(jnp.zeros(9)).compile()


def traffic():
    """Requests of every kind: (step at which it comes, request)."""
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(128, size=length).tolist()

    long = prompt(96)
    kinds = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 4},
        {"logprobs": 0},
        {"logprobs": 5, "temperature": 0.7},
        {"prompt_logprobs": 3},
        {"prompt_logprobs": 0, "logprobs": 20, "temperature": 0.5},
        {"logprob_token_ids": [1, 2, 3]},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {5: 3.0}, "temperature": 0.9},
        {"allowed_token_ids": [1, 2, 3]},
        {"bad_words_token_ids": [[4], [5, 6]]},
        {"min_tokens": 3, "stop_token_ids": [7, 8], "ignore_eos": False},
        {"extra_args": {"only_low": [20.0]}},
    ]
    arrivals = []
    for i, params in enumerate(kinds * 2):
        length = int(rng.choice([1, 2, 7, 8, 17, 40, 70]))
        arrivals.append((2 * i, engines.request(f"mixed {i}", prompt(length), max_tokens=int(rng.integers(1, 30)), **params)))
    for i in range(4):  # wholly cached from the second on; shorter and longer ones share its beginning
        arrivals.append((30 * i, engines.request(f"long {i}", long, max_tokens=12)))
        arrivals.append((30 * i + 3, engines.request(f"part {i}", [*long[: 16 + 8 * i], *prompt(3 * i)], max_tokens=20)))
    arrivals += [(200 + i, engines.request(f"late {i}", long[: 90 + i], max_tokens=3, temperature=0.3)) for i in range(5)]
    arrivals.append((20, engines.pooling_request("one vector", prompt(30))))
    arrivals.append((40, engines.pooling_request("a vector per token", prompt(70), task="token_embed")))
    for i in range(4):
        masked = engines.request(f"masked {i}", prompt(9), max_tokens=9, temperature=0.8, logprobs=1 if i == 3 else None)
        arrivals.append((15 * i + 5, replace(masked, grammar=Grammar("start: /[a-f]+/"))))
    return sorted(arrivals, key=lambda arrival: arrival[0])


@pytest.mark.newer
def test_mixed_traffic_compiles_nothing(core, monkeypatch):
    engines.renew(core)  # the programs that an engine runs once have not run
    arrivals, used = traffic(), set()
    get, programs = core.runner.programs.get, core.runner.programs
    monkeypatch.setattr(programs, "get", lambda key: (used.add(key), get(key))[1])
    engines.run(core, [next(request for _, request in arrivals if request.grammar is not None)])  # compiles the grammar
    used.clear()
    num_requests, num_compiled = len(arrivals), len(_COMPILED)
    aborts = {9: "mixed 2", 21: "mixed 8", 36: "mixed 16", 61: "long 2"}

    def come_and_go(step: int, answers: dict[str, engines.Answer]) -> None:
        while arrivals and (arrivals[0][0] <= step or not core.has_unfinished_requests()):
            request = arrivals.pop(0)[1]
            core.add_request(request)
            answers[request.request_id] = engines.Answer()
        if step in aborts:
            core.abort_requests([aborts[step]])

    with jax.transfer_guard_host_to_device("disallow"):  # arrays go to the device by device_put and never in passing
        answers = engines.run(core, [arrivals.pop(0)[1]], after_step=come_and_go)

    assert len(answers) == num_requests
    unfinished = {request_id for request_id, answer in answers.items() if answer.finish_reason is None}
    assert unfinished <= set(aborts.values())
    assert all(answer.finish_reason is not FinishReason.ERROR for answer in answers.values())
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert core.num_compiled_after_warmup == 0
    assert len(_COMPILED) == num_compiled, "something compiled that is not one of the engine's programs"
    assert {key.variant for key in used} == set(Variant), "the traffic missed some way of sampling"
    assert {key.kind for key in used} == {key.kind for key in core.runner.shapes.all_keys()}, "the traffic missed some program"
    assert used <= set(core.runner.shapes.all_keys())


def test_dispatch_does_not_wait_for_the_device(core):
    """Keep the device busy; steps of every kind, dispatched meanwhile, must not wait for the end of that work.

    Holds however long the work takes: a step that waits sees its end; one that does not may see it only if the host was slow.
    """
    busy = jax.jit(slowly)
    busy(core.runner.row_arrays.last_token_N, jnp.int32(1)).block_until_ready()
    for num_rounds in (300, 1200, 5000, 20_000):
        if not any(steps_that_saw_the_end(core, busy, jnp.int32(num_rounds))):
            return
    pytest.fail("a step was waited for")


def steps_that_saw_the_end(core, busy, num_rounds) -> list[bool]:
    """Whether each of six steps was ready when all were dispatched, onto a device that so many rounds keep busy."""
    engines.reschedule(core)
    result = goldens.golden(NAME).results[4]
    kinds = [
        {"max_tokens": 40},
        {"repetition_penalty": 1.2, "logprobs": 2, "max_tokens": 4},
        {"prompt_logprobs": 1, "max_tokens": 2},
    ]
    runner, scheduler = core.runner, core.scheduler
    for i, params in enumerate(kinds):
        core.add_request(engines.request(str(i), result.prompt, **params))
    runner.row_arrays = runner.row_arrays._replace(last_token_N=busy(runner.row_arrays.last_token_N, num_rounds))
    steps = []
    with jax.transfer_guard("disallow"):
        for _ in range(6):
            plan = scheduler.schedule()
            if plan.num_tokens:
                steps.append((plan, runner.dispatch(plan)))
    assert len(steps) == 6
    ready = [pending.done[0].is_ready() for _, pending in steps]

    tokens = []
    for plan, pending in steps:
        tokens += [
            t for o in scheduler.update_from_output(plan, pending.result()) if o.request_id == "0" for t in o.new_token_ids
        ]
    while core.has_unfinished_requests():
        tokens += [t for output in core.step() if output.request_id == "0" for t in output.new_token_ids]
    assert tokens == result.tokens[:40]
    return ready
