"""Masks of single outputs, by a matcher over a small vocabulary, against the texts that their grammars describe."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import jaxllm
from jaxllm.errors import GrammarError
from jaxllm.request import Grammar
from jaxllm.structured import matcher as matcher_module
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.matcher import Matcher, Template, fill_masks
from jaxllm.structured.token_table import Vocabulary, parser_limits
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.tiny_tokenizers import write_tokenizer

EOS = 1
DEMO = Path(jaxllm.__file__).parent / "data" / "demo"
NUM_COLUMNS = 160
"""More than there are tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary.of(tokenizer, NUM_COLUMNS, (EOS,))


def matcher(vocabulary, *, num_columns=NUM_COLUMNS, ends_at_eos=True, start_after=None, **form):
    text = grammar_text(StructuredOutputsParams(**form), vocabulary.split)
    template = Template.of(vocabulary, Grammar(text))
    eos = vocabulary.eos_token_ids
    return Matcher(template, num_columns=num_columns, eos_token_ids=eos, ends_at_eos=ends_at_eos, start_after=start_after)


def allowed(*matchers, num_columns=NUM_COLUMNS):
    """The allowed tokens of each."""
    mask = np.full((len(matchers), -(-num_columns // 32)), -1, np.int32)
    fill_masks([(matcher, row, []) for row, matcher in enumerate(matchers)], mask)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    sets = [set(np.flatnonzero(row).tolist()) for row in bits]
    return sets if len(sets) > 1 else sets[0]


def follow(matcher, tokenizer, text):
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(matcher)
        matcher.advance(token)


def test_exactly_the_tokens_that_begin_a_text_are_allowed(vocabulary, tokenizer):
    tokens = {tokenizer.token_text(token): token for token in range(2, tokenizer.vocab_size)}
    texts = ("abc", "ac", "x")
    expected = {token for text, token in tokens.items() if text and any(whole.startswith(text) for whole in texts)}
    assert allowed(matcher(vocabulary, choice=texts)) == expected == {tokens["a"], tokens["ab"], tokens["x"]}


def test_sets_of_tokens_that_masks_take_over_whole_change_no_mask():
    tokenizer = load_tokenizer(DEMO)
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    without = LLTokenizer(
        vocabulary.tokenizer_json, n_vocab=tokenizer.vocab_size, eos_token=[tokenizer.eos_token_id], slices=[]
    )
    text = grammar_text(StructuredOutputsParams(json={"type": "string", "maxLength": 33}), vocabulary.split)
    outputs = [LLMatcher(table, text, log_level=0, limits=parser_limits()) for table in (vocabulary.table, without)]
    masks = []
    for token in without.tokenize_str('"' + "é\\n" + "x" * 31 + '"'):
        found, expected = (output.compute_bitmask() for output in outputs)
        assert found == expected
        masks.append(found)
        assert all(output.consume_token(token) for output in outputs)
    assert len(set(masks)) > 20  # of many lengths that are left


def test_of_what_is_certain_to_come_the_usual_tokens_are_allowed(vocabulary, tokenizer):
    assert allowed(matcher(vocabulary, choice=["abc"])) == set(tokenizer.encode("abc", add_special_tokens=False)[:1])


def test_where_a_text_may_end_eos_is_allowed(vocabulary, tokenizer):
    output = matcher(vocabulary, regex="ab?")
    assert EOS not in allowed(output)
    follow(output, tokenizer, "a")
    assert EOS in allowed(output) and len(allowed(output)) == 2
    output.advance(EOS)
    assert not output.is_done


def test_without_an_eos_an_output_is_done_when_nothing_can_follow(vocabulary, tokenizer):
    output = matcher(vocabulary, regex="ab?", ends_at_eos=False)
    follow(output, tokenizer, "a")
    assert EOS not in allowed(output) and not output.is_done
    follow(output, tokenizer, "b")
    assert output.is_done


def test_before_it_begins_everything_is_allowed(vocabulary, tokenizer):
    output = matcher(vocabulary, choice=["ab"], start_after=(5, 6))
    for token in (5, 5, 7, 6, 5, 5):
        output.advance(token)
        assert output.num_free([]) is None and len(allowed(output)) == NUM_COLUMNS
    output.advance(6)
    assert output.num_free([]) == 0 and allowed(output) == set(tokenizer.encode("ab", add_special_tokens=False))


def test_many_outputs_are_filled_at_once_each_with_its_own(vocabulary, tokenizer):
    outputs = [matcher(vocabulary, regex=f"{letter}x") for letter in "abcdefghijkl"]
    follow(outputs[3], tokenizer, "d")
    together = allowed(*outputs)
    assert together == [allowed(output) for output in outputs]
    assert together[3] == set(tokenizer.encode("x", add_special_tokens=False))


def test_an_output_that_leaves_its_grammar_cannot_go_on(vocabulary):
    output = matcher(vocabulary, regex="a")
    with pytest.raises(GrammarError, match="left its grammar"):
        output.advance(2)


def test_a_mask_that_allows_nothing_lets_the_next_token_end_the_output(vocabulary):
    output = matcher(vocabulary, regex="é")
    assert len(allowed(output)) == NUM_COLUMNS
    with pytest.raises(GrammarError, match="no token"):
        output.advance(2)


DIGITS = {"json": {"type": "array", "items": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "drafts", "num_right"),
    [
        (DIGITS, "[12,345]", 8),
        ({"regex": "abc*"}, "abccc", 5),
        ({"regex": "abc*"}, "abxcc", 2),
        ({"regex": "abc"}, "abccc", 3),
        ({"choice": ["ab", "abc"]}, "x", 0),
        ({"regex": "abc*", "ends_at_eos": False}, "abcc", 4),
        ({"regex": "abc*", "start_after": (9, 8)}, [9, 8, "abc"], 5),
        ({"regex": "abc*", "start_after": (9, 8)}, [7, 9, "abc"], 5),
        ({"regex": "abc*", "start_after": (9, 8)}, [9, 9, 8, "abx", 5], 5),
    ],
)
def test_the_masks_behind_drafts_are_those_of_an_output_with_these_tokens(vocabulary, tokenizer, form, drafts, num_right):
    """One by one or with others at once, and the output itself stays where it is."""
    ids = [*drafts] if isinstance(drafts, list) else [drafts]
    letters = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcx[]12345,"}
    ids = [token for part in ids for token in ([part] if isinstance(part, int) else [letters[letter] for letter in part])]
    outputs = [matcher(vocabulary, **form), matcher(vocabulary, regex="b+"), matcher(vocabulary, **form)]
    size = 1 + len(ids)
    mask = np.full((2 * size + 1, NUM_COLUMNS // 32), -1, np.int32)
    fill_masks([(outputs[0], 0, ids), (outputs[1], size, []), (outputs[2], size + 1, ids[:1])], mask)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    found = [set(np.flatnonzero(row).tolist()) for row in bits]
    by_hand = matcher(vocabulary, **form)
    for index, token in enumerate([*ids[:num_right], None]):
        assert found[index] == allowed(by_hand), index
        if index < 2:
            assert found[size + 1 + index] == found[index]
        if token is not None:
            by_hand.advance(token)
    assert all(len(tokens) == NUM_COLUMNS for tokens in found[num_right + 1 : size])
    assert found[size] == allowed(matcher(vocabulary, regex="b+"))
    for token in ids[:num_right]:
        outputs[0].advance(token)
    assert allowed(outputs[0]) == allowed(by_hand)


def test_a_dead_end_behind_a_draft_ends_the_output_only_if_the_draft_is_right(vocabulary, tokenizer):
    a, b, x = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abx")
    for drawn in ([a, b], [a, x, x]):
        output = matcher(vocabulary, regex="a(bé|xx)")
        mask = np.full((4, NUM_COLUMNS // 32), -1, np.int32)
        fill_masks([(output, 0, [a, b, a])], mask)
        output.advance(a)
        output.advance(drawn[1])
        if drawn[1] == b:
            with pytest.raises(GrammarError, match="no token"):
                output.advance(a)
        else:
            assert allowed(output) == {x}
            output.advance(x)


def test_tokens_beyond_the_models_columns_are_never_allowed(vocabulary, tokenizer):
    output = matcher(vocabulary, regex="(?s:.*)", num_columns=96)
    assert max(allowed(output, num_columns=96)) < 96


def test_outputs_side_by_side_share_few_lexers_and_compile_nothing(vocabulary, monkeypatch):
    monkeypatch.setattr(matcher_module, "_num_threads", lambda: 4)
    monkeypatch.setattr(matcher_module, "_CHEAP_SECONDS", 60)
    grammar = Grammar(grammar_text(StructuredOutputsParams(regex="[ab]{9}"), vocabulary.split))
    template = Template.of(vocabulary, grammar)
    monkeypatch.setattr(matcher_module, "LLMatcher", None)  # it recurses deeply, and the engine's thread has a small stack
    outputs = [Matcher(template, num_columns=NUM_COLUMNS, eos_token_ids=(EOS,)) for _ in range(10)]
    assert sorted(Counter(output.lexer for output in outputs).values()) == [2, 2, 3, 3]
    assert len({frozenset(found) for found in allowed(*outputs)}) == 1
    monkeypatch.undo()
    monkeypatch.setattr(matcher_module, "_CHEAP_SECONDS", 0)
    assert len(Template.of(vocabulary, grammar).originals) == 1


def test_outputs_of_one_template_do_not_know_each_other(vocabulary, tokenizer):
    template = Template.of(vocabulary, Grammar("start: /[abc]+/"))
    first, second = (Matcher(template, num_columns=NUM_COLUMNS, eos_token_ids=(EOS,)) for _ in range(2))
    follow(first, tokenizer, "a")
    follow(second, tokenizer, "ab")


@pytest.mark.parametrize(
    ("structural_tag", "texts"),
    [
        (
            {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]},
            {"free text": True, "x<f=a>1</f> y<f=a>1</f>": True, "x<f=b>1</f>": False, "<f=a>2</f>": False, "<f=a>1</f": False},
        ),
        (
            {"type": "structural_tag", "format": {"type": "const_string", "value": "a b"}},
            {"a b": True, "a": False},
        ),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                        {
                            "type": "or",
                            "elements": [{"type": "regex", "pattern": "a/b+"}, {"type": "const_string", "value": "k"}],
                        },
                    ],
                },
            },
            {"<think>any < text</think>a/bb": True, "<think></think>k": True, "<think>x</think>": False, "k": False},
        ),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<a>", "<b>"],
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<a>",
                            "content": {"type": "json_schema", "json_schema": {"const": 1}},
                            "end": ".",
                        },
                        {"type": "tag", "begin": "<b>", "content": {"type": "grammar", "grammar": 'start: "x"+'}, "end": "."},
                    ],
                },
            },
            {"text <a>1.": True, "<b>xx.": True, "text": False, "<a>1.<b>x.": False},
        ),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "tags_with_separator",
                    "separator": ";",
                    "tags": [{"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ")"}],
                },
            },
            {"(1);(2)": True, "(1)": True, "": True, "(1)(2)": False, "(1);": False},
        ),
    ],
)
def test_structural_tags_describe_the_texts_that_they_should(vocabulary, tokenizer, structural_tag, texts):
    for text, fits in texts.items():
        output = matcher(vocabulary, structural_tag=structural_tag)
        try:
            for token in tokenizer.encode(text, add_special_tokens=False):
                output.advance(token)
            found = EOS in allowed(output)
        except GrammarError:
            found = False
        assert found == fits, text


def test_a_marker_of_the_tokenizer_is_written_as_its_token(vocabulary):
    assert [part.special_id for part in vocabulary.split("a</s>b<s>")] == [None, EOS, None, 0]
    assert "".join(part.text for part in vocabulary.split("a</s>b<s>")) == "a</s>b<s>"
