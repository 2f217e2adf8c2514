"""Batch files: their lines, the order of the answers, and runs that are taken up again."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from jaxllm.errors import ConfigError
from server.batch import run as batch
from server.batch.lines import BatchLine, read_lines
from server.batch.output_file import BatchOutput
from server.batch.run import BatchResult, EngineStopped, run_batch
from tests.server.client import Client


class App:
    """Answers with the `say` of each body; records the number of concurrent requests, and can wait on demand."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_running = self.most_running = 0
        self.statuses: dict[str, list[int]] = {}
        self.blocked: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        said = body["say"]
        self.asked.append(said)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        if said in self.blocked:
            await self.blocked[said].wait()
        self.num_running -= 1
        status = self.statuses[said].pop(0) if self.statuses.get(said) else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"id-" + said.encode())]})
        await send({"type": "http.response.body", "body": json.dumps({"said": said}).encode(), "more_body": False})


def lines(*said: str) -> list[BatchLine]:
    return [BatchLine(number, each, "/v1/completions", {"say": each}) for number, each in enumerate(said, 1)]


def run(app: Any, asked: Sequence[BatchLine], path: Path, *, max_in_flight: int = 4, alive: bool = True) -> BatchResult:
    return asyncio.run(run_batch(app, asked, BatchOutput(path), max_in_flight=max_in_flight, is_alive=lambda: alive))


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[Any]:
    return [record["custom_id"] for record in written(path)]


def test_answers_come_in_order_so_many_at_a_time(tmp_path: Path) -> None:
    app = App()
    names = [str(number) for number in range(20)]
    result = run(app, lines(*names), tmp_path / "out", max_in_flight=3)
    assert ids(tmp_path / "out") == names
    assert app.most_running == 3
    assert (result.num_answered, result.num_failed, result.num_skipped) == (20, 0, 0)
    first = written(tmp_path / "out")[0]
    assert first["response"] == {"status_code": 200, "request_id": "id-0", "body": {"said": "0"}}
    assert first["error"] is None and first["id"].startswith("batch_req_")


def test_a_failed_line_does_not_stop_the_others(tmp_path: Path) -> None:
    app = App()
    app.statuses = {"b": [400], "c": [500]}
    asked = [*lines("a", "b", "c"), BatchLine(4, "d", fault="body must be an object"), BatchLine(5, fault="is not valid JSON")]
    result = run(app, asked, tmp_path / "out")
    records = written(tmp_path / "out")
    assert [record["response"] and record["response"]["status_code"] for record in records] == [200, 400, 500, None, None]
    assert records[3]["error"] == {"code": "invalid_line", "message": "line 4: body must be an object"}
    assert (result.num_answered, result.num_failed) == (1, 4)


def test_a_full_engine_is_asked_again_and_a_dead_one_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "RETRY_SECONDS", 0)
    app = App()
    app.statuses = {"b": [503, 503]}
    run(app, lines("a", "b"), tmp_path / "out")
    assert [record["response"]["status_code"] for record in written(tmp_path / "out")] == [200, 200]
    app.statuses = {"b": [503]}
    with pytest.raises(EngineStopped):
        run(app, lines("a", "b", "c"), tmp_path / "again", alive=False)
    assert "a" in ids(tmp_path / "again")


def test_a_second_run_asks_only_for_what_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    app = App()
    app.statuses = {"c": [500]}
    run(app, lines("b", "c"), out)
    with out.open("a") as file:
        file.write('{"id":"x","custom_id":"d","resp')  # the run was killed while it wrote
    out.chmod(0o640)
    (tmp_path / "out.sorting").symlink_to("another")  # by another user, in a directory for all
    (tmp_path / "another").write_text("left alone")
    app.asked.clear()
    result = run(app, lines("a", "b", "c", "d"), out)
    assert app.asked == ["a", "c", "d"]
    assert ids(out) == ["a", "b", "c", "d"]
    assert (result.num_answered, result.num_skipped) == (3, 1)
    assert out.stat().st_mode & 0o777 == 0o640 and (tmp_path / "another").read_text() == "left alone"
    assert [path.name for path in tmp_path.glob("*.sorting")] == ["out.sorting"]


def test_an_interrupted_run_keeps_what_is_done_and_is_in_order_after_the_next(tmp_path: Path) -> None:
    out, app = tmp_path / "out", App()

    async def interrupted() -> None:
        app.blocked["a"] = asyncio.Event()
        task = asyncio.create_task(
            run_batch(app, lines("a", "b", "c"), BatchOutput(out), max_in_flight=3, is_alive=lambda: True)
        )
        while app.num_running != 1 or len(app.asked) < 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert ids(out) == ["b", "c"]
    app.blocked.clear()
    run(app, lines("a", "b", "c"), out)
    assert ids(out) == ["a", "b", "c"]
    assert app.asked == ["a", "b", "c", "a"]


def test_answers_to_other_requests_are_not_thrown_away(tmp_path: Path) -> None:
    run(App(), lines("a"), tmp_path / "out")
    run(App(), lines("b"), tmp_path / "out")
    assert ids(tmp_path / "out") == ["b", "a"]


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"a": 1}\n', '{"custom_id": "a", "response": 3}\n'])
def test_a_file_that_is_no_output_of_a_batch_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not the output of a batch"):
        BatchOutput(path)
    assert path.read_text() == text


def test_each_kind_of_wrong_line_is_told(tmp_path: Path) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    given = [
        good,
        good,
        {**good, "custom_id": ""},
        {**good, "custom_id": 5},
        {**good, "custom_id": "b", "method": "GET"},
        {**good, "custom_id": "c", "url": "/health"},
        {**good, "custom_id": "d", "url": []},
        {**good, "custom_id": "e", "body": [1]},
        {**good, "custom_id": "f", "body": {"stream": True}},
        [1],
    ]
    path = tmp_path / "in"
    path.write_text("\n".join(map(json.dumps, given)) + "\n\n{\n" + "[" * 100_000)
    found = list(read_lines(path))
    assert [line.number for line in found] == [*range(1, 11), 12, 13]
    assert found[0].fault is None
    words = ["line 1", "custom_id", "custom_id", "method", "url", "url", "body", "body.stream", "object", "JSON", "JSON"]
    assert all(word in (line.fault or "") for word, line in zip(words, found[1:], strict=True))


def test_the_real_application_answers_batches(client: Client, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [
        BatchLine(1, "a", "/v1/chat/completions", chat),
        BatchLine(2, "b", "/v1/completions", {"prompt": "hi"}),
        BatchLine(3, "c", "/v1/responses", {"input": "hi"}),
        BatchLine(4, "d", "/v1/chat/completions", {**chat, "temperature": -1.0}),
    ]
    client.run(run_batch(client.app, asked, BatchOutput(tmp_path / "out"), max_in_flight=2, is_alive=lambda: True))
    a, b, c, d = (record["response"] for record in written(tmp_path / "out"))
    assert a["body"]["choices"][0]["message"]["content"] == "one two three"
    assert b["body"]["choices"][0]["text"] == "one two three"
    assert c["body"]["output"][0]["content"][0]["text"] == "one two three"
    assert (d["status_code"], d["body"]["error"]["param"]) == (400, "temperature")
