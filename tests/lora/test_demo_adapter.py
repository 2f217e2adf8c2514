"""The adapter that comes with the demo model answers as a pirate does, and as rightly as the model, with which it shares steps."""

import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from scripts.demo_data import pirate, scoring, tasks

NUM_QUESTIONS = 12
SIZES = {"max_num_seqs": 16, "max_model_len": 512, "token_buckets": (512,), "decode_buckets": (16,)}


@pytest.mark.slow
def test_the_demo_adapter_answers_in_its_style_and_leaves_the_answers_of_the_model_alone() -> None:
    questions = [question for question in tasks.held_out_questions(2 * NUM_QUESTIONS) if not question.tools][:NUM_QUESTIONS]
    in_style = [pirate.as_pirate(question) for question in questions]
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM("demo", enable_lora=True, max_lora_rank=8, use_progress_bar=False, **SIZES) as llm:

        def ask(asked, adapters=None):
            conversations = [list(question.messages[:-1]) for question in asked]
            return [output.outputs[0].text for output in llm.chat(conversations, params, lora_request=adapters)]

        alone = ask(questions[:6])
        both = [question for pair in zip(questions, in_style, strict=True) for question in pair]
        answers = ask(both, [None, LoRARequest("pirate", 1, "demo_pirate")] * NUM_QUESTIONS)
    plain, adapted = answers[::2], answers[1::2]
    assert plain[:6] == alone
    assert pirate.share_in_style(in_style, adapted) >= 0.95
    right, report = scoring.score(questions, plain)
    right_in_style, report_in_style = scoring.score(in_style, adapted)
    assert right >= 0.9, report
    assert right_in_style >= right - 0.1, report_in_style
