"""Outputs under grammars, by a whole engine: always of their form, and the same tokens however the steps fall."""

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason, Grammar
from jaxllm.runner.runner import ModelRunner
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.matcher import Matcher, Template, fill_masks
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.logprobs import positions
from jaxllm.text.tokenizer import load_tokenizer
from scripts.gpu_checks.sampled_apart import sampling_apart
from tests.helpers import engines, goldens
from tests.helpers.slow import slow_except
from tests.helpers.tiny_tokenizers import write_tokenizer

NAME = "llama_gqa"
EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 500}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "whitespace_pattern": " ?"}
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def core(directory):
    core = engines.make_core(NAME, tokenizer=str(directory), block_size=8, num_gpu_blocks_override=60)
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary.of(tokenizer, 128, (EOS,))


@pytest.fixture
def structured(vocabulary):
    """A request under a grammar: `form` as StructuredOutputsParams has it."""

    def make(request_id, form, *, prompt=PROMPT, start_after=None, **params) -> EngineCoreRequest:
        text = grammar_text(StructuredOutputsParams(**form), vocabulary.split)
        params = {"temperature": 1.0, "seed": 3, "max_tokens": 60, **params}
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**params),
            eos_token_ids=(EOS,),
            grammar=Grammar(text, start_after_token_ids=start_after),
        )

    return make


def several(structured) -> list[EngineCoreRequest]:
    """Requests of every kind, one without a grammar. All for the full sampler ask for logprobs: one program less to compile."""
    return [
        structured("json 0", JSON),
        structured("json 1", JSON, seed=4, prompt=PROMPT[:3]),
        engines.request("plain", PROMPT[:20], max_tokens=25, temperature=0.9, seed=8),
        structured("regex", {"regex": "[ab]{3,9}"}, seed=5, min_tokens=5, logprobs=0),
        structured("choice", {"choice": ["true", "false", "null"]}, logprobs=2, temperature=0.0),
        structured("endless", {"regex": "[a-z]+"}, max_tokens=30, ignore_eos=True, prompt=PROMPT[:11]),
        structured("done", {"regex": "ab12"}, ignore_eos=True),
        structured("biased", {"regex": "[a-f]{4}"}, logit_bias={70: 5.0}, repetition_penalty=1.3, seed=6, logprobs=0),
        structured("late", {"regex": "0+"}, start_after=(9, 9), max_tokens=12, seed=7),
    ]


@pytest.fixture(scope="module")
def alone(core, vocabulary):
    """The output of each of `several` alone, with each step read before the next is planned: the simplest schedule."""
    engines.reschedule(core, async_scheduling=False, enable_prefix_caching=False)

    def make(*arguments, **options):
        return structured.__wrapped__(vocabulary)(*arguments, **options)

    answers = {}
    for request in several(make):
        answers |= engines.run(core, [request])
    return answers


def test_each_output_has_its_form(alone, tokenizer):
    def text(name):
        return tokenizer.decode(alone[name].tokens, skip_special_tokens=True)

    for name in ("json 0", "json 1"):
        assert alone[name].finish_reason is FinishReason.STOP and alone[name].tokens[-1] == EOS
        jsonschema.validate(json.loads(text(name)), SCHEMA)
    assert text("choice") in ("true", "false", "null")
    assert len(alone["regex"].tokens) >= 5 and set(text("regex")) <= set("ab") and 3 <= len(text("regex")) <= 9
    assert alone["endless"].finish_reason is FinishReason.LENGTH and len(alone["endless"].tokens) == 30
    assert text("endless").isalpha() and EOS not in alone["endless"].tokens
    assert (text("done"), alone["done"].finish_reason) == ("ab12", FinishReason.STOP) and EOS not in alone["done"].tokens
    assert len(text("biased")) == 4 and set(text("biased")) <= set("abcdef")


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 2},
        {"max_in_flight": 3},
        {"max_in_flight": 2, "apart": True},
        {"max_in_flight": 3, "max_num_batched_tokens": 12, "apart": True},
        {"max_in_flight": 3, "max_num_batched_tokens": 12},
        {"max_in_flight": 3, "num_blocks": 16, "enable_prefix_caching": False, "watermark": 0.0},
        {"async_scheduling": False, "max_num_batched_tokens": 7},
        {"max_in_flight": 3, "rows": True},
    ],
    ids=["async", "three in flight", "apart", "chunks apart", "chunks", "preemption", "chunks in turn", "rows"],
)
@pytest.mark.slow
def test_the_tokens_are_the_same_however_the_steps_fall(core, structured, alone, options):
    options = dict(options)
    is_apart, by_rows = options.pop("apart", False), options.pop("rows", False)
    engines.reschedule(core, **options)
    if is_apart:
        core.loop._mask_pace = SimpleNamespace(is_apart=True, note=lambda seconds, is_late: None)
    with sampling_apart(core) if by_rows else nullcontext({1}) as sizes:
        answers = engines.run(core, several(structured))
    assert sizes
    assert {name: answer.tokens for name, answer in answers.items()} == {name: a.tokens for name, a in alone.items()}
    assert {name: answer.finish_reason for name, answer in answers.items()} == {
        name: a.finish_reason for name, a in alone.items()
    }
    if "num_blocks" in options:
        assert any(answer.num_preemptions for answer in answers.values())


@pytest.mark.parametrize(
    "mode", slow_except(["raw_logprobs"], ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
)
def test_logprobs_are_those_among_the_allowed_tokens(core, structured, vocabulary, tokenizer, mode):
    """Against the model without an engine and a second matcher; a greedy token is the likeliest that is allowed."""
    engines.reschedule(core)
    other = core
    if mode != "raw_logprobs":  # only the programs that sample differ
        model = replace(core.config.model, logprobs_mode=mode)
        other = engines.twin(core, config=replace(core.config, model=model), kinds=("forward", "decode", "write_blocks"))
    requests = [
        structured("choice", {"choice": ["y", "n", "no"]}, logprobs=20, temperature=0.0),
        structured("regex", {"regex": "[a-z ]{12}"}, logprobs=20, temperature=0.0, logit_bias={70: -5.0}),
    ]
    answers = engines.run(other, requests)
    config, state = goldens.load(goldens.golden(NAME).directory)
    for request in requests:
        answer = answers[request.request_id]
        logits = goldens.logits(config, state, PROMPT + answer.tokens, pad_to=112).astype(np.float64)[len(PROMPT) - 1 : -1]
        matcher = Matcher(Template.of(vocabulary, request.grammar), num_columns=128, eos_token_ids=(EOS,))
        places = positions(answer.token_logprobs, 20, [], None)
        for token, place, expected in zip(answer.tokens, places, logits, strict=True):
            mask = np.full((1, 4), -1, np.int32)
            fill_masks([(matcher, 0, [])], mask)
            allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little").astype(bool)
            scores = np.where(allowed, expected, -np.inf)
            if mode.startswith("processed"):
                scores[list(request.sampling_params.logit_bias or {})] -= 5
            if mode.endswith("logprobs"):
                scores -= np.log(np.exp(scores).sum())
            assert len(place) >= min(20, allowed.sum()) and allowed[list(place)].all()
            np.testing.assert_allclose([entry.logprob for entry in place.values()], scores[list(place)], atol=1e-4)
            if request.request_id == "choice":
                assert token == scores.argmax()
            matcher.advance(token)
    if other is not core:
        other.shutdown()


def test_the_beginning_of_a_prompt_may_be_cached(core, structured):
    engines.reschedule(core, async_scheduling=True)
    first = engines.run(core, [structured("a", JSON)])["a"]
    second = engines.run(core, [structured("b", JSON)])["b"]
    assert second.num_cached_tokens > 0 and second.tokens == first.tokens


def test_steps_without_grammars_are_what_they_were(core, structured, monkeypatch):
    engines.reschedule(core)
    # The grammar is compiled first, so that "b" need not wait for it while "a" runs.
    engines.run(core, [structured("compiles the grammar", {"choice": ["ab"]})])
    used = []
    get = core.runner.programs.get
    monkeypatch.setattr(core.runner.programs, "get", lambda key: (used.append(key), get(key))[1])
    engines.run(core, [engines.request("a", PROMPT, max_tokens=6, temperature=0.9), structured("b", {"choice": ["ab"]})])
    masked = [key.variant == Variant.MASKED for key in used if key.kind in ("sample", "decode")]
    assert True in masked and masked[-1] is False and used[-1].kind == "decode"


@pytest.mark.parametrize(
    ("form", "params"),
    [
        ({"regex": "[0-9]+"}, {"allowed_token_ids": [70, 71]}),
        ({"choice": ["t"]}, {"bad_words_token_ids": [[85]]}),
        ({"regex": "é"}, {}),
    ],
    ids=["allowed ids", "bad words", "no such token"],
)
def test_who_is_left_no_token_ends_with_an_error_alone(core, structured, alone, form, params):
    engines.reschedule(core)
    requests = [structured("json 0", JSON), structured("nothing", form, logprobs=0, **params)]
    answers = engines.run(core, requests)
    assert answers["nothing"].finish_reason is FinishReason.ERROR
    assert "token" in answers["nothing"].stop_reason and not answers["nothing"].tokens
    assert answers["json 0"].tokens == alone["json 0"].tokens


def test_an_exception_in_following_one_output_ends_that_request_alone(core, structured, alone, monkeypatch):
    engines.reschedule(core)
    advance, victims = Matcher.advance, []

    def fail_once(matcher, token):
        if not victims:
            victims.append(matcher)
        if matcher is victims[0]:
            raise ValueError("a fault")
        advance(matcher, token)

    monkeypatch.setattr(Matcher, "advance", fail_once)
    answers = engines.run(core, [structured("victim", JSON), structured("json 0", JSON)])
    assert answers["victim"].finish_reason is FinishReason.ERROR
    assert answers["json 0"].tokens == alone["json 0"].tokens


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(core, structured, alone):
    engines.reschedule(core)
    broken = EngineCoreRequest(
        request_id="broken",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(seed=1),
        eos_token_ids=(EOS,),
        grammar=Grammar("start: nowhere"),
    )
    answers = engines.run(core, [broken, structured("json 0", JSON)])
    assert answers["broken"].finish_reason is FinishReason.ERROR
    assert answers["json 0"].tokens == alone["json 0"].tokens


def test_others_go_on_while_a_grammar_is_compiled(core, structured, monkeypatch):
    engines.reschedule(core)
    may_go_on, compile_template = threading.Event(), Template.of.__func__

    def wait_and_compile(cls, vocabulary, grammar, **options):
        assert may_go_on.wait(60)
        return compile_template(cls, vocabulary, grammar, **options)

    monkeypatch.setattr(Template, "of", classmethod(wait_and_compile))
    core.add_request(structured("waits", {"regex": "ab1{2}"}))
    core.add_request(structured("aborted", {"regex": "ab1{3}"}))
    answer = engines.Answer()
    core.add_request(engines.request("plain", PROMPT, max_tokens=5, temperature=0.9))
    while answer.finish_reason is None:
        for output in core.step():
            assert output.request_id == "plain"
            answer.take(output)
    core.abort_requests(["aborted"])
    may_go_on.set()
    rest = engines.run(core, [])
    assert set(rest) == {"waits"} and rest["waits"].finish_reason is FinishReason.STOP


def test_a_step_that_fails_before_its_draw_is_computed_again(core, structured, alone, monkeypatch):
    broken = engines.twin(core)
    sample, faults = ModelRunner._sample, [3]

    def fail_once(runner, step):
        faults[0] -= 1
        if faults[0] == 0:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory, says the test")
        return sample(runner, step)

    monkeypatch.setattr(ModelRunner, "_sample", fail_once)
    answers = engines.run(broken, [structured("json 0", JSON), structured("json 1", JSON, seed=4, prompt=PROMPT[:3])])
    broken.shutdown()
    assert faults[0] < 0
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: alone[name].tokens for name in ("json 0", "json 1")
    }


def test_aborting_in_every_state_leaves_nothing_behind(core: EngineCore, structured):
    engines.reschedule(core, max_in_flight=3)
    for num_steps in range(6):
        for name in ("a", "b"):
            core.add_request(structured(name, JSON, ignore_eos=False))
        for _ in range(num_steps):
            core.step()
        core.abort_requests(["a", "b"])
        engines.run(core, [structured("after", {"choice": ["ab"]})])
    core.check_integrity()


def test_the_kind_of_the_error_is_told(core, structured):
    engines.reschedule(core)
    core.add_request(structured("nothing", {"regex": "é"}))
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step()
    assert [output.error_kind for output in outputs] == [ErrorKind.CONSTRAINT]
