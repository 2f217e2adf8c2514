"""The process that compiles grammars: compiles valid ones, rejects others, and survives all of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from jaxllm.errors import InvalidRequestError, OverloadedError
from jaxllm.structured.compiler import GrammarCompiler
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.tiny_tokenizers import write_tokenizer

MANY_PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*a{i}.*b"} for i in range(40)]}
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return Vocabulary.of(tokenizer, tokenizer.vocab_size + 32, (tokenizer.eos_token_id,))


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(vocabulary, deadline_seconds=0.5)
    yield compiler
    compiler.shutdown()


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": True},
        {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/n"}}]}}}},
        {"json": {"type": "array", "minItems": 10**9}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"enum": [f"value {i}" for i in range(2000)]}},
        {"json_object": True, "disable_any_whitespace": True},
        {"json": {"type": "array"}, "whitespace_pattern": "[ ]?"},
        {"regex": "(a+)+$"},
        {"regex": "(x+x+)+y"},
        {"regex": "[ab]*a[ab]{24}"},
        {"regex": "a/b\\/c\nd"},
        {"choice": ["yes", 'a "quoted" \\ text\n', "日本語 😀"]},
        {"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'root ::= "a" digits\ndigits ::= [0-9]+'},
        {"grammar": 'start: item+\nitem: "x ::= 1" | "y"'},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
    ],
)
def test_a_good_form_becomes_a_grammar(compiler, form):
    grammar = compiler.compile(StructuredOutputsParams(**form))
    assert grammar.text and grammar.num_bytes > 0


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ({"json": {"type": "stsring"}}, ["#/type", "'stsring'"]),
        ({"json": False}, ["never be satisfied"]),
        ({"json": {"$ref": "#"}}, ["never be satisfied"]),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, ["never"]),
        ({"json": {"$ref": "http://169.254.169.254/latest"}}, ["#/$ref", "into the schema itself"]),
        ({"json": {"properties": {"a": {"$ref": "file:///etc/passwd"}}}}, ["#/properties/a/$ref"]),
        ({"json": {"properties": {"a": {"items": {"contains": {}}}}}}, ["#/properties/a/items/contains", "not supported"]),
        ({"json": {"not": {}}}, ["at #", "nsatisfiable"]),
        (
            {"json": {"type": "object", "patternProperties": {"a": {}}, "propertyNames": {"pattern": "b"}}},
            ["at #", "propertyNames"],
        ),
        ({"json": {"properties": {"x/y": {"type": "string", "pattern": "("}}}}, ["#/properties/x~1y", "unclosed group"]),
        ({"json": {"type": "string", "format": "nonsense"}}, ["at #", "nonsense"]),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 2}]}}, ["oneOf", "use anyOf"]),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, ["nsatisfiable"]),
        ({"json": MANY_PATTERNS}, ["takes more than"]),
        ({"regex": "("}, ["unclosed group"]),
        ({"regex": r"\1"}, ["backreferences"]),
        ({"regex": "(?=a)"}, ["look-ahead"]),
        ({"regex": "a{1000000}"}, ["structured_outputs.regex"]),
        ({"regex": "((a{1000}){1000}){1000}"}, ["structured_outputs.regex", "ask for something simpler"]),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, ["regex"]),
        ({"grammar": "start: nowhere"}, ["line 1 column 8", "nowhere"]),
        ({"grammar": 'a: "b"'}, ["start"]),
        ({"grammar": "start: start"}, ["never be satisfied"]),
        ({"grammar": CHAIN}, ["3002 rules", "2000"]),
        ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, ["nested"]),
        ({"grammar": 'root ::= "a" b\nb ::= ['}, ["GBNF", "line 2"]),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "wish"}}}, ["/format/type", "'wish'"]),
        ({"structural_tag": {"structures": [], "triggers": ["a"]}}, ["/structures", "non-empty"]),
    ],
)
def test_a_bad_form_is_refused_with_the_reason_and_its_place(compiler, form, parts):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**form))
    assert caught.value.param == "structured_outputs"
    for part in (next(iter(form)), *parts):
        assert part in str(caught.value)
    assert "<state>" not in str(caught.value) and len(str(caught.value)) < 500
    assert compiler.num_processes == 1


def test_an_answer_is_remembered(compiler):
    form = StructuredOutputsParams(regex="remember (me)?", start_after_token_ids=(3,))
    first = compiler.compile(form)
    again = compiler.submit(StructuredOutputsParams(regex="remember (me)?", start_after_token_ids=(4,)))
    assert again.done() and again.result().text == first.text
    assert (first.start_after_token_ids, again.result().start_after_token_ids) == ((3,), (4,))


@pytest.mark.slow
def test_what_takes_long_does_not_hold_up_the_others_and_may_come_again(compiler):
    forms = [StructuredOutputsParams(json={**MANY_PATTERNS, "title": f"one of five {i}"}) for i in range(5)]
    slow = [compiler.submit(form) for form in forms]
    quick = compiler.submit(StructuredOutputsParams(regex="quick[0-9]"))
    assert quick.result().text
    errors = [future.exception() for future in slow]
    assert all(isinstance(error, (OverloadedError, InvalidRequestError)) for error in errors)
    refused, error = next(
        (form, error) for form, error in zip(forms, errors, strict=True) if "while others wait; try again later" in str(error)
    )
    assert isinstance(error, OverloadedError)
    again = compiler.submit(refused)
    assert not again.done() and "others wait" not in str(again.exception())


def test_a_form_is_not_refused_because_the_machine_is_busy(vocabulary, monkeypatch):
    """Its child gets the processor for less than it needs within the limit of its CPU time."""
    compiler = GrammarCompiler(vocabulary, deadline_seconds=0.25)
    try:
        compiler.start()
        worker = compiler._process.pid
        job = compiler.submit(StructuredOutputsParams(json=MANY_PATTERNS))
        while not (children := Path(f"/proc/{worker}/task/{worker}/children").read_text().split()):
            time.sleep(0.01)
        os.kill(int(children[0]), signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            job.result(timeout=0.5)
        with pytest.raises(OverloadedError, match="was not compiled within 1.5 s, of which .* try again later"):
            job.result()
    finally:
        compiler.shutdown()


def test_a_cancelled_wait_disturbs_nobody(compiler):
    form = StructuredOutputsParams(regex="cancelled (me)?")
    cancelled, kept = compiler.submit(form), compiler.submit(form)
    cancelled.cancel()
    assert kept.result().text


def test_the_cache_is_bounded(vocabulary):
    compiler = GrammarCompiler(vocabulary, max_cache_bytes=6_000)
    try:
        for future in [compiler.submit(StructuredOutputsParams(regex=f"a{i}" * 50)) for i in range(20)]:
            future.result()
        assert 0 < compiler.num_cached_bytes <= 6_000
    finally:
        compiler.shutdown()


def test_a_process_that_is_killed_is_replaced_and_its_work_done_again(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    try:
        compiler.start()
        process = compiler._process
        os.kill(process.pid, signal.SIGSTOP)
        waiting = compiler.submit(StructuredOutputsParams(regex="a"))
        os.kill(process.pid, signal.SIGKILL)
        assert waiting.result().text
        assert compiler.num_processes == 2
    finally:
        compiler.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_tokenizer_of_another_kind_is_told(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "words"))
    compiler = GrammarCompiler(Vocabulary.of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,)))
    try:
        with pytest.raises(InvalidRequestError, match="tokenizer is not supported"):
            compiler.compile(StructuredOutputsParams(regex="a"))
        assert compiler.num_processes == 1
    finally:
        compiler.shutdown()


def test_after_shutdown_everything_is_refused(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    compiler.start()
    start = time.monotonic()
    compiler.shutdown()
    compiler.shutdown()
    assert time.monotonic() - start < 60
    with pytest.raises(InvalidRequestError, match="shut down"):
        compiler.compile(StructuredOutputsParams(regex="a"))
