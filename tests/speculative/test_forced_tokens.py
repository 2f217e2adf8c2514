"""Drafts that grammars have, by a whole engine: the tokens are those without drafts, however the steps fall, in fewer steps."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.request import EngineCoreRequest, FinishReason, Grammar
from jaxllm.sampling_params import SamplingParams
from jaxllm.speculative.grammar import GrammarControl
from jaxllm.speculative.options import DEFAULT_FORCED, SpeculativeConfig, of_engine
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from scripts.gpu_checks.sampled_apart import sampling_apart
from tests.helpers import engines
from tests.helpers.scheduling import make_request
from tests.helpers.tiny_tokenizers import write_tokenizer

NAME, EOS = "llama_gqa", 1
PROMPT = list(range(5, 45))
NUMBER = {"type": "integer", "minimum": 0, "maximum": 500}
SCHEMA = {"type": "object", "properties": {"first name": NUMBER, "b": {"enum": ["x", "yes"]}}, "additionalProperties": False}
JSON = {"json": {**SCHEMA, "required": ["first name", "b"]}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")


@pytest.fixture(scope="module")
def make(directory):
    """A request under a grammar: `form` as StructuredOutputsParams has it."""
    vocabulary = Vocabulary.of(load_tokenizer(directory), 128, (EOS,))

    def make(request_id, form, *, prompt=PROMPT, start_after=None, **params) -> EngineCoreRequest:
        text = grammar_text(StructuredOutputsParams(**form), vocabulary.split)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 60, **params}),
            eos_token_ids=(EOS,),
            grammar=Grammar(text, start_after_token_ids=start_after),
        )

    return make


@pytest.fixture(scope="module")
def core(directory):
    config = {"method": "grammar", "num_speculative_tokens": 2}
    options = {"block_size": 8, "num_gpu_blocks_override": 60, "speculative_config": config}
    core = engines.make_core(NAME, tokenizer=str(directory), **options)
    core.scheduler.drafts.note_seconds = lambda *args: None  # steps without drafts may be faster here
    yield core
    core.shutdown()


def several(make, num_drafts=None):
    """Requests of every kind, one without a grammar. num_drafts: the most that they ask for."""
    asked = {"num_speculative_tokens": num_drafts}
    return [
        make("json 0", JSON, **asked),
        make("json 1", {"json": SCHEMA}, seed=4, prompt=PROMPT[:3], **asked),
        engines.request("plain", PROMPT[:20], max_tokens=25, temperature=0.9, seed=8, **asked),
        make("compact", {**JSON, "disable_any_whitespace": True}, seed=5, min_tokens=5, logprobs=2, **asked),
        make("choice", {"choice": ["true or not", "false indeed", "nothing"]}, logprobs=2, temperature=0.0, **asked),
        make("cut", {"regex": "[a-z]{2}, which is a text of its own"}, max_tokens=17, prompt=PROMPT[:11], **asked),
        make("stops", {"regex": "ab, and on[0-9]+"}, stop_token_ids=[85], **asked),
        make("no end", {"regex": "ab1200xyz"}, ignore_eos=True, **asked),
        make("biased", JSON, logit_bias={70: 5.0}, repetition_penalty=1.3, seed=6, logprobs=0, **asked),
        make("late", {"regex": "0+"}, start_after=(9, 9), max_tokens=12, seed=7, **asked),
    ]


@pytest.fixture(scope="module")
def without(core, make):
    """The answers without drafts, one after the other, with each step read before the next is planned: the simplest schedule."""
    engines.reschedule(core, async_scheduling=False, enable_prefix_caching=False)
    answers = {}
    for request in several(make, num_drafts=0):
        answers |= engines.run(core, [request])
    assert core.scheduler.drafts.counts.num_drafts == 0
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 2},
        {"max_in_flight": 3},
        {"max_in_flight": 3, "max_num_batched_tokens": 12, "apart": True},
        {"max_in_flight": 3, "num_blocks": 16, "enable_prefix_caching": False, "watermark": 0.0},
        {"async_scheduling": False, "max_num_batched_tokens": 7},
        {"max_in_flight": 3, "rows": True},
    ],
    ids=["async", "three in flight", "chunks apart", "preemption", "chunks in turn", "rows"],
)
def test_tokens_and_logprobs_are_those_without_drafts(core, make, without, options):
    options = dict(options)
    is_apart, by_rows = options.pop("apart", False), options.pop("rows", False)
    engines.reschedule(core, **options)
    if is_apart:
        core.loop._mask_pace = SimpleNamespace(is_apart=True, note=lambda seconds, is_late: None)
    num_before = core.scheduler.drafts.counts.num_accepted_tokens
    with sampling_apart(core) if by_rows else nullcontext({1}) as sizes:
        answers = engines.run(core, several(make))
    assert sizes
    for name, expected in without.items():
        answer = answers[name]
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason), name
        if expected.logprobs:
            found, wanted = answer.token_logprobs, expected.token_logprobs
            np.testing.assert_allclose(found.logprobs[:, 0], wanted.logprobs[:, 0], atol=1e-4)
            np.testing.assert_array_equal(found.ranks, wanted.ranks)
    assert core.scheduler.drafts.counts.num_accepted_tokens - num_before > 25
    if "num_blocks" in options:
        assert any(answer.num_preemptions for answer in answers.values())


@pytest.mark.slow
def test_an_answer_takes_fewer_steps(core, make):
    num_steps = {}
    for num_drafts in (0, None):
        engines.reschedule(core)
        before = core.runner.num_steps
        answer = engines.run(core, [make("a", JSON, num_speculative_tokens=num_drafts)])["a"]
        assert answer.finish_reason is FinishReason.STOP
        num_steps[num_drafts] = core.runner.num_steps - before
    assert num_steps[None] <= 0.8 * num_steps[0]


@pytest.mark.slow
def test_steps_without_forced_tokens_sample_one_token_of_each_row(core, make, monkeypatch):
    engines.reschedule(core)
    engines.run(core, [make("compiles the grammar", {"regex": "[a-z]{8}"})])
    used, get = [], core.runner.programs.get
    monkeypatch.setattr(core.runner.programs, "get", lambda key: (used.append(key), get(key))[1])
    engines.run(core, [make("a", {"regex": "[a-z]{8}"})])
    assert {key.width for key in used if key.kind == "sample"} == {1}
    assert not {"propose", "drafts", "set_drafts"} & {key.kind for key in used}


def test_a_request_gets_the_drafts_of_its_grammar_and_no_more_than_it_asks_for():
    control = GrammarControl(7, most_drafts=lambda num_running: 7 if num_running < 3 else 0)
    plain, masked, modest = make_request("a", 4), make_request("b", 4), make_request("c", 4, num_speculative_tokens=2)
    masked.matcher = modest.matcher = SimpleNamespace(num_next_drafts=3)
    assert [control.of(request) for request in (plain, masked, modest)] == [0, 3, 2]
    assert (control.most(2), control.most(3)) == (7, 0)


@pytest.mark.parametrize(("seconds", "pays"), [(1.7, True), (1.8, False)])
def test_a_step_has_drafts_if_it_then_gives_more_tokens_in_its_time(seconds, pays):
    control = GrammarControl(7, most_drafts=lambda num_running: 7)
    requests = [make_request(str(row), 4) for row in range(4)]
    requests[0].matcher, requests[1].matcher = SimpleNamespace(num_next_drafts=2), SimpleNamespace(num_next_drafts=1)
    requests[2].matcher = SimpleNamespace(num_next_drafts=5)
    for request in requests[:2]:
        request.may_have_drafts = True
    for num_drafts, taken in [(2, seconds), (0, 1.0)] * 3:
        assert control.most(4, requests) == 7  # while it is not known
        control.note_seconds(4, num_drafts, taken)
    assert control.most(4, requests) == (7 if pays else 0) == control.num_now
    requests[2].may_have_drafts = True
    assert control.most(4, requests) == 7  # eight drafts; steps with more than four were not timed
    assert control.most(20, requests) == 7


def test_the_options_of_the_method():
    assert SpeculativeConfig.of({"method": "grammar"}).num_speculative_tokens == DEFAULT_FORCED
    assert SpeculativeConfig.of({"method": "grammar", "num_speculative_tokens": 3}).num_speculative_tokens == 3
    for name, value in (("model", "demo"), ("rejection_sample_method", "standard"), ("prompt_lookup_min", 2)):
        with pytest.raises(ConfigError, match=f"{name} is set, but it is for"):
            SpeculativeConfig.of({"method": "grammar", name: value})
    options = {"model": "demo", "speculative_config": {"method": "grammar"}}
    for parallel in ({"data_parallel_size": 2, "enable_expert_parallel": True}, {"nnodes": 2, "tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="method grammar is for engines on one host"):
            of_engine(EngineConfig.from_options(**options, **parallel))


@pytest.mark.slow
def test_on_two_devices(directory, make, without):
    config = {"method": "grammar", "num_speculative_tokens": 2}
    core = engines.make_core(NAME, tokenizer=str(directory), speculative_config=config, tensor_parallel_size=2)
    for name, answer in engines.run(core, several(make)[:2]).items():
        assert answer.tokens == without[name].tokens
    assert core.scheduler.drafts.counts.num_accepted_tokens > 5
    core.shutdown()
