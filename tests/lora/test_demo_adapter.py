"""The adapter that comes with the demo model: it answers as a pirate does and as rightly as the model, beside which it runs."""

from jaxllm import LLM, LoRARequest, SamplingParams
from scripts.demo_data import pirate, scoring, tasks

NUM_QUESTIONS = 48


def test_the_demo_adapter_answers_in_its_style_and_leaves_the_models_answers_alone():
    questions = [question for question in tasks.held_out_questions(2 * NUM_QUESTIONS) if not question.tools][:NUM_QUESTIONS]
    in_style = [pirate.as_pirate(question) for question in questions]
    asked = [list(question.messages[:-1]) for question in (*questions, *in_style)]
    adapters = [None] * len(questions) + [LoRARequest("pirate", 1, "demo_pirate")] * len(questions)
    params = SamplingParams(temperature=0, max_tokens=64)
    sizes = {"max_num_seqs": 16, "max_model_len": 512, "token_buckets": (512,), "decode_buckets": (16,)}
    with LLM("demo", enable_lora=True, max_lora_rank=8, use_progress_bar=False, **sizes) as llm:
        alone = llm.chat(asked[: len(questions)], params)
        outputs = [output.outputs[0].text for output in llm.chat(asked, params, lora_request=adapters)]
    plain, adapted = outputs[: len(questions)], outputs[len(questions) :]
    assert plain == [output.outputs[0].text for output in alone]
    assert pirate.share_in_style(in_style, adapted) >= 0.95
    right, report = scoring.score(questions, plain)
    right_in_style, report_in_style = scoring.score(in_style, adapted)
    assert right >= 0.9, report
    assert right_in_style >= right - 0.1, report_in_style
