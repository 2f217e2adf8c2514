"""Guarantees of the stream of deltas, and text that turns out not to be a call."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.dialects import (
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from tests.server.dialects.samples import (
    DEEPSEEK,
    HERMES,
    KIMI,
    KIMI_SECTION,
    LLAMA,
    PARIS,
    ROME,
    TIME,
    V31,
    Message,
    parse,
    parser_for,
)

THOUGHT = "<think>\nHm.\n</think>\n\n"


def deltas_of(pieces, *args, **options):
    parser = parser_for(*args, **options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def test_a_call_begins_with_its_name_and_goes_on_with_fragments() -> None:
    start, *rest = deltas_of(HERMES % PARIS, "hermes", None)
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "get_weather")
    assert start.id.startswith("call_") and len(start.id) == 29
    assert len(rest) > 10 and all(isinstance(delta, ToolCallArguments) and delta.index == 0 for delta in rest)
    assert "".join(delta.text for delta in rest) == PARIS[1]


def test_arguments_are_given_out_as_they_come() -> None:
    parser = parser_for("hermes", None)
    parser.feed('<tool_call>\n{"name": "run", "arguments": {"code": "a')
    assert parser.feed("bc") == [ToolCallArguments(0, "bc")]


def test_several_calls_in_one_piece_have_their_own_numbers_and_ids() -> None:
    starts = [one for one in deltas_of([HERMES % PARIS + HERMES % ROME], "hermes", None) if isinstance(one, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1]
    assert len({start.id for start in starts}) == 2


def test_ids_are_those_that_the_model_expects() -> None:
    kimi = deltas_of([KIMI_SECTION % (KIMI % ("run", 7, "{}"))], "kimi_k2", None)
    mistral = deltas_of(["[TOOL_CALLS]run{}"], "mistral", None)
    assert isinstance(kimi[0], ToolCallStart) and kimi[0].id == "functions.run:7"
    assert isinstance(mistral[0], ToolCallStart) and len(mistral[0].id) == 9 and mistral[0].id.isalnum()


def test_no_two_calls_have_one_id() -> None:
    twice = KIMI_SECTION % (KIMI % ("run", 0, "{}") * 3)
    assert len({one.id for one in deltas_of([twice], "kimi_k2", None) if isinstance(one, ToolCallStart)}) == 3


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", HERMES % PARIS + HERMES % ROME),
        ("llama3_json", f"{LLAMA % PARIS}; {LLAMA % ROME}"),
        ("deepseek_v31", DEEPSEEK % (V31 % PARIS + V31 % ROME)),
    ],
)
@pytest.mark.parametrize("hold", [False, True])
def test_without_parallel_calls_the_first_is_kept(dialect: str, text: str, hold: bool) -> None:
    assert parse(text, dialect, parallel=False, hold_calls=hold) == Message("", "", [PARIS])


def test_calls_change_the_finish_reason_of_a_natural_end_only() -> None:
    parser = parser_for("hermes", None)
    assert parser.finish_reason("stop") == "stop"
    parser.feed(HERMES % PARIS)
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_without_a_tool_dialect_calls_are_content() -> None:
    assert parse(HERMES % PARIS) == Message(HERMES % PARIS)


def test_content_comes_without_waiting() -> None:
    parser = parser_for("hermes", "qwen3")
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" there <") == [Content(" there")]
    assert parser.feed(" 3") == [Content(" < 3")]


def test_reasoning_comes_without_waiting() -> None:
    parser = parser_for("hermes", "deepseek_r1")
    assert parser.in_reasoning
    assert parser.feed("Hm") == [Reasoning("Hm")]
    parser.feed("</think>")
    assert not parser.in_reasoning


def test_special_tokens_are_left_out() -> None:
    text = THOUGHT + "<|x|>Hello<|im_end|> there <|im_end" + HERMES % ROME + "<|im_end|>"
    for pieces in ([text], list(text)):
        assert parse(pieces, "hermes", "qwen3", special_tokens=("<|im_end|>", "<|x|>", "<|im_start|>")) == Message(
            "Hello there <|im_end", "Hm.", [ROME]
        )


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|user|>Hi<|assistant|><think>\n", True),
        ("<|user|>Hi<|assistant|><think>\n\n</think>\n\n", False),
        ("<|user|>Hi<|assistant|>", None),
        ("<|user|>What is <think><|assistant|>", None),
        ("<|user|>Hi<|assistant|><think>So far", True),
        ("<|user|>Hi<|assistant|><think>a</think>So far", None),
    ],
)
def test_the_prompt_tells_whether_reasoning_is_open(prompt: str, is_open: bool | None) -> None:
    assert REASONING_DIALECTS["qwen3"].state_after(prompt, ("<|user|>", "<|assistant|>")) is is_open


def test_a_harmony_message_that_the_prompt_began_is_continued() -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>So"
    assert parse(" far.<|end|>", "openai", "openai_gptoss", prompt_text=prompt) == Message("", " far.")


BROKEN = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>__import__('os').system('x')</tool_call>",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call><tool_call>",
        f"<tool_call>{'[' * 1000}",
    ],
    "llama3_json": ['{"name": "Ada", "age": 36}', "{}", "[]", "{'name': 'get_time'}", "[[[["],
    "pythonic": ["[get_time(1)]", "[get_time]", "[__import__('os')]", "[nothing()]", "[get_time(*a)]", "[1, 2]"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]run", "[TOOL_CALLS][", "[TOOL_CALLS]run[1]", "[TOOL_CALLS][]"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>Hello", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f"],
    "kimi_k2": ["<|tool_calls_section_begin|>Hello", "<|tool_calls_section_begin|><|tool_call_begin|>f{}"],
    "qwen3_coder": ["<tool_call>Hello</tool_call>", "<function=a b></function>", "<tool_call>\n<function="],
    "glm45": ["<tool_call>not a name\n</tool_call>", "<tool_call>"],
    "gemma4": [
        "<|tool_call>Hello",
        "<|tool_call>call:a b{}<tool_call|>",
        "<|tool_call>call:run{code}",
        "<|tool_call>call:run{code:<",
    ],
    "minimax_m3": ["]<]minimax[>[<tool_call>Hello", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="a b">'],
    "kimi_k3": ["<|open|>tools<|sep|>Hello", '<|open|>tools<|sep|><|open|>call tool="a b"<|sep|>'],
    "lfm2": ["<|tool_call_start|>get_time()<|tool_call_end|>", "[get_time(a=1)]"],
    "olmo3": ["<function_calls>", "<function_calls>\n</function_calls>", "<function_calls>[get_time()]</function_calls>"],
    "deepseek_v4": ["<｜DSML｜tool_calls>Hello", '<｜DSML｜tool_calls><｜DSML｜invoke name="a b">'],
    "cohere_command3": ['<|START_ACTION|>[{"name": "get_time", "parameters": {}}]<|END_ACTION|>'],
}
CASES = [(dialect, text) for dialect, texts in BROKEN.items() for text in texts]


@pytest.mark.parametrize(("dialect", "text"), CASES)
def test_what_is_no_call_is_content(dialect: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, dialect) == Message(text)


def test_a_call_that_breaks_is_content_as_a_whole_where_calls_are_held() -> None:
    text = 'So: <tool_call>{"name": "run", "arguments": {"code": "x", }}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(pieces, "hermes", hold_calls=True) == Message(text)


def test_a_call_that_breaks_in_a_stream_loses_nothing() -> None:
    text = '<tool_call>{"name": "run", "arguments": {"code": "x", }}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(pieces, "hermes") == Message("}}</tool_call>", "", [("run", '{"code": "x", ')])


def test_the_calls_before_a_broken_one_stand() -> None:
    text = HERMES % ROME + "\n<tool_call>{broken}</tool_call>"
    for hold in (False, True):
        assert parse(text, "hermes", hold_calls=hold) == Message("<tool_call>{broken}</tool_call>", "", [ROME])


WORDS = [
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "get_time"',
        ', "arguments": {',
        '"a": ',
        "1",
        '"b\\n"',
        "}",
        "[",
        "]",
        " ",
        "\n",
        "x",
        "é",
    ),
    *("<think>", "</think>", "<|im_end|>", "<function=get_time>", "<parameter=a>", "</parameter>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "get_time", "(a=", "'", '"', ")", ",", ";", "\\"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>analysis", "<|channel|>commentary to=functions.get_time"),
    *("<|message|>", "<|end|>", "<|start|>assistant", "```json", "```", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    ),
    *(
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="get_time">',
        '<｜DSML｜parameter name="a" string="',
        "true",
        "false",
        '">',
    ),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "<function_calls>", "</function_calls>"),
    *("<|tool_call_start|>", "<|START_ACTION|>", '{"tool_name": "get_time"', "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<answer>", "</answer>", "<response>", "</response>", "<ifm|tool_calls>", "<ifm|tool_call>", "<ifm|arg_key>"),
    *("]<]minimax[>[", "<tool_call>", '<invoke name="get_time">', "<a>", "</a>", "<item>", "</item>", "</invoke>"),
    *("<|open|>tools<|sep|>", '<|open|>call tool="run"<|sep|>', '<|open|>argument key="a" type="', 'object"<|sep|>'),
    *("<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<start_function_call>", "<escape>"),
]
PAIRS = [(tool, tool if tool in REASONING_DIALECTS else "qwen3") for tool in TOOL_DIALECTS if tool != "hf"]  # needs a template
PAIRS += [("hermes", reasoning) for reasoning in REASONING_DIALECTS.keys() - TOOL_DIALECTS.keys()]


@settings(max_examples=150)
@given(
    st.sampled_from(PAIRS),
    st.lists(st.sampled_from(WORDS), max_size=25).map("".join),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_any_text_means_the_same_however_it_is_cut(pair, text: str, hold: bool, sizes: list[int]) -> None:
    options = {"hold_calls": hold, "special_tokens": ("<|im_end|>", "<|python_tag|>")}
    pieces, rest, lengths = [], text, itertools.cycle(sizes)
    while rest:
        length = next(lengths)
        pieces.append(rest[:length])
        rest = rest[length:]
    whole = parse(text, *pair, **options)
    assert parse(list(text), *pair, **options) == whole
    assert parse(pieces, *pair, **options) == whole


SIZE = 1 << 20
HOSTILE = {
    "hermes": [
        "[",
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"name": "get_time", "arguments": {"a": "',
        " ",
        "<",
        HERMES % TIME,
    ],
    "llama3_json": ["{", '{"name": "get_time", "parameters": {"a":', "<|python_tag|>["],
    "pythonic": ["[", "[get_time(", "[get_time(a=[", "[get_time(a='\\", "[__import__('os').system('x')]"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]a"],
    "qwen3_coder": ["<tool_call><function=get_time>", "<parameter=a>", "<function=get_time><parameter=a>"],
    "glm45": ["<tool_call>get_time<arg_key>"],
    "olmo3": ["<function_calls>", "<function_calls>get_time()\n", "get_time()\n"],
    "deepseek_v4": ['<｜DSML｜tool_calls><｜DSML｜invoke name="get_time">', '<｜DSML｜parameter name="a" string="true">'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|>"],
    "gemma4": ["<|tool_call>call:run{", "<|tool_call>call:run{a:[", '<|tool_call>call:run{a:<|"|>'],
    "minimax_m3": [
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_time">',
        "]<]minimax[>[<a>",
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="run">]<]minimax[>[<options>',
    ],
    "kimi_k3": ['<|open|>tools<|sep|><|open|>call tool="run"<|sep|>', '<|open|>argument key="a" type="string"<|sep|>'],
    "openai": ["<|channel|>", "<|start|>", "<|channel|>commentary to=functions.f<|message|>{"],
}


@pytest.mark.parametrize("dialect", HOSTILE)
def test_a_megabyte_of_hostile_text_takes_less_than_a_second(dialect: str) -> None:
    for unit in HOSTILE[dialect]:
        text = unit * (SIZE // len(unit))
        parser = parser_for(dialect, "qwen3", special_tokens=[f"<|reserved_{index}|>" for index in range(250)])
        began = time.process_time()
        for at in range(0, len(text), 4096):
            parser.feed(text[at : at + 4096])
        parser.finish()
        assert time.process_time() - began < 1, unit


@pytest.mark.parametrize(
    "opening", ['<tool_call>{"name": "get_time", "arguments": {"a": [', '<tool_call>{"name": "get_time", "arguments": {']
)
def test_a_megabyte_of_arguments_takes_less_than_a_second(opening: str) -> None:
    for unit in ("0,", '"a":1,', "\\n", '"a","b",', "1"):
        parser = parser_for("hermes", None)
        began = time.process_time()
        parser.feed(opening + unit * (SIZE // len(unit)))
        parser.finish()
        assert time.process_time() - began < 1, unit
