"""The tokens that grammars force, along outputs of a small vocabulary."""

import json

import pytest

from jaxllm.request import Grammar
from jaxllm.structured.forced_tokens import likely_grammar
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.matcher import Matcher, Template
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.tiny_tokenizers import write_tokenizer

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"ab": TEXT, "cd": NUMBER}}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary.of(tokenizer, 160, (1,))


@pytest.fixture
def drafted(vocabulary, tokenizer):
    """The last token expected, and the drafts behind it, as texts, after an output and some drafts."""

    def find(output, drafts="", *, start_after=None, **form):
        def tokens(text):
            return tokenizer.encode(text, add_special_tokens=False)

        text = grammar_text(StructuredOutputsParams(**form), vocabulary.split)
        template = Template.of(vocabulary, Grammar(text), drafts_forced=True)
        matcher = Matcher(
            template, num_columns=160, eos_token_ids=vocabulary.eos_token_ids, start_after=start_after and tokens(start_after)
        )
        for token in tokens(output):
            matcher.advance(token)
        found = matcher.next_drafts(tokens(drafts))
        assert matcher.num_next_drafts == max(0, len(found) - 1)
        return "".join(map(tokenizer.token_text, found)).replace("Ġ", " ")

    return find


@pytest.mark.parametrize(
    ("output", "drafts", "expected"),
    [
        ("", "", '{"ab": "'),  # up to what the model has to say
        ('{"ab": "x', "", ""),
        ('{"ab": "x",', "", ' "cd": '),
        ('{"ab": "x",', ' "', 'cd": '),  # behind drafts that are right
        ('{"ab": "x",', ' "ab', 'cd": '),  # in place of the first that is wrong
        ('{"ab": "x",', ' "cd":', ""),  # of one token nothing can be drafted
        ('{"cd": 1, "c', "", ""),  # a property is missing: the grammar itself forces nothing
        ('{\n"ab":"x",', "", ""),  # other spaces
    ],
)
def test_of_json_the_usual_form_is_drafted(drafted, output, drafts, expected):
    assert drafted(output, drafts, json=SCHEMA) == expected


def test_what_a_grammar_forces_is_drafted_whatever_was_written_before(drafted):
    closed = {"type": "object", "properties": {"a name": TEXT}, "required": ["a name"], "additionalProperties": False}
    assert drafted('{\n"', json=closed) == "a name"
    assert drafted("no", regex="(yes|no), certainly!") == ", certainly!"
    assert drafted("b", choice=["answer", "but not"]) == "ut not"
    assert drafted("", structural_tag=json.dumps({"type": "structural_tag", "format": TAG})).startswith('<a>{"ab": ')
    assert drafted("", disable_any_whitespace=True, json=SCHEMA) == '{"ab":"'


def test_nothing_is_drafted_before_a_grammar_holds_or_after_its_end(drafted):
    assert drafted("x", start_after="ab", choice=["true"]) == ""
    assert drafted("xab", start_after="ab", choice=["true"]) == "true"
    assert drafted("true", choice=["true"]) == ""


def test_a_likely_grammar_that_nothing_matches_is_not_used(drafted):
    contradicting = {
        "allOf": [{"properties": {"ab": TEXT}, "required": ["ab"]}, {"properties": {"cd": TEXT}}],
        "type": "object",
    }
    assert drafted("", json={**contradicting, "required": ["cd"]}).startswith('{"')


def test_spaces_that_a_caller_asks_for_stay():
    form = StructuredOutputsParams(json=NUMBER, whitespace_pattern=" ?")
    assert likely_grammar(grammar_text(form, lambda text: []), all_properties=True) is None
    assert likely_grammar('start: "a"', all_properties=True) is None
