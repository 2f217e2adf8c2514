"""What a model's dialects mean for one answer."""

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs import StructuredOutputsParams
from server.dialects import Answer, ModelDialects, ToolChoice
from tests.server.dialects.samples import HERMES, ROME, TOOLS, Message, sum_of
from tests.server.dialects.test_constraint import bytes_tokenizer

TEMPLATE = "<tool_call> {% if enable_thinking %}</think>{% endif %}"
SPECIAL = ("<tool_call>", "</tool_call>", "</think>", "<|im_end|>")


def answer_for(
    choice: str, prompt: str = "Hi", template: str = TEMPLATE, special: tuple[str, ...] = SPECIAL, **options
) -> Answer:
    tokenizer = bytes_tokenizer(special)[0]
    dialects = ModelDialects(tokenizer, template, **options)
    tools = () if choice == "none" else TOOLS
    kind = ToolChoice("named", "run") if choice == "run" else ToolChoice(choice)  # type: ignore[arg-type]
    return dialects.answer(tools, kind, tokenizer.encode(prompt))


def test_names_of_parsers_win_over_the_template() -> None:
    tokenizer = bytes_tokenizer(())[0]
    found = ModelDialects(tokenizer, TEMPLATE)
    given = ModelDialects(tokenizer, TEMPLATE, tool_call_parser="mistral", reasoning_parser="none")
    assert (found.tool_name, found.reasoning_name) == ("hermes", "qwen3")
    assert (given.tool_name, given.reasoning_name) == ("mistral", None)
    with pytest.raises(ValueError):
        ModelDialects(tokenizer, TEMPLATE, tool_call_parser="nothing")


def test_markers_that_are_special_tokens_stay_in_the_text_and_others_are_left_out() -> None:
    answer = answer_for("auto")
    assert not answer.sampling_params(SamplingParams()).skip_special_tokens
    parser = answer.parser()
    text = f"<think>Hm.</think>{HERMES % ROME}<|im_end|>"
    assert sum_of([*parser.feed(text), *parser.finish()]) == Message("", "Hm.", [ROME])


def test_special_tokens_are_skipped_where_none_is_a_marker() -> None:
    answer = answer_for("auto", special=("<|im_end|>",))
    assert answer.sampling_params(SamplingParams()).skip_special_tokens
    assert not answer.sampling_params(SamplingParams(skip_special_tokens=False)).skip_special_tokens


def test_a_request_that_wants_special_tokens_sees_them() -> None:
    parser = answer_for("auto").parser(skip_special_tokens=False)
    assert sum_of([*parser.feed("Hello<|im_end|>"), *parser.finish()]) == Message("Hello<|im_end|>")


@pytest.mark.parametrize("choice", ["required", "run"])
def test_enforced_calls_are_a_constraint_after_the_reasoning(choice: str) -> None:
    structured = answer_for(choice).sampling_params(SamplingParams()).structured_outputs
    assert structured is not None and structured.grammar and structured.start_after_token_ids
    closed = answer_for(choice, "assistant\n<think>\n\n</think>\n\n").sampling_params(SamplingParams()).structured_outputs
    assert closed is not None and closed.start_after_token_ids is None


def test_reasoning_that_the_prompt_began_is_continued() -> None:
    answer = answer_for("required", "<|im_end|>assistant\n<think>\nSo")
    parser = answer.parser()
    assert sum_of([*parser.feed(" far.</think>"), *parser.finish()]).reasoning == "far."
    structured = answer.sampling_params(SamplingParams()).structured_outputs
    assert structured is not None and structured.start_after_token_ids


def test_another_constraint_waits_for_the_end_of_reasoning_and_excludes_enforced_calls() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    structured = answer_for("auto").sampling_params(params).structured_outputs
    assert structured is not None and structured.json_object and structured.start_after_token_ids
    with pytest.raises(InvalidRequestError) as caught:
        answer_for("required").sampling_params(params)
    assert caught.value.param == "tool_choice"


def test_without_a_known_format_calls_must_be_enforced() -> None:
    with pytest.raises(InvalidRequestError, match="--tool-call-parser"):
        answer_for("auto", template="{{ messages }}")
    assert answer_for("required", template="{{ messages }}").sampling_params(SamplingParams()).structured_outputs
    assert answer_for("none", template="{{ messages }}").sampling_params(SamplingParams()).structured_outputs is None


def test_tools_may_be_switched_off() -> None:
    assert answer_for("none", tool_call_parser="none")
    with pytest.raises(InvalidRequestError):
        answer_for("required", tool_call_parser="none")


def test_reasoning_tokens_of_a_whole_answer_are_counted() -> None:
    answer = answer_for("auto")
    token_ids = bytes_tokenizer(SPECIAL)[0].encode("<think>Hm.</think>Hello")
    assert answer.num_reasoning_tokens(token_ids) == len("Hm.") + 2  # the last letter of <think>, and the token </think>
    assert answer_for("auto", reasoning_parser="none").num_reasoning_tokens(token_ids) == 0
