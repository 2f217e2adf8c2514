"""Pages of other origins in headless Chromium, against the server as it runs by default: on 127.0.0.1, without a key."""

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("selenium", reason="needs selenium: pip install 'jaxllm[browser]'")

from jaxllm.async_llm import AsyncLLM
from tests.helpers.browser import Browser, programs
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(programs() is None, reason="needs chromium and chromedriver"),
]
REBOUND, FOREIGN = "rebound.example", "foreign.example"
"""Names that lead to 127.0.0.1 in this browser, as DNS rebinding has it."""
DRIVE = """
const [url, prompt, done] = arguments;
const posted = [];
const body = JSON.stringify({ model: 'm', prompt, max_tokens: 1 });
const bodies = [{}, { body, headers: { 'Content-Type': 'text/plain' } }, { body: new Blob([body]) }];
for (const path of ['reset_prefix_cache', 'sleep', 'pause', 'v1/completions', 'api/generate'])
  for (const more of bodies)
    for (const mode of ['no-cors', 'cors'])
      posted.push(fetch(url + path, { method: 'POST', mode, ...more }).then((reply) => reply.status, () => 'blocked'));
posted.push(fetch(url + 'v1/completions', { method: 'POST', body, headers: { 'Content-Type': 'application/json' } })
  .then((reply) => reply.status, () => 'blocked'));
navigator.sendBeacon(url + 'reset_prefix_cache', body);
const loaded = (tag, path) => new Promise((end) => {
  const element = document.createElement(tag);
  element.onload = () => end('loaded');
  element.onerror = () => end('blocked');
  element.src = url + path;
  document.body.append(element);
});
const submitted = (path) => new Promise((end) => {
  const frame = document.createElement('iframe'), form = document.createElement('form');
  frame.name = form.target = 'f' + path;
  frame.onload = () => end('loaded');
  Object.assign(form, { method: 'post', enctype: 'text/plain', action: url + path });
  document.body.append(frame, form);
  form.submit();
});
Promise.all([
  Promise.all(posted),
  fetch(url + 'v1/models').then((reply) => reply.text(), () => 'blocked'),
  fetch(url + 'metrics').then((reply) => reply.text(), () => 'blocked'),
  loaded('img', 'web/icon.svg'),
  loaded('script', 'web/dom.js'),
  submitted('pause'),
  submitted('sleep'),
]).then(([statuses, ...read]) => done({ statuses: [...new Set(statuses)], read }));
"""
"""Requests of a page to another origin without a preflight. Ends with what it got to see."""

ASK = """
const [url, done] = arguments;
const body = JSON.stringify({ prompt: 'hi' });
const asked = { method: 'POST', body, headers: { 'Content-Type': 'application/json' } };
Promise.all([fetch(url + 'v1/models'), fetch(url + 'v1/completions', asked)])
  .then((replies) => Promise.all(replies.map((reply) => reply.json()))).then(done, (error) => done([String(error), null]));
"""


@contextlib.contextmanager
def running(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_port
        site.shutdown()


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    """The port of another site, which has one empty page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a page</title><a id=away>away</a>")

        def log_message(self, *_: Any) -> None:
            pass

    with running(Page) as port:
        yield port


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    names = ",".join(f"MAP {name} 127.0.0.1" for name in (REBOUND, FOREIGN))
    with Browser.start(tmp_path_factory.mktemp("chromium"), f"--host-resolver-rules={names}") as browser:
        browser.driver.set_script_timeout(30)
        yield browser


@pytest.fixture
def touched(core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requests that reached the engine."""
    found: list[str] = []

    def call(name: str, method: Any, *arguments: Any, **more: Any) -> Any:
        found.append(name)
        return method(*arguments, **more)

    for name in ("reset_prefix_cache", "sleep", "pause", "add_request"):
        monkeypatch.setattr(core, name, functools.partial(call, name, getattr(core, name)))
    yield found
    core.wake_up()
    core.resume()


def drive(browser: Browser, page_url: str, server_url: str) -> dict[str, Any]:
    browser.driver.get(page_url)
    return dict(browser.driver.execute_async_script(DRIVE, server_url, "hi"))


@pytest.mark.parametrize("site", ["127.0.0.1", "localhost", FOREIGN])
def test_a_page_of_another_origin_neither_reads_nor_drives_the_server(
    engine: AsyncLLM, browser: Browser, page: int, touched: list[str], site: str
) -> None:
    with LiveServer.start(engine, enable_dev_endpoints=True) as server:
        url = f"http://127.0.0.1:{server.port}/"
        found = drive(browser, f"http://{site}:{page}/", url)
        assert not touched and not server.client.get("/is_sleeping").json()["is_sleeping"]
        assert set(found["statuses"]) <= {"blocked", 0}, "a page sees an answer"
        assert found["read"][:4] == ["blocked"] * 4

        browser.run("arguments[0].href = arguments[1]; arguments[0].click()", browser.find("#away"), url)
        browser.wait(lambda: browser.text("#model") != "", "a link from another site does not show the page")


def test_a_rebound_name_neither_reads_nor_drives_the_server(engine: AsyncLLM, browser: Browser, touched: list[str]) -> None:
    with LiveServer.start(engine, enable_dev_endpoints=True) as server:
        url = f"http://{REBOUND}:{server.port}/"
        found = drive(browser, url, url)  # a document of that origin, whatever it says
        assert not touched and not server.client.get("/is_sleeping").json()["is_sleeping"]
        assert set(found["statuses"]) == {403}
        for text in found["read"][:2]:
            assert "--allowed-hosts" in json.loads(text)["error"]["message"]


def test_pages_that_are_allowed_work(engine: AsyncLLM, browser: Browser, page: int, touched: list[str]) -> None:
    origin = f"http://{FOREIGN}:{page}"
    with LiveServer.start(engine, enable_dev_endpoints=True, allowed_origins=[origin], allowed_hosts=[REBOUND]) as server:
        browser.driver.get(origin + "/")
        models, answer = browser.driver.execute_async_script(ASK, f"http://{REBOUND}:{server.port}/")
        assert models["data"][0]["id"] and answer["choices"][0]["text"] and touched == ["add_request"]


@contextlib.contextmanager
def proxy(upstream: int, *, keeps_host: bool) -> Iterator[int]:
    """The port of a reverse proxy of the server at a port; with its upstream's address as Host unless it keeps the client's."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if keeps_host or name != "Host"}
            reply = httpx.request(self.command, f"http://127.0.0.1:{upstream}{self.path}", headers=headers, content=body)
            self.send_response(reply.status_code)
            for name in ("content-type", "content-security-policy"):
                self.send_header(name, reply.headers.get(name, ""))
            self.end_headers()
            self.wfile.write(reply.content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with running(Proxy) as port:
        yield port


@pytest.mark.parametrize(
    ("name", "keeps_host", "options"),
    [
        ("localhost", False, {}),  # the browser trusts the name as it does HTTPS, and says that the page is the server's own
        (FOREIGN, True, {"allowed_hosts": [FOREIGN]}),
        (FOREIGN, True, {"host": "0.0.0.0"}),
    ],
)
def test_the_page_works_behind_a_proxy(
    engine: AsyncLLM, browser: Browser, name: str, keeps_host: bool, options: dict[str, Any]
) -> None:
    with LiveServer.start(engine, **options) as server, proxy(server.port, keeps_host=keeps_host) as port:
        browser.driver.get(f"http://{name}:{port}/")
        browser.wait(lambda: browser.text("#model") != "", "the page does not reach the server")
        models, answer = browser.driver.execute_async_script(ASK, "/")
        assert models["data"][0]["id"] and answer["choices"][0]["text"]
