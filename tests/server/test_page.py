"""The web page over the real application, in headless Chromium, used like a person does."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'jaxllm[browser]'")

from selenium.webdriver.common.keys import Keys

from jaxllm.async_llm import AsyncLLM
from jaxllm.request import EngineCoreRequest
from jaxllm.text.generation_config import LLAMA_CPP
from jaxllm.text.tokenizer import load_tokenizer
from server.routes.page import page_replies
from tests.helpers.browser import PHONE, SMALL_PHONE, Browser, programs
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer
from tests.helpers.ports import free_port
from tests.helpers.scripted_core import fake_core
from tests.helpers.serve_processes import serving
from tests.helpers.served_core import SLOW_FACTORY
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(programs() is None, reason="needs chromium and chromedriver"),
]
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "[click](javascript:document.title='owned') ![](http://elsewhere.invalid/a.png) "
    '<a href="http://elsewhere.invalid">away</a> `<b>code</b>` **<i>bold</i>**'
)
MARKDOWN = (
    "# Title\n\nSome **bold**, *slanted* and `code`, a [link](https://example.org/).\n\n- one\n- two\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<hi>')\n```\n\n> quoted"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOO_LONG = "too long " * 1000
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
ANSWERS = {
    "hello": "one two three",
    "hostile": HOSTILE,
    "format": MARKDOWN,
    "think": "<think>I must look it up.</think>Let me see.",
    "weather": CALL,
    "wide": "x" * 400 + "\n\n```\n" + "y" * 400 + "\n```",
}


class Model:
    """Answers what stands in ANSWERS for a word of the last message; "forever" is long. A step waits until it is `open`, and takes time."""

    def __init__(self, directory: Path):
        template = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{% if tools %}tools{% endif %}")
        self.tokenizer = load_tokenizer(write_tokenizer(directory, chat_template=template))
        self.open = threading.Event()
        self.open.set()
        self.single_steps = threading.Semaphore(0)
        """Steps that are made although it is not open."""
        self.step_seconds = 0.0
        self.core: FakeEngineCore = fake_core(directory, self.say, max_model_len=3000)
        self.core.before_step = self._wait

    def say(self, request: EngineCoreRequest) -> Sequence[int]:
        asked = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False).rpartition("<|user|>")[2]
        words = self.tokenizer.encode("word ", add_special_tokens=False)
        said = next((said for word, said in ANSWERS.items() if word in asked), None)
        if said is None:
            return words * 500
        return [*self.tokenizer.encode(said, add_special_tokens=False), request.eos_token_ids[0]]

    @property
    def last(self) -> EngineCoreRequest:
        return self.core.requests[-1]

    def last_prompt(self) -> str:
        return str(self.tokenizer.decode(self.last.prompt_token_ids, skip_special_tokens=False))

    def _wait(self) -> None:
        while not self.open.wait(0.002) and not self.single_steps.acquire(blocking=False):
            pass
        time.sleep(self.step_seconds)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[AsyncLLM]:
    with AsyncLLM(core=model.core) as engine:
        yield engine


def served(engine: AsyncLLM, name: str = "tiny", **options: Any) -> Any:
    return LiveServer.start(
        engine,
        served_model_name=[name],
        tool_call_parser="hermes",
        reasoning_parser="think",
        enable_auto_tool_choice=True,
        **options,
    )


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    with served(engine) as server:
        yield f"http://127.0.0.1:{server.port}/"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, model: Model) -> Iterator[Browser]:
    """The browser; at the end, checks that the page had no errors and sent no requests to other hosts."""
    window.requests(), window.complaints()
    yield window
    model.open.set()
    model.step_seconds = 0.0
    assert not window.complaints()
    strangers = [address for address in window.requests() if not address.startswith("http://127.0.0.1:")]
    assert not strangers


def ask(browser: Browser, text: str) -> str:
    """Send a message and wait for its whole answer."""
    begin(browser, text)
    browser.wait(lambda: not browser.shows("#stop"), "the answer does not end")
    return browser.text("article.assistant .body")


def begin(browser: Browser, text: str) -> None:
    browser.wait(lambda: browser.find("#send").is_enabled(), "the page takes no question")
    browser.write("#prompt", text)
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("article.user .body") == text, "the question is not shown")


def set_up(browser: Browser, **values: str) -> None:
    """Fill fields of the settings."""
    browser.click("#open-settings")
    for name, value in values.items():
        browser.write(f"#settings [name={name}]", value)
    browser.click("#settings .main")
    assert not browser.shows("#settings"), browser.text("#settings-fault")


def test_a_question_is_answered_by_streaming_and_can_be_stopped_and_asked_again(
    browser: Browser, url: str, model: Model
) -> None:
    browser.open(url)
    browser.wait(lambda: browser.text("#model") == "tiny", "the model is not named")
    assert browser.focus == "prompt" and "tiny" in browser.driver.title
    model.open.clear()
    begin(browser, "forever")
    assert browser.shows("#stop") and not browser.shows("#send")
    model.step_seconds = 0.005
    model.open.set()
    browser.wait(lambda: "word word" in browser.text("article.assistant .body"), "nothing streams")
    assert browser.shows("#stop"), "it is shown only when it is whole"
    browser.click("#stop")
    browser.wait(lambda: "stopped" in browser.text("article.assistant footer"), "it was not stopped")
    browser.wait(lambda: not model.core.running, "the engine goes on")
    model.step_seconds = 0.0

    model.open.clear()
    begin(browser, "hello")
    model.single_steps.release()
    browser.wait(lambda: browser.text("article.assistant .body") == "one", "the first word does not come alone")
    model.open.set()
    browser.wait(lambda: not browser.shows("#stop"), "the answer does not end")
    assert browser.text("article.assistant .body") == "one two three"
    assert "tokens/s" in browser.text("article.assistant footer") and "out" in browser.text("article.assistant footer")
    assert browser.text("#announced") == "The answer is complete."
    num_asked = len(model.core.requests)
    browser.click("article:last-child .retry")
    browser.wait(lambda: len(model.core.requests) == num_asked + 1 and not browser.shows("#stop"), "it is not asked again")
    assert len(browser.all("article")) == 4 and browser.text("article.assistant .body") == "one two three"

    browser.driver.refresh()
    browser.wait(lambda: len(browser.all("article")) == 4, "the conversation is not kept")
    browser.click("#new-chat")
    assert not browser.all("article") and browser.shows("#welcome") and browser.focus == "prompt"
    ask(browser, "hello")
    assert "forever" not in model.last_prompt()


def test_settings_change_the_request(browser: Browser, url: str, model: Model) -> None:
    browser.open(url)
    ask(browser, "hello")
    assert {name: getattr(model.last.sampling_params, name) for name in LLAMA_CPP} == LLAMA_CPP
    assert browser.find("#settings [name=temperature]").get_attribute("placeholder") == "0.8"
    browser.click("#new-chat")

    numbers = {"temperature": "0.33", "top_p": "0.9", "top_k": "7", "top_n_sigma": "1.5", "max_tokens": "2", "seed": "5"}
    set_up(browser, **numbers, system="Be brief.", tools=TOOLS)
    assert ask(browser, "hello").startswith("o")
    params = model.last.sampling_params
    assert {name: getattr(params, name) for name in numbers} == {name: float(value) for name, value in numbers.items()}
    assert "Be brief." in model.last_prompt() and "tools" in model.last_prompt()
    assert "token limit" in browser.text("article.assistant footer")

    browser.click("#open-settings")
    browser.write("#settings [name=tools]", "{not JSON")
    browser.click("#settings .main")
    assert browser.shows("#settings") and "not JSON" in browser.text("#settings-fault")
    browser.press(Keys.ESCAPE)
    browser.click("#open-settings")
    assert browser.find("#settings [name=tools]").get_attribute("value") == TOOLS, "what was cancelled is kept"
    browser.click("#reset-settings")
    browser.click("#settings .main")
    assert ask(browser, "hello") == "one two three" and "Be brief." not in model.last_prompt()


def test_reasoning_and_tool_calls_are_folded_and_a_tool_is_answered_for(browser: Browser, url: str, model: Model) -> None:
    browser.open(url)
    assert ask(browser, "think") == "Let me see."
    assert browser.text("details summary") == "Reasoning" and not browser.shows("details .body")
    browser.click("details summary")
    assert browser.text("details .body") == "I must look it up."
    set_up(browser, tools=TOOLS)
    ask(browser, "weather")
    assert browser.text("article:last-child details summary") == "Tool call: weather"
    browser.click("article:last-child details summary")
    assert "Oslo" in browser.text("article:last-child details .body")
    browser.write(".result input", "sunny: hello")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("article:last-child .body") == "one two three", "the model does not go on")
    assert "sunny" in model.last_prompt() and browser.text("article.tool summary") == "Tool result: weather"
    assert not browser.all(".result")


def test_markdown_is_shown_and_what_looks_like_a_page_stays_text(browser: Browser, url: str) -> None:
    browser.open(url)
    ask(browser, "format")
    tags = ("h3", "strong", "em", "li", "td", "pre code", "blockquote", "p code")
    missing = [tag for tag in tags if not browser.all(f"article.assistant .body {tag}")]
    assert not missing
    assert browser.text("article.assistant pre code") == "print('<hi>')"
    browser.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as on a page without HTTPS
    browser.click(".copy-code")
    browser.find("#prompt").send_keys(Keys.CONTROL, "v")
    assert browser.find("#prompt").get_attribute("value") == "print('<hi>')", "the code is not copied"
    assert browser.find("article.assistant a").get_attribute("href") == "https://example.org/"

    title = browser.driver.title
    shown = ask(browser, "hostile")
    assert "<img src=x" in shown and "<script>" in shown and "<b>code</b>" in shown
    assert not browser.all("article:last-child :is(img, script, a, b, i, iframe)")
    assert browser.driver.title == title


def test_a_server_with_keys_asks_for_one(browser: Browser, engine: AsyncLLM) -> None:
    with served(engine, api_key=["secret"]) as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait(lambda: "requires an API key" in browser.text("#notice"), "no key is asked for")
        assert not browser.find("#send").is_enabled()
        browser.click("#enter-key")
        assert browser.run("return document.activeElement.name") == "key"
        browser.press("wrong", Keys.ENTER)
        browser.wait(lambda: "rejected" in browser.text("#notice"), "a wrong key is not reported")
        browser.click("#enter-key")
        browser.write("#settings [name=key]", "secret")
        browser.press(Keys.ENTER)
        browser.wait(lambda: not browser.shows("#notice"), "the right key does not help")
        assert ask(browser, "hello") == "one two three"
        browser.click("#tab-live")
        browser.wait(lambda: "Running" in browser.text("#figures"), "the live view has no key")
        assert browser.run("return JSON.stringify(localStorage)").find("secret") == -1, "the key outlives the tab"


def test_the_page_shows_how_far_loading_is_and_what_programs_a_request_waits_for(browser: Browser, tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "model")
    port = free_port()
    with serving(directory, tmp_path, port=port, served_model_name=["slow"], core_factory=SLOW_FACTORY) as server:

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
            except httpx.TransportError:
                return False

        browser.wait(answers, "nothing listens")
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait(lambda: "loading weights, 25 %" in browser.text("#notice"), "the phase is not shown")
        assert browser.find("#notice progress").get_attribute("value") == "25" and not browser.find("#send").is_enabled()
        (directory / "go").touch()
        server.wait_ready()
        browser.wait(lambda: not browser.shows("#notice") and browser.find("#send").is_enabled(), "the notice stays")
        assert ask(browser, "hello") == "one two three"

        browser.click("#new-chat")
        begin(browser, "build it")
        browser.wait(
            lambda: browser.text("article.assistant .body") == "Compiling program 2 of 3 …",
            "the chat does not explain the wait",
        )
        browser.click("#tab-live")
        browser.wait(lambda: "Compiling program 2 of 3; requests" in browser.text("#notice"), "the live view does not")
        assert browser.find("#notice progress").get_attribute("value").startswith("33.3")
        (directory / "built").touch()
        browser.wait(lambda: not browser.shows("#notice"), "the notice stays")
        browser.click("#tab-chat")
        browser.wait(lambda: browser.text("article.assistant .body") == "one two three", "the answer does not come")


def test_the_live_view_shows_figures_and_charts_with_axes(browser: Browser, url: str, model: Model) -> None:
    browser.open(url)
    model.step_seconds = 0.005
    begin(browser, "forever")
    browser.click("#tab-live")
    browser.wait(lambda: "Running requests\n1" in browser.text("#figures"), "the running request is not shown")
    assert "KV cache in use\n25.0 %" in browser.text("#figures")

    def lines() -> list[str]:
        return [str(line.get_attribute("points")) for line in browser.all("#charts polyline")]

    before = lines()
    assert len(before) == 6
    browser.wait(
        lambda: browser.text("#figures").partition("Output tokens/s\n")[2][:1] not in ("", "0", "–"), "no tokens are counted"
    )
    for title, values in (("Running requests", ["2", "1", "0"]), ("KV cache in use, %", ["100", "50", "0"])):
        (chart,) = [each for each in browser.all("#charts figure") if each.text.startswith(title)]
        assert chart.text.splitlines()[2:] == [*values, "2 min ago", "1 min ago", "now"]
    assert all(new != old for new, old in zip(lines(), before, strict=True))
    assert str(browser.find("#charts svg").get_attribute("aria-label")).startswith("Output tokens/s: ")
    browser.press(Keys.ESCAPE)
    browser.wait(lambda: "Running requests\n0" in browser.text("#figures"), "the end is not shown")


def test_the_live_view_shows_host_memory_where_blocks_are_kept_there(
    browser: Browser, url: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser.open(url)
    browser.click("#tab-live")
    browser.wait(lambda: "Preemptions" in browser.text("#more-figures"), "there are no figures")
    assert not browser.shows("#host-memory")
    stats, sizes = model.core.stats, {"num_host_slots": 8, "num_used_host_slots": 4, "num_skipped_stores": 3}
    tokens = {"external_prefix_cache_queries": 100, "external_prefix_cache_hits": 40}
    monkeypatch.setattr(model.core, "stats", lambda: dataclasses.replace(stats(), **sizes, **tokens))
    browser.click("#tab-chat")
    assert ask(browser, "hello") == "one two three"
    browser.click("#tab-live")
    browser.wait(lambda: browser.shows("#host-memory"), "host memory is not shown")
    shown = browser.text("#host-memory")
    assert "Host memory in use\n50.0 %" in shown and "Host memory hits\n40.0 %" in shown and "Blocks not copied\n3" in shown


def test_everything_works_from_the_keyboard(browser: Browser, url: str, model: Model) -> None:
    browser.open(url)
    browser.wait(lambda: browser.find("#send").is_enabled(), "not ready")
    browser.press("hello", Keys.SHIFT + Keys.ENTER + Keys.NULL, "there")
    assert browser.run("return document.getElementById('prompt').value") == "hello\nthere" and not browser.all("article")
    browser.press(Keys.ENTER)
    browser.wait(lambda: "three" in browser.text("article.assistant"), "Enter does not send")
    begin(browser, "forever")
    browser.press(Keys.ESCAPE)
    browser.wait(lambda: "stopped" in browser.text("article.assistant footer"), "Esc does not stop")

    browser.run("document.getElementById('tab-chat').focus()")
    for key, tab in ((Keys.ARROW_RIGHT, "live"), (Keys.ARROW_LEFT, "chat"), (Keys.END, "live"), (Keys.HOME, "chat")):
        browser.press(key)
        assert browser.focus == f"tab-{tab}" and browser.shows(f"#{tab}")
        assert browser.find(f"#tab-{tab}").get_attribute("aria-selected") == "true"
    browser.press("/")
    assert browser.focus == "prompt"

    unseen, unnamed = [], []
    browser.run("document.activeElement.blur()")
    for _ in range(30):
        browser.press(Keys.TAB)
        found = browser.run(
            "const e = document.activeElement, shown = e.id === 'prompt' ? e.parentElement : e;"
            "return [e.id || e.textContent, getComputedStyle(shown).outlineStyle, e.labels?.length || e.ariaLabel || e.textContent]"
        )
        unseen += [found[0]] if found[1] == "none" else []
        unnamed += [found[0]] if not found[2] else []
        if found[0] == "copy-curl":
            break
    assert not unseen and not unnamed and found[0] == "copy-curl"
    browser.click("#open-settings")
    assert browser.run(
        "return [...document.querySelectorAll('dialog :is(input, textarea)')].every((each) => each.labels.length)"
    )
    browser.press(Keys.ESCAPE)
    assert browser.focus == "open-settings"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling_and_every_text_can_be_read(browser: Browser, url: str, scheme: str) -> None:
    browser.open(url, PHONE, scheme)
    for word in ("wide", "format", "think", TOO_LONG):
        ask(browser, word)
    for view in ("#tab-live", "#tab-chat", "#open-settings"):
        browser.click(view)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), view
        assert browser.run("return [...document.querySelectorAll('main, dialog')].every((e) => e.scrollWidth <= innerWidth)"), (
            view
        )
        assert not browser.run(FAINT_TEXTS), view
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(channels(ground)) < 150) == (scheme == "dark")


FAINT_TEXTS = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c[3] !== 0) return c;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.disabled && !e.closest('option')
  && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).filter((e) => {
  const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5;
}).map((e) => e.outerHTML.slice(0, 80));
"""
"""Elements whose text has less contrast with its background than WCAG AA requires."""


@pytest.mark.parametrize("size", [SMALL_PHONE, PHONE])
def test_a_phone_shows_the_whole_name_of_the_model_and_every_button(
    engine: AsyncLLM, browser: Browser, size: tuple[int, int]
) -> None:
    name = "an-organisation-with-a-name/A-Model-With-A-Very-Long-Name-70B-Instruct-v0.3"
    with served(engine, name=name) as server:
        browser.open(f"http://127.0.0.1:{server.port}/", size)
        ask(browser, "wide")
        browser.click("article.user .edit")
        assert browser.text("#model-name") == name
        assert not browser.run(CUT_OFF)


CUT_OFF = """
const shown = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
const overlap = (a, b) => b.left < a.right && a.left < b.right && b.top < a.bottom && a.top < b.bottom;
return shown('#model-name, button').filter((e) => {
  const box = e.getBoundingClientRect();
  const isOverCode = e.closest('article') && shown('pre').some((code) => overlap(box, code.getBoundingClientRect()));
  return box.left < 0 || box.right > innerWidth || e.scrollWidth > e.clientWidth + 1 || isOverCode;
}).map((e) => e.outerHTML.slice(0, 80));
"""
"""Buttons, and the model's name, that leave the screen, are narrower than their text or lie over code."""


def channels(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]


def test_a_turn_that_failed_is_left_out_of_later_requests_and_can_be_retried_edited_and_deleted(
    browser: Browser, url: str, model: Model
) -> None:
    browser.open(url)
    ask(browser, "hello first")
    ask(browser, TOO_LONG)
    assert "maximum context length is 3000 tokens" in browser.text("article.assistant .fault")
    assert "left out of later requests. Shorten your message" in browser.text("article.assistant")
    assert "The request failed" in browser.text("#announced")
    assert ask(browser, "hello second") == "one two three", "the turn that failed made the next one fail"
    assert "hello first" in model.last_prompt() and "too long" not in model.last_prompt()
    browser.driver.refresh()
    browser.wait(lambda: len(browser.all("article.left-out")) == 2, "what failed is not kept apart")

    browser.click(".left-out .edit")
    browser.write(".editor textarea", "hello instead")
    assert "removes 1 later turn." in browser.text(".editor")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.texts("article .body")[2:] == ["hello instead", "one two three"], "it cannot be edited")
    assert "hello first" in model.last_prompt() and "Removed 1 later turn." in browser.text("#removed")

    set_up(browser, tools='[{"type": "telepathy"}]')
    ask(browser, "hello again")
    assert "tools" in browser.text("article.assistant .fault") and "Shorten" not in browser.text("article.assistant")
    set_up(browser, tools="")
    browser.click(".left-out .retry")
    browser.wait(lambda: browser.text("article.assistant .body").startswith("one"), "it cannot be retried")
    assert not browser.all(".left-out") and "hello again" in model.last_prompt()


def test_turns_are_edited_and_deleted_from_the_keyboard_and_what_was_removed_comes_back(
    browser: Browser, url: str, model: Model
) -> None:
    def texts() -> list[str]:
        return browser.texts("article.user .body")

    browser.open(url)
    for word in ("hello first", "hello second", "hello third"):
        ask(browser, word)
    browser.all("article .edit")[1].send_keys(Keys.ENTER)
    browser.press(" edited", Keys.ESCAPE)
    assert texts() == ["hello first", "hello second", "hello third"], "what was cancelled is kept"
    assert browser.run("return document.activeElement.className") == "edit"
    browser.all("article .delete")[1].send_keys(Keys.ENTER)
    assert texts() == ["hello first", "hello third"] and browser.text("#removed-text") == "Turn deleted."
    assert browser.focus == "undo"
    browser.press(Keys.ENTER)
    assert texts() == ["hello first", "hello second", "hello third"] and browser.focus == "messages"
    browser.all("article .delete")[1].send_keys(Keys.ENTER)
    ask(browser, "hello fourth")
    assert "hello second" not in model.last_prompt() and not browser.shows("#undo")

    browser.all("article .retry")[0].send_keys(Keys.ENTER)
    browser.wait(lambda: texts() == ["hello first"] and not browser.shows("#stop"), "the first turn is not retried")
    assert browser.text("#removed-text") == "Removed 2 later turns."
    browser.click("#undo")
    assert texts() == ["hello first", "hello third", "hello fourth"]
    browser.click("#new-chat")
    browser.click("#undo")
    assert texts() == ["hello first", "hello third", "hello fourth"]


def test_the_page_is_small_and_can_be_left_out(engine: AsyncLLM) -> None:
    assert sum(len(reply.body) for reply in page_replies().values()) < 64_000
    assert not any(word in reply.body for reply, word in itertools.product(page_replies().values(), (b"innerHTML", b"eval(")))
    with served(engine, web=False) as server:
        assert [server.client.get(path).status_code for path in ("/", "/web/page.js")] == [404, 404]
