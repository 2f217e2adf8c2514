"""Stored responses of others, and files of requests."""

import json
from typing import Any

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.hostile import BODY_KINDS
from scripts.attacking.target import Target, directory

RESPONSES = "/v1/responses"
_LIMIT = 8
STORING = (
    "--api-key",
    "one",
    "--api-key",
    "two",
    "--max-stored-responses",
    str(_LIMIT),
    "--max-stored-response-bytes",
    "200000",
)
_BODY: dict[str, Any] = {"input": "a", "max_output_tokens": 16, "temperature": 0, "store": True}


def _made(server: Any, key: str, **fields: Any) -> str:
    answer = wire.post(server, RESPONSES, {**_BODY, **fields}, wire.bearer(key))
    try:
        return str(json.loads(answer.body)["id"])
    except (ValueError, KeyError):
        return f"status-{answer.status}"


@attack("high", "responses of another key: reading, continuing, cancelling, deleting", quick=True)
def others_responses(target: Target, seen: Seen) -> None:
    server = target.server(*STORING)
    mine, other = wire.bearer("one"), wire.bearer("two")
    made = _made(server, "one")
    path = f"{RESPONSES}/{made}"
    seen.equal("its owner reads it", wire.get(server, path, mine).status, 200)
    through = []
    tries = {
        "read": wire.get(server, path, other),
        "read as a stream": wire.get(server, f"{path}?stream=true", other),
        "items": wire.get(server, f"{path}/input_items", other),
        "cancelled": wire.post(server, f"{path}/cancel", b"", other),
        "deleted": wire.request(server, "DELETE", path, None, other),
        "continued": wire.post(server, RESPONSES, {**_BODY, "previous_response_id": made}, other),
        "read without a key": wire.get(server, path),
        "read by half its id": wire.get(server, path[:-8], mine),
        "read by a path": wire.get(server, f"{RESPONSES}/x/../{made}", other),
        "read by its id twice": wire.get(server, f"{path}/{made}", other),
    }
    through += [name for name, answer in tries.items() if answer.status < 400]
    seen.none_of("got through", through, len(tries))
    unknown = wire.get(server, f"{RESPONSES}/resp_{'0' * 32}", other)
    same = unknown.status == tries["read"].status and len(unknown.body) == len(tries["read"].body) + 37 - len(made)
    seen.equal("another's id answers as one that is none", same, True)
    seen.equal("it is still there", wire.get(server, path, mine).status, 200)
    seen.equal("its id has 128 random bits", len(made.partition("_")[2]) >= 32, True)


@attack("medium", "many, large and chained responses in a small store", quick=True)
def full_store(target: Target, seen: Seen) -> None:
    server = target.server(*STORING)
    mine = wire.bearer("one")
    ids = [_made(server, "one", input="word " * 10) for _ in range(_LIMIT + 12)]
    kept = sum(wire.get(server, f"{RESPONSES}/{each}", mine).status == 200 for each in ids)
    seen.equal(f"kept of {len(ids)}", kept <= _LIMIT, True)
    large = _made(server, "one", metadata={f"k{number}": "a" * 500 for number in range(16)}, input="a " * 20)
    chain = _made(server, "one")
    for _ in range(_LIMIT):
        chain = _made(server, "one", previous_response_id=chain)
    seen.equal("a chain of 9 turns", chain.startswith("resp_"), True)
    strange = ["resp_", "..", "%00", "resp_" + "a" * 4000, "1' or '1'='1", "{}", "resp_\\u0000"]
    found = [
        each
        for each in strange
        if wire.get(server, f"{RESPONSES}/{each}".replace(" ", "%20"), mine).status not in (400, 404, 405, 414)
    ]
    seen.none_of("strange ids not refused", found, len(strange))
    seen.equal("large one", bool(large), True)


@attack("medium", "a batch file with hostile lines among good ones")
def batch_file(target: Target, seen: Seen) -> None:
    good = {"method": "POST", "url": wire.COMPLETIONS, "body": dict(wire.PLAIN)}
    lines = [json.dumps({"custom_id": "first", **good}).encode()]
    for number, (_, path, body) in enumerate(BODY_KINDS):
        if path in (wire.COMPLETIONS, wire.CHAT) and b"\n" not in body:
            start = b'{"custom_id": "h%d", "method": "POST", "url": "%s", "body": ' % (number, path.encode())
            lines.append(start + (body or b"null") + b"}")
    lines += [
        b"",
        b"\0",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"custom_id": 1}',
        b"[" * 100_000,
        b'{"custom_id": "' + b"a" * 100_000 + b'"}',
    ]
    for url in ("/v1/load_lora_adapter", "/metrics", "/../v1/completions", "http://169.254.169.254/", "/sleep"):
        lines.append(json.dumps({"custom_id": url, "method": "POST", "url": url, "body": {}}).encode())
    lines.append(json.dumps({"custom_id": "last", **good}).encode())
    with directory() as folder:
        (folder / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        words = ("run-batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "-m", "demo")
        ended = target.command(*words, "--max-num-seqs", "8", timeout_seconds=180)
        output = (folder / "out.jsonl").read_text(encoding="utf-8", errors="replace") if (folder / "out.jsonl").exists() else ""
    answers = {}
    for line in output.splitlines():
        answer = json.loads(line)
        answers[answer.get("custom_id")] = (answer.get("response") or {}).get("status_code")
    seen.equal("exit code", ended.code, 0)
    seen.equal("the good lines", [answers.get("first"), answers.get("last")], [200, 200])
    served = [str(name) for name, status in answers.items() if status == 200 and name not in ("first", "last")]
    seen.none_of("hostile lines served", served, len(lines))
    seen.equal("no traceback", "Traceback" not in ended.output, True)
