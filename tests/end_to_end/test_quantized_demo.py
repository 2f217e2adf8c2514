"""The demo model with weights of few bits: it finds held-out text about as likely, and answers as before."""

import functools

import pytest

from jaxllm.hub import resolve_model
from scripts.demo_data import python_text, scoring, tasks
from scripts.demo_data.chat_tokenizer import END_OF_TEXT_ID
from scripts.evaluate_demo_model import Direct

pytestmark = pytest.mark.slow

NUM_WINDOWS, NUM_QUESTIONS = 4, 10


@functools.cache
def model(quantization):
    return Direct(resolve_model("demo"), quantization)


@functools.cache
def surprise(quantization):
    """Minus the log likelihood of a few windows of text."""
    subject = model(quantization)
    windows, _ = scoring.text_windows(subject.tokenizer, python_text.library_texts()[1][:1], END_OF_TEXT_ID)
    return -subject.log_likelihood(windows[:NUM_WINDOWS])


@pytest.mark.parametrize(("quantization", "limit"), [("fp8", 0.001), ("int8", 0.001), ("int4", 0.012)])
def test_text_is_about_as_likely(quantization, limit):
    """limit: of the bits per byte, as a share. Measured over 61 kB: see docs/MODELS.md."""
    assert 0 < abs(surprise(quantization) / surprise(None) - 1) < limit


def test_answers_with_the_fewest_bits_are_right():
    """Without quantisation all are."""
    subject, questions = model("int4"), tasks.held_out_questions(NUM_QUESTIONS)
    subject.batch = NUM_QUESTIONS
    share, report = scoring.score(questions, subject.answers(questions))
    assert share >= 0.9, report
