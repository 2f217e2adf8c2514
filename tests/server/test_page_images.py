"""Images on the web page, in headless Chromium: chosen, pasted and dropped, shown, sent, and kept."""

import base64
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'jaxllm[browser]'")

from PIL import Image
from selenium.webdriver.common.keys import Keys

from jaxllm.async_llm import AsyncLLM
from tests.helpers.browser import PHONE, Browser, programs
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.helpers.seeing_core import file_of, seeing_core, write_seeing
from tests.helpers.tiny_tokenizers import write_tokenizer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(programs() is None, reason="needs chromium and chromedriver"),
]
GIVE = """
const [how, name, type, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
const target = how === 'paste' ? document.activeElement : document.querySelector('#box');
const event = how === 'paste'
  ? new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true })
  : new DragEvent(how, { dataTransfer: data, bubbles: true, cancelable: true });
target.dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> FakeEngineCore:
    return seeing_core(write_seeing(tmp_path_factory.mktemp("seeing")), max_model_len=3000)


@pytest.fixture(scope="module")
def url(core: FakeEngineCore) -> Iterator[str]:
    with AsyncLLM(core=core) as engine, LiveServer.start(engine, served_model_name=["tiny"]) as server:
        yield f"http://127.0.0.1:{server.port}/"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, url: str) -> Iterator[Browser]:
    window.requests(), window.complaints()
    window.open(url)
    window.wait(lambda: window.shows("#add-image"), "images cannot be added")
    yield window
    assert not window.complaints()


def give(browser: Browser, how: str, name: str, file: bytes, kind: str = "image/png") -> bool:
    """Paste or drop a file. Returns whether the page took the event."""
    return bool(browser.run(GIVE, how, name, kind, base64.b64encode(file).decode()))


def thumbnails(browser: Browser) -> list[str]:
    return list(browser.run("return [...document.querySelectorAll('#images img')].map((image) => image.alt)"))


def are_drawn(browser: Browser, selector: str) -> bool:
    """Whether all these images are shown with their pixels."""
    script = "return [...document.querySelectorAll(arguments[0])].every((image) => image.complete && image.naturalWidth > 0)"
    return bool(browser.all(selector)) and bool(browser.run(script, selector))


def wait_for(browser: Browser, *names: str) -> None:
    browser.wait(lambda: thumbnails(browser) == list(names), f"there are no thumbnails of {names}")


def send(browser: Browser, text: str = "") -> None:
    if text:
        browser.write("#prompt", text)
    browser.find("#prompt").send_keys(Keys.ENTER)
    browser.wait(lambda: browser.text("article.assistant .body") == "one two three", "no answer comes")


def sizes(core: FakeEngineCore) -> list[tuple[int, ...]]:
    """Rows and columns of the images of the last request."""
    return [tuple(item.grid or ())[1:] for item in core.requests[-1].items]


def test_images_are_chosen_pasted_and_dropped_and_sent_in_order(browser: Browser, core: FakeEngineCore, tmp_path: Path) -> None:
    (tmp_path / "first.png").write_bytes(file_of(64, 32))
    browser.find("#image-files").send_keys(str(tmp_path / "first.png"))
    wait_for(browser, "first.png")
    assert browser.focus == "prompt", "one goes on typing"
    assert give(browser, "paste", "second.png", file_of(96, 32, "blue"))
    wait_for(browser, "first.png", "second.png")
    assert give(browser, "dragover", "x.png", b"") and browser.shows("#chat.takes-drop")
    assert give(browser, "drop", "third.jpg", file_of(32, 32, "green", "JPEG"), "image/jpeg")
    wait_for(browser, "first.png", "second.png", "third.jpg")
    assert not browser.shows("#chat.takes-drop") and are_drawn(browser, "#images img")
    assert browser.run("return document.querySelector('#announced').textContent") == "3 images to send."
    send(browser, "what are these?")
    assert sizes(core) == [(1, 2), (1, 3), (1, 1)]
    assert not browser.shows("#images") and are_drawn(browser, "article.user .images img")
    assert browser.text("article.user .body") == "what are these?"
    send(browser, "and now?")
    assert len(sizes(core)) == 3, "the whole conversation is sent"


def test_images_that_browsers_read_and_servers_do_not_are_sent_as_jpeg(browser: Browser, core: FakeEngineCore) -> None:
    give(browser, "paste", "a.avif", file_of(64, 32, format="AVIF"), "image/avif")
    wait_for(browser, "a.avif")
    send(browser)
    assert sizes(core) == [(1, 2)]


def test_an_image_may_be_sent_without_words_and_its_turn_edited_and_retried(browser: Browser, core: FakeEngineCore) -> None:
    give(browser, "paste", "a.png", file_of(64, 32))
    wait_for(browser, "a.png")
    send(browser)
    assert sizes(core) == [(1, 2)] and not browser.shows("article.user .body")
    browser.click("article.user .edit")
    browser.write("article.user textarea", "what is it?")
    browser.press(Keys.ENTER)
    browser.wait(lambda: browser.text("article.user .body") == "what is it?", "the turn is not edited")
    browser.wait(lambda: browser.shows("article.assistant footer"), "no answer comes")
    assert sizes(core) == [(1, 2)] and are_drawn(browser, "article.user .images img")


def test_thumbnails_are_removed_by_keyboard(browser: Browser, core: FakeEngineCore) -> None:
    for name in ("a.png", "b.png"):
        give(browser, "paste", name, file_of())
        browser.wait(lambda name=name: name in thumbnails(browser), "no thumbnail comes")  # type: ignore[misc]
    assert [button.get_attribute("aria-label") for button in browser.all("#images button")] == [
        "Remove a.png",
        "Remove b.png",
    ]
    browser.find("#images button").send_keys(Keys.ENTER)
    wait_for(browser, "b.png")
    assert browser.run("return document.activeElement.getAttribute('aria-label')") == "Remove b.png"
    browser.press(Keys.ENTER)
    browser.wait(lambda: not browser.shows("#images") and browser.focus == "prompt", "the focus is lost")
    send(browser, "hello")
    assert not core.requests[-1].items


def test_files_that_are_not_images_are_named(browser: Browser) -> None:
    give(browser, "drop", "notes.txt", b"just text", "text/plain")
    browser.wait(
        lambda: "notes.txt is not an image that this browser can read." in browser.text("#image-fault"), "nothing is said"
    )
    give(browser, "drop", "torn.png", file_of()[:40])
    browser.wait(lambda: "torn.png is not an image" in browser.text("#image-fault"), "nothing is said")
    assert not browser.shows("#images")
    give(browser, "drop", "a.png", file_of())
    wait_for(browser, "a.png")
    assert not browser.text("#image-fault")


def test_large_images_are_made_smaller_before_they_are_sent(browser: Browser) -> None:
    script = """
    const canvas = Object.assign(document.createElement('canvas'), { width: 3000, height: 1000 });
    const context = canvas.getContext('2d');
    const pixels = context.createImageData(3000, 1000);
    for (let i = 0; i < pixels.data.length; i += 65536) crypto.getRandomValues(pixels.data.subarray(i, i + 65536));
    context.putImageData(pixels, 0, 0);
    canvas.toBlob((blob) => {
      const data = new DataTransfer();
      data.items.add(new File([blob], 'large.png', { type: 'image/png' }));
      document.activeElement.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }));
    });
    """
    browser.run(script)
    wait_for(browser, "large.png")
    browser.wait(lambda: are_drawn(browser, "#images img"), "it is not drawn")
    width, source = browser.run(
        "const [image] = document.querySelectorAll('#images img'); return [image.naturalWidth, image.src]"
    )
    assert width == 2048 and source.startswith("data:image/jpeg;base64,")


def test_images_are_kept_over_a_reload_and_are_part_of_exports(browser: Browser, core: FakeEngineCore) -> None:
    give(browser, "paste", "a.png", file_of(64, 32))
    wait_for(browser, "a.png")
    send(browser, "see")
    browser.driver.refresh()
    browser.wait(lambda: are_drawn(browser, "article.user .images img"), "the image is lost")
    stored = json.loads(browser.run("return localStorage.getItem('jaxllm-conversation')"))
    assert stored[0]["images"][0]["url"].startswith("data:image/png;base64,")
    browser.wait(lambda: browser.find("#send").is_enabled(), "the page takes no question")
    browser.run("localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 2000))")
    give(browser, "paste", "b.png", file_of(512, 512))
    wait_for(browser, "b.png")
    send(browser, "and this")
    assert len(sizes(core)) == 2, "what the browser cannot keep is sent all the same"
    browser.wait(lambda: browser.shows("#send"), "the answer does not end")
    stored = json.loads(browser.run("return localStorage.getItem('jaxllm-conversation')"))
    assert [(message["content"], message["images"]) for message in stored[::2]] == [("see", []), ("and this", [])]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_request_with_images_is_copied_as_a_command_that_runs(browser: Browser, core: FakeEngineCore) -> None:
    noise = io.BytesIO()
    Image.effect_noise((400, 400), 90).save(noise, "PNG")
    assert len(noise.getvalue()) > 100_000, "longer than an argument may be"
    browser.run("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    for name, file in (("a.png", file_of(64, 32)), ("noise.png", noise.getvalue())):
        give(browser, "paste", name, file)
        wait_for(browser, name)
        send(browser, "what's this?")
        browser.click("#copy-curl")
        browser.wait(lambda: browser.run("return window.copied"), "nothing is copied")
        asked, command = (
            core.requests[-1].prompt_token_ids,
            browser.run("const text = window.copied; window.copied = ''; return text"),
        )
        done = subprocess.run(["bash"], input=command, capture_output=True, text=True, timeout=30)
        reply = json.loads(done.stdout)
        assert reply["usage"]["prompt_tokens"] > len(asked), "the answer is part of the conversation too"


def test_the_page_fits_a_phone_with_images(browser: Browser, url: str) -> None:
    browser.open(url, PHONE)
    browser.wait(lambda: browser.shows("#add-image"), "images cannot be added")
    for name in ("a.png", "b.png", "c.png", "d.png", "e.png"):
        give(browser, "paste", name, file_of(320, 32))
        browser.wait(lambda name=name: name in thumbnails(browser), "no thumbnail comes")  # type: ignore[misc]
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    send(browser, "wide")
    assert browser.run("return document.querySelector('#messages').scrollWidth <= innerWidth")


def test_a_model_of_text_takes_none(window: Browser, tmp_path: Path) -> None:
    core: Any = fake_core(write_tokenizer(tmp_path), max_model_len=500)
    with AsyncLLM(core=core) as engine, LiveServer.start(engine, served_model_name=["tiny"]) as server:
        window.open(f"http://127.0.0.1:{server.port}/")
        window.wait(lambda: window.find("#send").is_enabled(), "the page takes no question")
        assert not window.shows("#add-image")
        assert not give(window, "paste", "a.png", file_of()) and not give(window, "dragover", "a.png", file_of())
        assert not window.shows("#images")
