"""Answers in every dialect, with what they mean. The wording is made up; the formats are those of the models."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from server.dialects import (
    REASONING_DIALECTS,
    Content,
    Delta,
    Reasoning,
    StreamParser,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    by_name,
)

TOOLS = (
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}),
    Tool("run", {"type": "object", "properties": {"code": {"type": "string"}, "options": {"type": "object"}, "dry": {"type": "boolean"}}}),
    Tool("get_time"),
)  # fmt: skip

_STOP = {"city": {"type": "string"}, "days": {"type": "integer"}, "late": {"type": "boolean"}}
PLAN = Tool(
    "plan",
    {
        "type": "object",
        "properties": {
            "trip": {
                "type": "object",
                "properties": {**_STOP, "tags": {"type": "array", "items": {"type": "string"}}},
            },
            "stops": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/stop"}, {"type": "null"}]}},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}},
            "by_name": {"type": "object", "additionalProperties": {"type": "number"}},
            "text": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        },
        "$defs": {"stop": {"type": "object", "properties": _STOP}, "size": {"type": "integer"}},
    },
)
"""Its arguments have members and items of their own types."""


@dataclass
class Message:
    """The sum of an answer's deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""


def sum_of(deltas: Iterable[Delta]) -> Message:
    """Put deltas together as clients do."""
    message = Message()
    for delta in deltas:
        match delta:
            case Content(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case ToolCallStart(index, id, name):
                assert index == len(message.calls) and id
                message.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert text and index == len(message.calls) - 1
                name, before = message.calls[index]
                message.calls[index] = (name, before + text)
    return message


def parser_for(tool: str | None, reasoning: str | None, **options) -> StreamParser:
    """A parser by the names of flags, with TOOLS."""
    dialect, thinking = by_name(tool, reasoning, options.pop("added_tokens", ()), options.pop("response_template", None))
    return StreamParser(dialect, thinking, **{"tools": TOOLS, **options})


def parse(pieces: str | Sequence[str], tool: str | None = None, reasoning: str | None = None, **options) -> Message:
    """The sum of the deltas of text that arrives in these pieces."""
    parser = parser_for(tool, reasoning, **options)
    deltas = [delta for piece in ([pieces] if isinstance(pieces, str) else pieces) for delta in parser.feed(piece)]
    return sum_of([*deltas, *parser.finish()])


PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
ROME = ("get_weather", '{"city": "Rome"}')
CODE = ("run", '{"code": "if a < b:\\n\\tprint(\\"[é]\\")", "options": {"deep": [1, {"x": null}]}, "dry": true}')
TIME = ("get_time", "{}")


@dataclass
class Sample:
    tool: str | None
    reasoning: str | None
    text: str
    message: Message
    options: dict = field(default_factory=dict)


def calls_in(tool: str, text: str, *calls: tuple[str, str], content: str = "", **options) -> Sample:
    return Sample(tool, None, text, Message(content, "", list(calls)), options)


def thoughts_in(reasoning: str, text: str, thought: str, content: str, tool: str | None = None, **options) -> Sample:
    return Sample(tool, reasoning, text, Message(content, thought), options)


HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "%s", "parameters": %s}'
LIST = '{"name": "%s", "arguments": %s}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
QWEN3_CODER = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
QWEN3_PARAMETER = "<parameter=%s>\n%s\n</parameter>\n"
GLM = "<tool_call>%s\n%s</tool_call>"
GLM_PARAMETER = "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"
COHERE = '{"tool_call_id": "%d", "tool_name": "%s", "parameters": %s}'
COHERE_SECTION = "<|START_ACTION|>[\n    %s\n]<|END_ACTION|>"
DSML = '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>\n'
DSML_PARAMETER = '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n'
DSML_SECTION = "<｜DSML｜tool_calls>\n%s</｜DSML｜tool_calls>"
IFM = "<ifm|tool_call>%s\n%s</ifm|tool_call>\n"
IFM_PARAMETER = "<ifm|arg_key>%s</ifm|arg_key>\n<ifm|arg_value>%s</ifm|arg_value>\n"
HY3 = "<tool_call>%s<tool_sep>\n%s</tool_call>\n"
HY3_TOKENS = ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
CODE_TEXT = 'if a < b:\n\tprint("[é]")'
GEMMA4 = "<|tool_call>call:%s{%s}<tool_call|>"
GEMMA4_CODE = GEMMA4 % ("run", f'code:<|"|>{CODE_TEXT}<|"|>,options:{{deep:[1,{{x:null}}]}},dry:true')
M3 = "]<]minimax[>["
M3_CODE = (
    f'{M3}<invoke name="run">\n{M3}<code>{CODE_TEXT}{M3}</code>\n{M3}<options>{M3}<deep>{M3}<item>1{M3}</item>'
    f"{M3}<item>{M3}<x>null{M3}</x>{M3}</item>{M3}</deep>{M3}</options>{M3}<dry>true{M3}</dry>{M3}</invoke>\n"
)
DOTS_PARAMETER = '<parameter name="%s">\n%s\n</parameter>\n'
XTML = '<|open|>call tool="%s" index="%d"<|sep|>%s<|close|>call<|sep|>'
XTML_ARGUMENT = '<|open|>argument key="%s" type="%s"<|sep|>%s<|close|>argument<|sep|>'
PYTHON_CODE = r"""run(code='if a < b:\n\tprint("[é]")', options={'deep': [1, {"x": None}]}, dry=True)"""


def tagged(call: str, parameter: str, *values: tuple[str, str], name: str = "run") -> str:
    return call % (name, "".join(parameter % value for value in values))


CODE_VALUES = (("code", CODE_TEXT), ("options", '{"deep": [1, {"x": null}]}'), ("dry", "true"))
PARIS_VALUES = (("city", "Paris"), ("days", "3"))

DSML_CODE = DSML % (
    "run",
    "".join(
        DSML_PARAMETER % (key, is_string, value)
        for (key, value), is_string in zip(CODE_VALUES, ("true", "false", "false"), strict=True)
    ),
)
DSML_CALLS = DSML_SECTION % (DSML_CODE + DSML % ("get_time", ""))

HY3_ANSWER = (
    "<think>Hm.</think><tool_calls>\n"
    + tagged(HY3, GLM_PARAMETER, *CODE_VALUES)
    + tagged(HY3, "", name="get_time")
    + "</tool_calls>"
)
XLAM = '[{"name": "%s", "arguments": %s}, {"name": "%s", "arguments": %s}]'

SAMPLES = {
    "xlam, bare": calls_in("xlam", XLAM % (PARIS + TIME), PARIS, TIME),
    "xlam, marked": calls_in("xlam", f"I look. [TOOL_CALLS]{XLAM % (PARIS + TIME)}", PARIS, TIME, content="I look."),
    "xlam, tagged": calls_in("xlam", f"<tool_call>{XLAM % (PARIS + CODE)}</tool_call>", PARIS, CODE),
    "xlam, in a block of code": calls_in("xlam", f"Well:\n```json\n{XLAM % (ROME + TIME)}\n```", ROME, TIME, content="Well:"),
    "xlam, an answer in JSON": calls_in(
        "xlam", '```json\n[{"name": "Ann", "age": 3}]\n```', content='```json\n[{"name": "Ann", "age": 3}]\n```'
    ),
    "xlam, after thoughts": Sample(
        "xlam", "deepseek_r1", f"Hm.</think>{XLAM % (PARIS + TIME)}", Message("", "Hm.", [PARIS, TIME])
    ),
    "hermes": calls_in("hermes", HERMES % PARIS, PARIS),
    "hermes, several with text": calls_in(
        "hermes", f"I look.\n\n{HERMES % PARIS}\n{HERMES % CODE}\n{HERMES % TIME}\n", PARIS, CODE, TIME, content="I look."
    ),
    "hermes, text on both sides": calls_in("hermes", f"One. {HERMES % ROME}\nTwo.", ROME, content="One. \nTwo."),
    "hermes, arguments first": calls_in(
        "hermes", '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>', ROME
    ),
    "hermes, arguments as text": calls_in(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', ROME
    ),
    "hermes, no arguments": calls_in("hermes", '<tool_call>{"name": "get_time"}</tool_call>', TIME),
    "hermes, an array": calls_in("hermes", f"<tool_call>[{LLAMA % PARIS}, {LLAMA % ROME}]</tool_call>", PARIS, ROME),
    "hermes, no closing tag": calls_in("hermes", '<tool_call>{"name": "get_time", "arguments": {}}', TIME),
    "hermes, broken before the arguments": calls_in(
        "hermes",
        'So:\n<tool_call>\n{"name": get_weather}\n</tool_call> ok',
        content='So:\n<tool_call>\n{"name": get_weather}\n</tool_call> ok',
    ),
    "hermes, no call at all": calls_in("hermes", " a < b and <tool_cal ", content=" a < b and <tool_cal "),
    "hermes, cut off": calls_in("hermes", '<tool_call>{"name": "run", "arguments": {"code": "x', ("run", '{"code": "x')),
    "hermes, cut off early": calls_in("hermes", 'A <tool_call>{"name": "ru', content='A <tool_call>{"name": "ru'),
    "granite": calls_in("granite", f"<|tool_call|>[{LLAMA % PARIS}, {LLAMA % TIME}]", PARIS, TIME),
    "jamba": calls_in("jamba", f"Now: <tool_calls>[\n{LLAMA % CODE}\n]</tool_calls>", CODE, content="Now:"),
    "apertus": calls_in(
        "apertus",
        f'I look.<|tools_prefix|>[{{"run": {CODE[1]}}}, {{"get_time": {{}}}}]<|tools_suffix|>',
        CODE,
        TIME,
        content="I look.",
    ),
    "apertus, no call": calls_in("apertus", "<|tools_prefix|>[]<|tools_suffix|>", content="<|tools_prefix|>[]<|tools_suffix|>"),
    "phi 4": calls_in("phi4_mini_json", f"functools[{LLAMA % PARIS}]", PARIS),
    "llama": calls_in("llama3_json", LLAMA % PARIS, PARIS),
    "llama, marked": calls_in("llama3_json", "<|python_tag|>" + LLAMA % CODE, CODE),
    "llama, several": calls_in("llama3_json", f"\n{LLAMA % PARIS}; {LLAMA % ROME};{LLAMA % TIME}", PARIS, ROME, TIME),
    "llama, with type": calls_in("llama3_json", '{"type": "function", "name": "get_time", "parameters": {}}', TIME),
    "llama, an answer in JSON": calls_in("llama3_json", ' {"city": "Rome"} ', content=' {"city": "Rome"} '),
    "llama, a person in JSON": calls_in(
        "llama3_json", '{"name": "Ada", "parameters": {}}', content='{"name": "Ada", "parameters": {}}'
    ),
    "llama, a built-in tool": calls_in(
        "llama3_json", '<|python_tag|>brave_search.call(query="x")', content='<|python_tag|>brave_search.call(query="x")'
    ),
    "llama 4": calls_in("llama4_json", f"<|python_start|>{LLAMA % PARIS}<|python_end|>", PARIS),
    "pythonic": calls_in("pythonic", '[get_weather(city="Paris", days=3)]', PARIS),
    "pythonic, several": calls_in("pythonic", f"[{PYTHON_CODE}, get_time(), get_weather(city='Rome')]", CODE, TIME, ROME),
    "pythonic, no call": calls_in("pythonic", "[1] is a list", content="[1] is a list"),
    "pythonic, code": calls_in(
        "pythonic", "[get_time(a=__import__('os'))]", content="[get_time(a=__import__('os'))]", hold_calls=True
    ),
    "llama 4 pythonic": calls_in("llama4_pythonic", f"<|python_start|>[{PYTHON_CODE}]<|python_end|>", CODE),
    "mistral, an array": calls_in("mistral", f"[TOOL_CALLS][{LLAMA % PARIS}, {LLAMA % CODE}]", PARIS, CODE),
    "mistral, by name": calls_in("mistral", '[TOOL_CALLS]get_weather{"city": "Rome"}[TOOL_CALLS]get_time{}', ROME, TIME),
    "mistral, marked arguments": calls_in(
        "mistral",
        f"Yes.[TOOL_CALLS]run[ARGS]{CODE[1]}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{{}}",
        CODE,
        TIME,
        content="Yes.",
    ),
    "deepseek v3": calls_in("deepseek_v3", "Hm.\n" + DEEPSEEK % "\n".join((V3 % PARIS, V3 % CODE)), PARIS, CODE, content="Hm."),
    "deepseek v3.1": calls_in("deepseek_v31", DEEPSEEK % (V31 % PARIS + V31 % TIME), PARIS, TIME),
    "glm": calls_in(
        "glm45", "\n".join((tagged(GLM, GLM_PARAMETER, *CODE_VALUES), tagged(GLM, GLM_PARAMETER, name="get_time"))), CODE, TIME
    ),
    "glm, on one line": calls_in(
        "glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>", ROME
    ),
    "kimi": calls_in(
        "kimi_k2",
        "Sure.\n" + KIMI_SECTION % (KIMI % ("run", 4, CODE[1]) + KIMI % ("get_time", 5, "{}")),
        CODE,
        TIME,
        content="Sure.",
    ),
    "qwen3 coder": calls_in("qwen3_coder", "Now:\n" + tagged(QWEN3_CODER, QWEN3_PARAMETER, *CODE_VALUES), CODE, content="Now:"),
    "qwen3 coder, several": calls_in(
        "qwen3_coder",
        tagged(QWEN3_CODER, QWEN3_PARAMETER, *PARIS_VALUES, name="get_weather")
        + "\n"
        + tagged(QWEN3_CODER, "", name="get_time"),
        PARIS,
        TIME,
    ),
    "qwen3 coder, without a section": calls_in(
        "qwen3_coder", "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>", ROME
    ),
    "seed": calls_in(
        "seed_oss", tagged(QWEN3_CODER, QWEN3_PARAMETER, *CODE_VALUES).replace("tool_call>", "seed:tool_call>"), CODE
    ),
    "minimax": calls_in(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        PARIS,
        TIME,
    ),
    "mimo, line breaks beside a value belong to it": calls_in(
        "mimo",
        "<tool_call><function=run><parameter=code>\nx = 1\n</parameter><parameter=dry>true</parameter></function></tool_call>",
        ("run", '{"code": "\\nx = 1\\n", "dry": true}'),
    ),
    "poolside": calls_in("poolside_v1", "I look." + tagged(GLM, GLM_PARAMETER, *CODE_VALUES), CODE, content="I look."),
    "step 3.5": calls_in("step3p5", tagged(QWEN3_CODER, QWEN3_PARAMETER, *CODE_VALUES), CODE),
    "ling 3 calls while it thinks": Sample(
        "ling3",
        "ling3",
        "<think>Hm. " + tagged(GLM, GLM_PARAMETER, *PARIS_VALUES, name="get_weather"),
        Message("", "Hm.", [PARIS]),
    ),
    "k2 horizon": Sample(
        "k2_horizon",
        "k2_horizon",
        "Hm.</ifm|think>\n<ifm|tool_calls>\n"
        + tagged(IFM, IFM_PARAMETER, *CODE_VALUES)
        + tagged(IFM, "", name="get_time")
        + "</ifm|tool_calls>",
        Message("", "Hm.", [CODE, TIME]),
        {"prompt_text": "<ifm|think>"},
    ),
    "k2 horizon thinks fast": thoughts_in(
        "k2_horizon", "Hm.</ifm|think_fast>Hello.", "Hm.", "Hello.", prompt_text="<ifm|think_fast>"
    ),
    "hy3": Sample("hy_v3", "hy_v3", HY3_ANSWER, Message("", "Hm.", [CODE, TIME])),
    "hy3, with a suffix": Sample(
        "hy_v3",
        "hy_v3",
        re.sub(r"(</?(?:think|tool_calls?|tool_sep|arg_key|arg_value))>", r"\1:open>", HY3_ANSWER),
        Message("", "Hm.", [CODE, TIME]),
        {"added_tokens": [f"<{end}{name}:open>" for name in HY3_TOKENS for end in ("", "/")]},
    ),
    "hy3, line breaks beside a value belong to it": calls_in(
        "hy_v3",
        "I look. <tool_calls><tool_call>run<tool_sep><arg_key>code</arg_key><arg_value>\nx\n</arg_value></tool_call></tool_calls>",
        ("run", '{"code": "\\nx\\n"}'),
        content="I look.",
    ),
    "deepseek v3.2": calls_in(
        "deepseek_v32", "So:\n\n" + DSML_CALLS.replace("tool_calls>", "function_calls>"), CODE, TIME, content="So:"
    ),
    "deepseek v3.2, strings as they are": calls_in(
        "deepseek_v32",
        (DSML_SECTION % (DSML % ("get_weather", DSML_PARAMETER % ("days", "true", "\n3\n")))).replace("tool_", "function_"),
        ("get_weather", '{"days": "\\n3\\n"}'),
    ),
    "deepseek v4": Sample(
        "deepseek_v4", "deepseek_v4", f"Hm.</think>Yes.\n\n{DSML_CALLS}", Message("Yes.", "Hm.", [CODE, TIME])
    ),
    "deepseek v4 calls while it thinks": Sample(
        "deepseek_v4", "deepseek_v4", f"Hm.\n\n{DSML_CALLS}", Message("", "Hm.", [CODE, TIME]), {"prompt_text": "<think>"}
    ),
    "deepseek v4.1": calls_in(
        "deepseek_v41", DSML_CALLS.replace("tool_calls>", "calls>").replace("｜DSML｜", "｜DSML｜ "), CODE, TIME
    ),
    "gemma 4": calls_in("gemma4", f"Now.\n{GEMMA4_CODE}{GEMMA4 % ('get_time', '')}", CODE, TIME, content="Now."),
    "gemma 4, braces in strings": calls_in(
        "gemma4", GEMMA4 % ("run", 'code:<|"|>}<tool_call>"{[,<|"|>'), ("run", '{"code": "}<tool_call>\\"{[,"}')
    ),
    "gemma 4, other quotes and none": calls_in(
        "gemma4",
        '<|tool_call> call: run { "code": "a" , <|"|>n<|"|>: -1.5e3, xs: [ {} , [], None,False, not json ], } call:get_time{}',
        ("run", '{"code": "a", "n": -1.5e3, "xs": [{}, [], null, false, "not json"]}'),
        TIME,
    ),
    "gemma 4 thinks and calls": Sample(
        "gemma4",
        "gemma4",
        f"<|channel>thought\nHm.<channel|>{GEMMA4_CODE}<|tool_response>",
        Message("", "Hm.", [CODE]),
        {"special_tokens": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"]},
    ),
    "gemma 4 calls while it thinks": Sample(
        "gemma4", "gemma4", f"Hm. {GEMMA4_CODE}", Message("", "Hm.", [CODE]), {"prompt_text": "<|channel>thought\n"}
    ),
    "gemma 4 does not think": Sample(
        "gemma4", "gemma4", "Yes.", Message("Yes."), {"prompt_text": "<|turn>model\n<|channel>thought\n<channel|>"}
    ),
    "functiongemma": calls_in(
        "functiongemma",
        f"<start_function_call>call:run{{code:<escape>{CODE_TEXT}<escape>,options:{{deep:[1,{{x:null}}]}},dry:true}}<end_function_call>"
        "<start_function_call>call:get_time{}<end_function_call>",
        CODE,
        TIME,
    ),
    "functiongemma quotes values of all types": calls_in(
        "functiongemma",
        f'<start_function_call>call:run{{code:<escape>{CODE_TEXT}<escape>,options:<escape>{{"deep": [1, {{"x": null}}]}}<escape>,'
        "dry:<escape>True<escape>}<end_function_call>"
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:<escape>3<escape>}<end_function_call>",
        CODE,
        PARIS,
    ),
    "functiongemma quotes values within others": calls_in(
        "functiongemma",
        "<start_function_call>call:plan{trip:{city:<escape>3<escape>,days:<escape>3<escape>,tags:[<escape>1<escape>],note:<escape>4<escape>},"
        "stops:[{days:<escape>2<escape>,late:<escape>True<escape>},<escape>null<escape>],sizes:[<escape>1<escape>,2],"
        "by_name:{a:<escape>0.5<escape>}}<end_function_call>",
        (
            "plan",
            '{"trip": {"city": "3", "days": 3, "tags": ["1"], "note": "4"}, "stops": [{"days": 2, "late": true}, null], "sizes": [1, 2], '
            '"by_name": {"a": 0.5}}',
        ),
        tools=[PLAN],
    ),
    "functiongemma writes objects as Python does": calls_in(
        "functiongemma",
        "<start_function_call>call:plan{trip:<escape>{'city': 'é\"', 'days': 3, 'x': None}<escape>,stops:<escape>[{'late': True}]<escape>,"
        "sizes:<escape>[1, 2<escape>,text:<escape>{'a': 1}<escape>}<end_function_call>",
        (
            "plan",
            '{"trip": {"city": "é\\"", "days": 3, "x": null}, "stops": [{"late": true}], "sizes": "[1, 2", "text": "{\'a\': 1}"}',
        ),
        tools=[PLAN],
    ),
    "gemma 4 quotes strings alone": calls_in(
        "gemma4", GEMMA4 % ("get_weather", 'city:<|"|>3<|"|>,days:<|"|>3<|"|>'), ("get_weather", '{"city": "3", "days": "3"}')
    ),
    "minicpm5": calls_in(
        "minicpm5",
        f'I look.\n<function name="run"><param name="code"><![CDATA[{CODE_TEXT}]]></param><param name="options">'
        '{"deep": [1, {"x": null}]}</param>\n<param name="dry">True</param></function>\n<function name="get_time"></function>',
        CODE,
        TIME,
        content="I look.",
    ),
    "minicpm5 has tags in a value": calls_in(
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[</param>\n</function>]]></param></function>',
        ("get_weather", '{"city": "</param>\\n</function>"}'),
    ),
    "minicpm5 has an end of sections in a value": calls_in(
        "minicpm5",
        '<function name="run"><param name="code"><![CDATA[a[b[0]]>1 ]]>2]]>\n</param></function>'
        '<function name="get_weather"><param name="city"><![CDATA[a]]]]><![CDATA[>b]]></param></function>',
        ("run", '{"code": "a[b[0]]>1 ]]>2"}'),
        ("get_weather", '{"city": "a]]>b"}'),
    ),
    "dots": calls_in(
        "dots",
        "I look.<dots_function_call>\n"
        + tagged('<invoke name="%s">\n%s</invoke>\n', DOTS_PARAMETER, *CODE_VALUES)
        + '<invoke name="get_time">\n</invoke>\n</dots_function_call>',
        CODE,
        TIME,
        content="I look.",
    ),
    "minimax m3": calls_in(
        "minimax_m3", f'{M3}<tool_call>\n{M3_CODE}{M3}<invoke name="get_time">\n{M3}</invoke>\n{M3}</tool_call>', CODE, TIME
    ),
    "minimax m3 repeats a tag": calls_in(
        "minimax_m3",
        f'{M3}<tool_call>{M3}<invoke name="run">{M3}<options>{M3}<a>1{M3}</a>{M3}<a>b{M3}</a>{M3}</options>{M3}</invoke>{M3}</tool_call>',
        ("run", '{"options": {"a": [1, "b"]}}'),
    ),
    "minimax m3, as its chat template writes it": Sample(
        "minimax_m3",
        "minimax_m3",
        f'<mm:think>Hm.</mm:think>I look.{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>Paris{M3}</city>{M3}<days>3{M3}</days>'
        f'{M3}</invoke>\n{M3}<invoke name="run">{M3}<options>{M3}<deep>{M3}<item>1{M3}</item>{M3}<item>{M3}<x>2.5{M3}</x>{M3}</item>'
        f"{M3}</deep>{M3}</options>{M3}<dry>true{M3}</dry>{M3}</invoke>\n{M3}</tool_call>",
        Message("I look.", "Hm.", [PARIS, ("run", '{"options": {"deep": [1, {"x": 2.5}]}, "dry": true}')]),
    ),
    "minimax m3 does not think": thoughts_in("minimax_m3", "</mm:think>Yes.", "", "Yes."),
    "minimax m3 thinks": thoughts_in("minimax_m3", "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
    "kimi k3": Sample(
        "kimi_k3",
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
        + XTML
        % (
            "run",
            1,
            "".join(
                XTML_ARGUMENT % (key, kind, value)
                for (key, value), kind in zip(CODE_VALUES, ("string", "object", "boolean"), strict=True)
            ),
        )
        + XTML % ("get_time", 2, "")
        + "<|close|>tools<|sep|><|close|>message<|sep|>",
        Message("I look.", "Hm.", [CODE, TIME]),
    ),
    "kimi k3 answers": Sample(
        "kimi_k3",
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        Message("Yes.", "Hm."),
    ),
    "kimi k3, as its chat template writes it": Sample(
        "kimi_k3",
        "kimi_k3",
        'Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" '
        'index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|open|>argument key="days" '
        'type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="get_time" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        Message("I look.", "Hm.", [PARIS, TIME]),
        {"prompt_text": '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'},
    ),
    "kimi k3, json": calls_in(
        "kimi_k3",
        "<|open|>tools<|sep|>"
        + XTML % ("get_weather", 1, '<|open|>json type="object"<|sep|>{"city": "Rome"}<|close|>json<|sep|>')
        + "<|close|>tools<|sep|>",
        ROME,
    ),
    "lfm2": calls_in(
        "lfm2", f"<|tool_call_start|>[{PYTHON_CODE}, get_time()]<|tool_call_end|>I look.", CODE, TIME, content="I look."
    ),
    "lfm2, a list is an answer": calls_in("lfm2", "[get_time()]", content="[get_time()]"),
    "olmo 3": calls_in(
        "olmo3",
        f'Now:\n<function_calls>\n{PYTHON_CODE}\nget_time()\nget_weather(city="Rome")\n</function_calls>',
        CODE,
        TIME,
        ROME,
        content="Now:",
    ),
    "olmo 3, on one line, cut off": calls_in("olmo3", "<function_calls>get_time()", TIME),
    "olmo 3, no call": calls_in(
        "olmo3", "<function_calls>Hello</function_calls>", content="<function_calls>Hello</function_calls>"
    ),
    "longcat": calls_in(
        "longcat", (HERMES % PARIS + "\n" + HERMES % CODE).replace("tool_call", "longcat_tool_call"), PARIS, CODE
    ),
    "granite 20b": calls_in("granite-20b-fc", f"<function_call> {LIST % PARIS}\n<function_call> {LIST % TIME}", PARIS, TIME),
    "nemotron nano": calls_in("nemotron_json", f"<TOOLCALL>[{LIST % PARIS}, {LIST % CODE}]</TOOLCALL>", PARIS, CODE),
    "cohere": Sample(
        "cohere_command3",
        "cohere_command3",
        "<|START_THINKING|>Hm.<|END_THINKING|>" + COHERE_SECTION % ",\n    ".join((COHERE % (0, *PARIS), COHERE % (1, *CODE))),
        Message("", "Hm.", [PARIS, CODE]),
    ),
    "cohere answers": thoughts_in(
        "cohere_command3", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hm.", "Hello."
    ),
    "cohere answers, the markers are special tokens": thoughts_in(
        "cohere_command4",
        "Hm.<|END_THINKING|><|START_TEXT|>Hello.<|END_TEXT|>",
        "Hm.",
        "Hello.",
        "cohere_command4",
        prompt_text="<|CHATBOT_TOKEN|><|START_THINKING|>",
        special_tokens=("<|START_TEXT|>", "<|END_TEXT|>", "<|CHATBOT_TOKEN|>"),
    ),
    "ernie calls": Sample("ernie45", "ernie45", f"Hm.\n</think>\n\n\n{HERMES % ROME}\n", Message("", "Hm.", [ROME])),
    "ernie answers": thoughts_in(
        "ernie45", "Hm.\n</think>\n\n<response>\nHello <x>.\n</response>\n", "Hm.", "Hello <x>.", "ernie45"
    ),
    "ernie answers without a mark": thoughts_in("ernie45", "Hm.\n</think>\nA </response>.", "Hm.", "A </response>."),
    "hunyuan calls": Sample(
        "hunyuan_a13b",
        "hunyuan_a13b",
        f"<think>\nHm.\n</think>\n<answer>\n助手：Yes.\n<tool_calls>[{LIST % PARIS}]</tool_calls>\n</answer>",
        Message("Yes.", "Hm.", [PARIS]),
    ),
    "hunyuan answers": thoughts_in("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nHello.\n</answer>", "Hm.", "Hello."),
    "hunyuan, not thinking": thoughts_in(
        "hunyuan_a13b",
        "<answer>\nThe tag </answer> ends it.\n</answer>",
        "",
        "The tag </answer> ends it.",
        prompt_text="<think>\n\n</think>\n",
    ),
    "minimax, thoughts in the content": Sample(
        "minimax_m2",
        "minimax_m2_append_think",
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        Message("<think>Hm.\n</think>", "", [TIME]),
        {"prompt_text": "<think>\n"},
    ),
    "harmony": Sample(
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>They want <weather>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS[1]}<|call|>",
        Message("I look.", "They want <weather>.", [PARIS]),
    ),
    "harmony, recipient in the role": Sample(
        "openai",
        "openai_gptoss",
        f" to=functions.run<|channel|>commentary json<|message|>{CODE[1]}",
        Message("", "", [CODE]),
    ),
    "harmony, final": Sample(
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
        "<|channel|>final<|message|> Hello [x]\n<|return|>",
        Message(" Hello [x]\n", "One.\nTwo."),
    ),
    "harmony, no header": Sample("openai", "openai_gptoss", '{"a": 1} < 2', Message('{"a": 1} < 2')),
    "think": thoughts_in("think", "\n<think>\nHm, < 3.\n\n</think>\n\nHello.\n", "Hm, < 3.", "Hello.\n"),
    "think, not": thoughts_in("think", "\nA <think>tag</think>", "", "\nA <think>tag</think>"),
    "think, open in the prompt": thoughts_in(
        "think", "Hm.</think>Hello.", "Hm.", "Hello.", prompt_text="<|im_start|>assistant\n<think>\n"
    ),
    "deepseek r1": thoughts_in("deepseek_r1", "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
    "deepseek r1, with a tag": thoughts_in("deepseek_r1", "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."),
    "deepseek r1, endless": thoughts_in("deepseek_r1", "Hm. </thin", "Hm. </thin", ""),
    "qwen3": thoughts_in("qwen3", "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."),
    "qwen3, not thinking": thoughts_in(
        "qwen3", "Hello </think>.", "", "Hello </think>.", prompt_text="<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "granite 3.3 thinks": thoughts_in("granite33", "<think>Hm.</think>\n\n<response>Hello.</response>", "Hm.", "Hello."),
    "granite 3.3 does not think": thoughts_in("granite33", "Hello.", "", "Hello."),
    "granite thinks": thoughts_in("granite", "Here is my thought process: Hm.\nHere is my response: Hello.", "Hm.", "Hello."),
    "mistral thinks": thoughts_in("mistral", "[THINK]Hm [x].[/THINK]Hello.", "Hm [x].", "Hello."),
    "qwen3 thinks and calls": Sample(
        "hermes", "qwen3", f"<think>\nA <tool_call>?\n</think>\n\n{HERMES % ROME}", Message("", "A <tool_call>?", [ROME])
    ),
    "kimi calls while it thinks": Sample(
        "kimi_k2", "kimi_k2", "<think>Hm. " + KIMI_SECTION % (KIMI % ("get_time", 0, "{}")), Message("", "Hm.", [TIME])
    ),
}

TOOL_ALIASES = {
    "cohere_command4": "cohere",
    "glm47": "glm",
    "granite4": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3 coder",
}
SAMPLES |= {name: replace(SAMPLES[sample], tool=name) for name, sample in TOOL_ALIASES.items()}
SAMPLES |= {
    f"{name} thinks in tags": thoughts_in(name, "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.")
    for name, dialect in REASONING_DIALECTS.items()
    if "<think>" in dialect.start and not dialect.in_content
}
SAMPLES["seed thinks"] = thoughts_in("seed_oss", "<seed:think>Hm.</seed:think>Hello.", "Hm.", "Hello.")

# Response templates as transformers documents them (chat_response_parsing): literals, patterns with names, each kind of content.
JSON_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}  # fmt: skip
TAG_TEMPLATE = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open_pattern": r"<\|channel>\w+\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"\s*<function=(?P<name>[^>\n]+)>", "close": "</function>", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<turn\|>"},
    },
}  # fmt: skip
LIST_TEMPLATE = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open": "<|calls|>", "close": "<|/calls|>", "content": "python-call-list", "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}  # fmt: skip
PATTERN_TEMPLATE = {
    **JSON_TEMPLATE,
    "fields": {
        "tool_calls": {
            "open": "<call>", "close_pattern": r"</call>\s*", "content": "json", "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}  # fmt: skip


def template_sample(
    template: dict, text: str, message: Message, tool: str | None = "hf", reasoning: str | None = "hf", **options
):
    return Sample(tool, reasoning, text, message, {"response_template": template, **options})


_CALL = '<call>{"name": "%s", "arguments": %s}</call>'
SAMPLES |= {
    "template, json": template_sample(
        JSON_TEMPLATE,
        f"<think>\nHm, <call>?\n</think>\n\nSure.\n{_CALL % PARIS}\n{_CALL % TIME}<|im_end|>",
        Message("Sure.", "Hm, <call>?", [PARIS, TIME]),
    ),
    "template, reasoning open in the prompt": template_sample(
        JSON_TEMPLATE, "Hm.</think> Hi <x>.", Message("Hi <x>.", "Hm."), prompt_text="<|im_start|>assistant\n<think>\n"
    ),
    "template, reasoning closed in the prompt": template_sample(
        JSON_TEMPLATE, "\n\nHi.", Message("Hi."), prompt_text="<|im_start|>assistant\n<think>\n</think>"
    ),
    "template, no call": template_sample(
        JSON_TEMPLATE, f"A <call>x</call> {_CALL % ROME} b", Message("Ax b", calls=[ROME])
    ),
    "template, cut off in a call": template_sample(JSON_TEMPLATE, 'A <call>{"name": "g', Message('A{"name": "g')),
    "template, cut off in the end of a call": template_sample(JSON_TEMPLATE, '<call>{"a"</ca', Message('{"a"</ca')),
    "template, no calls": template_sample(JSON_TEMPLATE, "<call>[1]</call><call>2</call>", Message("[1]2")),
    "template, a call without arguments": template_sample(
        PATTERN_TEMPLATE, '<call>[{"name": "f"}]</call> b <call>[1]</call>\n<call>[]</call>', Message('[{"name": "f"}]b [1]')
    ),
    "template, no number": template_sample(
        JSON_TEMPLATE, '<call>{"name": "run", "arguments": {"a": NaN}}</call>', Message('{"name": "run", "arguments": {"a": NaN}}')
    ),
    "template, a number beyond a double": template_sample(
        JSON_TEMPLATE, '<call>{"name": "run", "arguments": {"a": 1e999}}</call>', Message('{"name": "run", "arguments": {"a": 1e999}}')
    ),
    "template, without tools": template_sample(JSON_TEMPLATE, _CALL % ROME, Message(_CALL % ROME), tool=None),
    "template, without reasoning": template_sample(JSON_TEMPLATE, "<think>a</think>b", Message("<think>a</think>b"), reasoning=None),
    "template, special tokens": template_sample(
        JSON_TEMPLATE, "A<|pad|> b.<|im_end|>", Message("A b."), special_tokens=("<|pad|>", "<|im_end|>")
    ),
    "template, forced": template_sample(
        JSON_TEMPLATE, f"<think>a</think>\n[{LIST % ROME}]", Message("", "a", [ROME]), forced=True
    ),
    "template, tags": template_sample(
        TAG_TEMPLATE,
        "<|channel>thought\nHm.<channel|>Sure. <function=run><parameter=code>\n1 < 2\n</parameter><parameter=dry>true</parameter>"
        "</function><function=get_time></function><turn|>",
        Message("Sure.", "Hm.", [("run", '{"code": "1 < 2", "dry": true}'), TIME]),
    ),
    "template, list": template_sample(
        LIST_TEMPLATE, 'Ok: <|calls|>[get_weather(city="Paris", days=3), get_time()]<|/calls|>', Message("Ok:", calls=[PARIS, TIME])
    ),
}  # fmt: skip
