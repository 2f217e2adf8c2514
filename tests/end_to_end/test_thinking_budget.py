"""Thinking with a budget, by a whole engine: cut at exactly the budget, and the same tokens however the steps fall."""

import dataclasses

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest, FinishReason, Grammar
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.thinking import ThinkingBudget
from tests.helpers import engines
from tests.helpers.fake_copies import AlwaysWorth
from tests.helpers.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.slow

START, END, EOS = 100, 101, 1
PROMPT = list(range(5, 25))
LENGTH = 24
BUDGETS = (0, 1, 2, 3, 7, LENGTH)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")


@pytest.fixture(scope="module")
def core(directory):
    core = engines.make_core("llama_gqa", tokenizer=str(directory), block_size=8, num_gpu_blocks_override=60)
    yield core
    core.shutdown()


def thinks(
    name: str, budget: int | None, *, is_open: bool = True, start: int = START, grammar: Grammar | None = None, **params
) -> EngineCoreRequest:
    """A request whose model never ends its thinking by itself."""
    params = {"max_tokens": LENGTH, "logit_bias": {END: -100.0}, "temperature": 0.8, "seed": 11, **params}
    request = engines.request(name, PROMPT, **params)
    limit = None if budget is None else ThinkingBudget(budget, start, (END,), is_open)
    return dataclasses.replace(request, thinking_budget=limit, grammar=grammar, eos_token_ids=(EOS,))


def several(vocabulary: Vocabulary) -> list[EngineCoreRequest]:
    grammar = Grammar(grammar_text(StructuredOutputsParams(regex="[ab]+"), vocabulary.split), start_after_token_ids=(END,))
    return [
        thinks("free", None),
        *(thinks(f"open {budget}", budget) for budget in BUDGETS),
        thinks("greedy", 5, temperature=0.0, logit_bias=None),
        thinks("then a grammar", 4, grammar=grammar, ignore_eos=False),
    ]


@pytest.fixture(scope="module")
def vocabulary(directory):
    return Vocabulary.of(load_tokenizer(directory), 128, (EOS,))


@pytest.fixture(scope="module")
def alone(core: EngineCore, vocabulary):
    """The answers, each request alone and each step read before the next is planned."""
    engines.reschedule(core, async_scheduling=False, enable_prefix_caching=False)
    answers = {}
    for request in several(vocabulary):
        answers |= engines.run(core, [request])
    return answers


def test_thinking_is_what_it_was_up_to_the_budget_and_ends_there(core, alone, vocabulary):
    free = alone["free"].tokens
    assert END not in free and len(free) == LENGTH
    for budget in BUDGETS:
        tokens = alone[f"open {budget}"].tokens
        assert tokens[:budget] == free[:budget] and tokens.count(END) == (budget < LENGTH)
        assert tokens[budget:][:1] == [END][: LENGTH - budget], f"budget {budget}"
        assert len(tokens) == LENGTH
    answer = alone["then a grammar"]
    assert answer.tokens[:4] == free[:4] and answer.tokens[4] == END and answer.finish_reason is FinishReason.STOP
    letters = load_text(vocabulary, answer.tokens[5:])
    assert letters and set(letters) <= set("ab")


def load_text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return "".join(vocabulary.table.decode_str([token]) for token in tokens if token != EOS)


def test_after_it_the_model_goes_on_from_the_forced_marker(core):
    engines.reschedule(core)
    cut = engines.run(core, [thinks("a", 5, temperature=0.0, logit_bias=None)])["a"].tokens
    assert cut[5] == END
    rest = engines.request("b", PROMPT + cut[:6], max_tokens=LENGTH - 6)
    assert engines.run(core, [rest])["b"].tokens == cut[6:]


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 2},
        {"max_in_flight": 3},
        {"max_in_flight": 3, "num_blocks": 12, "enable_prefix_caching": False, "watermark": 0.0},
    ],
    ids=["async", "three in flight", "preemption"],
)
def test_the_tokens_are_the_same_however_the_steps_fall(core, vocabulary, alone, options):
    engines.reschedule(core, **options)
    answers = engines.run(core, several(vocabulary))
    assert {name: answer.tokens for name, answer in answers.items()} == {name: a.tokens for name, a in alone.items()}
    if "num_blocks" in options:
        assert any(answer.num_preemptions for answer in answers.values())


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_a_section_that_the_output_opens_is_counted_from_there(core, alone, max_in_flight):
    engines.reschedule(core, max_in_flight=max_in_flight)
    free = alone["free"].tokens
    place = next(place for place in range(3, LENGTH) if free[place] not in free[:place])
    for budget in (0, 2):
        request = thinks("a", budget, is_open=False, start=free[place])
        tokens = engines.run(core, [request])["a"].tokens
        assert tokens[: place + 1 + budget] == free[: place + 1 + budget]
        assert tokens[place + 1 + budget] == END and tokens.count(END) == 1


def test_only_the_step_at_the_end_of_the_budget_waits_for_a_mask(core, monkeypatch):
    engines.reschedule(core, max_in_flight=3)
    plans = []
    dispatch = core.runner.dispatch
    monkeypatch.setattr(core.runner, "dispatch", lambda plan: (plans.append(plan), dispatch(plan))[1])
    tokens = engines.run(core, [thinks("a", 8, logit_bias=None)])["a"].tokens
    assert tokens.index(END) == 8
    masked = [place for place, plan in enumerate(plans) if plan.masked_request_ids]
    assert masked == [8]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_token_in_flight_is_not_forced_again_for_a_masked_request_that_comes(core, alone, vocabulary, budget):
    later = several(vocabulary)[-1]
    for num_steps in range(budget + 3):
        engines.reschedule(core, max_in_flight=3)

        def add(step: int, answers: dict[str, engines.Answer], at: int = num_steps) -> None:
            if step == at:
                core.add_request(later)

        answers = engines.run(core, [thinks("a", budget)], after_step=add)
        assert answers["a"].tokens == alone[f"open {budget}"].tokens
        assert answers[later.request_id].tokens == alone[later.request_id].tokens


def tokens_of(answers: dict[str, engines.Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_the_tokens_are_the_same_where_running_requests_start_over(core, vocabulary, alone, max_in_flight):
    requests = several(vocabulary)
    some = [requests[0], *requests[3:5], requests[-1]]
    for num_steps in range(8):
        engines.reschedule(core, max_in_flight=max_in_flight)

        def reset(step: int, answers: dict[str, engines.Answer], at: int = num_steps) -> None:
            if step % 8 == at:
                assert core.reset_prefix_cache(reset_running_requests=True)

        assert tokens_of(engines.run(core, some, after_step=reset)) == {
            each.request_id: alone[each.request_id].tokens for each in some
        }


def test_the_tokens_are_the_same_where_blocks_come_back_from_host_memory(directory, vocabulary, alone):
    options = {
        "tokenizer": str(directory),
        "block_size": 8,
        "num_gpu_blocks_override": 12,
        "max_model_len": 80,
        "watermark": 0.0,
    }
    core = engines.make_core("llama_gqa", kv_offloading_size=0.02, warmup="lazy", **options)
    (tier,) = core.scheduler.cache_manager.loading.tiers
    tier._worth, tier._min_tokens = AlwaysWorth(), 1
    for _ in range(3):
        answers = engines.run(core, several(vocabulary))
        assert tokens_of(answers) == tokens_of(alone)
    assert any(answer.num_preemptions for answer in answers.values()) and core.stats().num_loaded_blocks
    core.shutdown()
