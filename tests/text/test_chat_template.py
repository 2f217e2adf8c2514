import datetime
import logging
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.text.chat_template import ChatTemplateError, load_chat_template, render_chat
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tiny_tokenizers import BOS, CHAT_TEMPLATE, EOS, write_tokenizer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    + PARTS[23:-12]
    + "{% endif %}{% endfor %}"
)
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_conversation_becomes_the_template_s_text(tokenizer: Tokenizer) -> None:
    assert (
        render_chat(tokenizer, TALK, add_generation_prompt=True) == f"{BOS}<|user|>hi{EOS}<|assistant|>Sure, {EOS}<|assistant|>"
    )


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        STRIPPING,
        "{%- for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
        "{{ messages[0] | tojson(indent=2) }}{{ tools | tojson }}{{ documents }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ '<é>' | tojson }}\n    {% endif %}\n{% endfor %}{{ mood }}",
    ],
)
def test_templates_mean_what_they_mean_to_transformers(tokenizer: Tokenizer, template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f", "description": "<x> & 'y'", "parameters": {}}}],
        "mood": "calm",
    }
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    shows_the_end = "content" in template
    for open_end in (False, True) if shows_the_end else (False,):
        options |= {"chat_template": template, "continue_final_message": open_end}
        assert render_chat(tokenizer, TALK, **options) == theirs.apply_chat_template(TALK, tokenize=False, **options)


def test_the_date_is_at_hand(tokenizer: Tokenizer) -> None:
    text = render_chat(tokenizer, TALK, chat_template="{{ strftime_now('%Y') }}")
    assert abs(int(text) - datetime.datetime.now().year) <= 1


def test_the_final_message_can_be_left_open(tokenizer: Tokenizer) -> None:
    open_end = render_chat(tokenizer, TALK, continue_final_message=True)
    assert open_end == f"{BOS}<|user|>hi{EOS}<|assistant|>Sure, "
    assert render_chat(tokenizer, TALK, continue_final_message=True, chat_template=STRIPPING) == "<user>hi</><assistant>Sure,"
    with pytest.raises(ChatTemplateError, match="leaves the final message out"):
        render_chat(tokenizer, TALK, continue_final_message=True, chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="set only one"):
        render_chat(tokenizer, TALK, continue_final_message=True, add_generation_prompt=True)


def test_content_may_be_a_list_of_texts(tokenizer: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    string = [{"role": "user", "content": "ab"}]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render_chat(tokenizer, parts, chat_template=plain) == "a\nb"
    assert render_chat(tokenizer, parts, chat_template=PARTS) == "[a][b]"
    assert render_chat(tokenizer, string, chat_template=PARTS) == "[ab]"
    assert render_chat(tokenizer, string, chat_template=EITHER) == "ab"
    assert render_chat(tokenizer, parts, chat_template=PARTS, content_format="string") == "[][][]"
    assert render_chat(tokenizer, parts, chat_template=PARTS, continue_final_message=True) == "[a][b"


IMAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}],
    },
    {"role": "user", "content": [{"type": "image"}]},
]


@pytest.mark.parametrize(
    ("template", "interleave", "text"),
    [
        (
            "{% for m in messages %}{% for p in m.content %}[{{ p.text or p.type }}]{% endfor %}{% endfor %}",
            False,
            "[a][image][b][image][image]",
        ),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", False, "<1>\n<2>\na\nb|<3>|"),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", True, "a\n<1>\nb\n<2>|<3>|"),
    ],
)
def test_images_stand_in_lists_of_parts_or_as_texts(tokenizer: Tokenizer, template: str, interleave: bool, text: str) -> None:
    texts = ["<1>", "<2>", "<3>"]
    options: dict[str, Any] = {"chat_template": template, "image_texts": texts, "interleave_images": interleave}
    assert render_chat(tokenizer, IMAGES, **options) == text
    assert render_chat(tokenizer, IMAGES, **options, continue_final_message=True).rstrip("[") == text.rstrip("|")


def test_a_model_of_text_alone_has_no_text_for_images(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        InvalidRequestError, match="message 0 has an image, but the chat template and the model take text alone"
    ):
        render_chat(tokenizer, IMAGES, chat_template="{{ messages[0].content }}")


def test_tool_calls_reach_the_template_as_objects(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_chat(tokenizer, talk, chat_template="{{ messages[0].tool_calls[0].function.arguments.x + 1 }}") == "2"


@pytest.mark.parametrize(
    ("given", "as_object", "as_text"),
    [
        ('{"x": 1}', '{"x": 1}', '{"x": 1}'),
        ({"x": 1}, '{"x": 1}', '{"x": 1}'),
        ('{"path": "/a/b', "{}", '{"path": "/a/b'),
        ("[1]", "{}", "[1]"),
        ("[" * 100_000, "{}", "[" * 100_000),
        ([1], "{}", "{}"),
        ("null", "{}", "{}"),
        ("", "{}", "{}"),
        (None, "{}", "{}"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_that_are_no_object_are_text_where_the_template_takes_text_else_empty(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, given: Any, as_object: str, as_text: str
) -> None:
    talk = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
    call = "messages[0].tool_calls[0].function"
    takes_both = (
        "{% set f = CALL %}{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    )
    with caplog.at_level(logging.DEBUG, "jaxllm"):
        for template, expected in (
            ("{{ CALL.arguments | tojson }}", as_object),
            ("{{ '' + CALL['arguments'] }}", as_text),
            ("{% if false %}{{ '' + block.arguments }}{% endif %}{{ CALL.arguments | tojson }}", as_object),
            (takes_both, as_text),
        ):
            assert render_chat(tokenizer, talk, chat_template=template.replace("CALL", call)) == expected
    is_malformed = given is not None and as_object == "{}" and given not in ("", "null")
    assert caplog.text.count("message 0 has a tool call whose arguments are no JSON object") == 4 * is_malformed


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools[0].name }}"}]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat_template=named))
    assert render_chat(tokenizer, TALK) == "plain"
    assert render_chat(tokenizer, TALK, tools=[{"name": "f"}]) == "tools f"
    assert render_chat(tokenizer, TALK, tools=[{"name": "f"}], chat_template="default") == "plain"


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str, must be a list"),
        ({"role": "user"}, "messages is a dict, must be a list"),
        (["hi"], "message 0 is a str"),
        ([*TALK, {"content": "x"}], "message 2 has the role None"),
        ([{"role": "user", "content": 3}], "message 0 has content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0, part 0 is 'image_url'; parts may be text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0, part 0 has no text"),
    ],
)
def test_a_malformed_conversation_is_a_clear_error(tokenizer: Tokenizer, conversation: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render_chat(tokenizer, conversation)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template has a syntax error in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ 1 / 0 }}", "failed on the conversation: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "refused the conversation"),
        ("{{ ''.__class__.__mro__ }}", "refused the conversation"),
    ],
)
def test_a_template_that_fails_is_a_clear_error(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(tokenizer, TALK, chat_template=template)


def test_without_a_template_chatting_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template; pass one"):
        render_chat(load_tokenizer(write_tokenizer(tmp_path, chat_template=None)), TALK)
    only_named = load_tokenizer(write_tokenizer(tmp_path, chat_template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(ChatTemplateError, match="rag but no default"):
        render_chat(only_named, TALK)


def test_a_template_option_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ x }}")
    assert load_chat_template(str(file)) == load_chat_template("{{ x }}") == "{{ x }}"
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        load_chat_template("missing.jinja")
