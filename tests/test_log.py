import io
import json
import logging
from types import SimpleNamespace

import pytest

from jaxllm import env, log
from jaxllm.errors import ConfigError


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where the project's messages go, with a logger as in a fresh process."""
    for name in (env.LOG_LEVEL, env.LOG_FORMAT):
        monkeypatch.delenv(name, raising=False)
    written = io.StringIO()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=written))
    monkeypatch.setattr(log, "logger", logging.Logger("jaxllm"))
    return written


def test_json_lines_have_the_message_its_level_and_what_is_added(stream: io.StringIO) -> None:
    log.set_up("info", format="json")
    try:
        raise ValueError("inner")
    except ValueError:
        log.logger.error("two\nlines of %s", "text", exc_info=True, extra={"request_id": "r"})
    log.logger.debug("not shown")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"], found["request_id"]) == (
        "error",
        "jaxllm",
        "two\nlines of text",
        "r",
    )
    assert "ValueError: inner" in found["exception"] and found["time"].endswith("+00:00")


def test_the_environment_chooses_the_format(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.LOG_FORMAT, "json")
    log.set_up(formatter=logging.Formatter("plain %(message)s"))
    log.logger.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"
    monkeypatch.setenv(env.LOG_FORMAT, "xml")
    with pytest.raises(ConfigError, match="text, json"):
        log.set_up()


def test_other_loggers_can_write_the_same_way(stream: io.StringIO) -> None:
    log.set_up("info", format="json")
    library = logging.getLogger("some.library")
    log.adopt("some.library", level="warning")
    library.info("chatter")
    library.warning("trouble")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["trouble"]
    library.handlers.clear()


def test_text_from_outside_stays_on_its_line_and_commands_nothing() -> None:
    assert log.safe("a\r\nINFO forged\x1b[2J\x9b\u2028\u202eb\ud800é漢") == (
        "a\\u000d\\u000aINFO forged\\u001b[2J\\u009b\\u2028\\u202eb\\ud800é漢"
    )
    assert log.safe("x" * 12, 10) == "xxxxxxxxxx… (2 more characters)" and log.safe("short", 10) == "short"


def test_messages_go_to_what_is_stderr_when_they_come(stream: io.StringIO) -> None:
    log.set_up("info")
    stream.close()
    log.sys.stderr = later = io.StringIO()  # type: ignore[misc, attr-defined]
    log.logger.info("hello")
    assert later.getvalue().endswith("hello\n")
