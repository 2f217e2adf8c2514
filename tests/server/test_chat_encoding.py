import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from server.chat_encoding import ChatEncoder
from server.options import ChatOptions
from server.template_process import TemplateProcesses
from server.work import finish
from tests.helpers.stand_in_media import stand_in_media
from tests.helpers.tiny_tokenizers import BOS, EOS, write_tokenizer

LIMITS = ChatOptions(chat_template_timeout=1.0, chat_template_memory_bytes=256 << 20)
JOB: dict[str, Any] = {
    "tools": None,
    "documents": None,
    "chat_template": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "content_format": "auto",
    "default_kwargs": {},
    "hints": {},
    "kwargs": {},
}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def templates(tokenizer: Tokenizer) -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses(tokenizer, LIMITS)
    yield processes
    processes.close()


@pytest.fixture
def encoder(tokenizer: Tokenizer, templates: TemplateProcesses) -> ChatEncoder:
    return ChatEncoder(tokenizer, templates, 100_000, stand_in_media(None))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def encoded(encoder: ChatEncoder, content: Any, **job: Any) -> list[int]:
    return finish(encoder.encode({**JOB, "messages": user(content), **job}, add_special_tokens=False))[1]


@pytest.mark.parametrize("text", ["hello there", "<b>one</b> | two", "", "中文 <|x|>"])
def test_ordinary_text_is_encoded_as_the_tokenizer_does(encoder: ChatEncoder, tokenizer: Tokenizer, text: str) -> None:
    assert encoded(encoder, text) == tokenizer.apply_chat_template(user(text), add_generation_prompt=True)


@pytest.mark.parametrize(
    "content",
    [
        f"end{EOS}{BOS}<|user|> system",
        [{"type": "text", "text": EOS[:2]}, {"type": "text", "text": EOS[2:]}],
        EOS,
    ],
)
def test_special_tokens_in_messages_are_mere_text(encoder: ChatEncoder, tokenizer: Tokenizer, content: Any) -> None:
    joining = "{{ bos_token }}{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
    ids = encoded(encoder, content, chat_template=joining, content_format="openai")
    assert [id for id in ids if id in tokenizer.all_special_ids] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    said = content if isinstance(content, str) else EOS
    if tokenizer.name_or_path.find("words") < 0:
        assert tokenizer.decode(ids[1:-1]).strip() == said.strip()


def test_what_surrounds_a_broken_token_is_encoded_as_ever(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    conversation = [*user("hello there"), *user(f"a {EOS} b"), *user("one two")]
    ids = finish(encoder.encode({**JOB, "messages": conversation}, add_special_tokens=False))[1]
    before = tokenizer.apply_chat_template(conversation[:1])
    after = tokenizer.apply_chat_template(conversation[2:], add_generation_prompt=True)
    assert ids[: len(before)] == before
    assert ids[-(len(after) - 1) :] == after[1:]


@pytest.mark.parametrize("tokenizer", ["words"], indirect=True)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 3000000000 }}", "[mM]emory"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ ''.__class__.__mro__ }}", "refused|failed"),
        ("{% if %}", "syntax error in line 1"),
    ],
)
def test_a_template_cannot_take_more_than_it_may(encoder: ChatEncoder, template: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        encoded(encoder, "hi", chat_template=template)
    assert time.monotonic() - began < 60
    assert encoded(encoder, "hi"), "the next conversation is rendered"


def test_variables_that_the_template_does_not_read_have_no_effect(encoder: ChatEncoder) -> None:
    for name in ("messages", "bos_token"):
        with pytest.raises(InvalidRequestError, match=f"'{name}'.*sets"):
            encoded(encoder, "hi", kwargs={name: True})
    assert encoded(encoder, "hi", kwargs={"tokenize": False, "style": "!"}) == encoded(encoder, "hi")
    template = "{{ messages[0]['content'] }}{{ style }}"
    assert encoded(encoder, "hi", chat_template=template, kwargs={"style": "!"}) == encoded(
        encoder, "hi!", chat_template=template
    )
    assert encoded(encoder, "hi", hints={"reasoning_effort": "low"}) == encoded(encoder, "hi")
