"""Work that a request makes before it is admitted: long lists, long texts, and clients that leave."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target, cpu_of

_AT_ONCE = 4
_USER = {"role": "user", "content": "a"}


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [_USER], "max_tokens": 4, **fields}).encode()


def _completion(**fields: Any) -> bytes:
    return json.dumps({**wire.PLAIN, **fields}).encode()


def _spaces(size: int) -> bytes:
    return b'{"prompt": ' + b" " * size + b'"import ", "max_tokens": 4}'


def _judge(target: Target, seen: Seen, path: str, body: bytes) -> None:
    """Four such requests at once: how long they take, what they cost, how long others wait."""
    server = target.server()
    api_servers = server.pids("server.api_server")
    data = wire.head_and_body(server, "POST", path, body)
    answers: list[wire.Answer] = []
    before = cpu_of(api_servers)
    with Bystander(server) as other:
        _together(lambda: answers.append(wire.exchange(server, data, seconds=90)), _AT_ONCE)
        _until_quiet(api_servers)
    used = cpu_of(api_servers) - before
    statuses = sorted({answer.status for answer in answers})
    seen.equal("answered", bool(statuses) and set(statuses) <= {200, 400, 413, 422, 429}, True)
    seen.seconds(f"with {', '.join(map(str, statuses))} after", max(answer.seconds for answer in answers), 10.0)
    if api_servers:
        seen.seconds("CPU of the API server", used, 4.0)
    other.judge(seen, 2.0)


@attack("low to medium", "30,000 messages")
def many_messages(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.CHAT, _chat(messages=[_USER] * 30_000))


@attack("low to medium", "one message of 30,000 parts")
def many_parts(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.CHAT, _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]))


@attack("low to medium", "31 MB of spaces as a prompt")
def spaces(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _completion(prompt=" " * 31_000_000))


@attack("low to medium", "30,000 items of a response")
def many_items(target: Target, seen: Seen) -> None:
    _judge(target, seen, "/v1/responses", json.dumps({"input": [_USER] * 30_000, "max_output_tokens": 16}).encode())


@attack("low to medium", "31 MB of spaces as a message")
def spaces_in_chat(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.CHAT, _chat(messages=[{"role": "user", "content": " " * 31_000_000}]))


@attack("low to medium", "31 MB of spaces between two fields")
def spaces_in_json(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _spaces(31_000_000))


@attack("low to medium", "500,000 allowed_token_ids")
def many_allowed_ids(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _completion(allowed_token_ids=[5] * 500_000))


@attack("low to medium", "a million prompt token ids")
def many_prompt_ids(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _completion(prompt=[5] * 1_000_000))


@attack("low to medium", "1,024 prompts of 20 KB")
def many_prompts(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _completion(prompt=["word " * 4000] * 1024))


@attack("low to medium", "tools with a schema of 60,000 properties")
def many_properties(target: Target, seen: Seen) -> None:
    schema = {"type": "object", "properties": {str(number): {} for number in range(60_000)}}
    _judge(target, seen, wire.CHAT, _chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]))


@attack("low to medium", "a JSON body nested a million deep")
def deep_body(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")


@attack("low to medium", "31 MB of spaces as a prompt of which ten tokens are kept")
def truncated_spaces(target: Target, seen: Seen) -> None:
    _judge(target, seen, wire.COMPLETIONS, _completion(prompt=" " * 31_000_000, truncate_prompt_tokens=10))


def _leaving(target: Target, seen: Seen, path: str, body: bytes, count: int = 2) -> None:
    """Clients send a request and are gone a second later; the work for them must end too."""
    server = target.server()
    api_servers = server.pids("server.api_server")
    data = wire.head_and_body(server, "POST", path, body)

    def visit() -> None:
        with wire.connect(server) as stream:
            stream.sendall(data)
            time.sleep(1)

    before = cpu_of(api_servers)
    with Bystander(server) as other:
        _together(visit, count)
        _until_quiet(api_servers)
    seen.seconds("CPU of the API server", cpu_of(api_servers) - before, 4.0)
    other.judge(seen, 2.0)


def _together(visit: Callable[[], None], count: int) -> None:
    visitors = [threading.Thread(target=visit, daemon=True) for _ in range(count)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(100)


def _until_quiet(pids: list[int], seconds: float = 60.0) -> None:
    """Until these processes compute next to nothing for a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = cpu_of(pids)
        time.sleep(1)
        if cpu_of(pids) - before < 0.15:
            return


@attack("medium", "128 bad words of 100 KB, from two clients that leave after a second")
def bad_words(target: Target, seen: Seen) -> None:
    _leaving(target, seen, wire.COMPLETIONS, _completion(bad_words=["ab " * 33_000] * 128))


@attack("medium", "64 stop strings of 100 KB, from two clients that leave after a second")
def stop_strings(target: Target, seen: Seen) -> None:
    _leaving(target, seen, wire.COMPLETIONS, _completion(stop=["ab " * 33_000] * 64))


@attack("medium", "a prompt of 15 MB, from four clients that leave after a second")
def left_prompts(target: Target, seen: Seen) -> None:
    _leaving(target, seen, wire.COMPLETIONS, _completion(prompt="word " * 3_000_000), count=4)


@attack("medium", "/tokenize of 15 MB, from four clients that leave after a second")
def left_tokenize(target: Target, seen: Seen) -> None:
    _leaving(target, seen, "/tokenize", json.dumps({"prompt": "word " * 3_000_000}).encode(), count=4)
