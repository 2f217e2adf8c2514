"""Access without a key, and what the open paths reveal."""

import re

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.target import Target

KEYED = ("--api-key", "one", "--api-key", "two", "--admin-api-key", "operator", "--enable-dev-endpoints")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "TRACE", "PROPFIND", "get", "post")
MUTATIONS = (
    *("{}", "/{}", "{}/", "{}//", "/.{}", "/x/..{}", "/health/..{}", "/health{}", "/metrics/..{}", "/web/..{}", "/docs/..{}"),
    *("{}?a=b", "{};a=b", "{}#a", "{}%00", "{}%20", "{}.json", "/%2e{}", "/health%2f..{}", "\\{}", "{}%2f", "//x{}"),
    *("http://x{}", "http://x/health/..{}"),
)
PROTECTED = ("/v1/models", wire.COMPLETIONS, "/tokenize", "/server_info", "/reset_prefix_cache", "/version", "/openapi.json")
CREDENTIALS: tuple[dict[str, str], ...] = (
    *({}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "}, {"authorization": "one"}),
    *({"authorization": "Basic b25l"}, {"authorization": "Bearer ONE"}, {"authorization": "Bearer one two"}),
    *({"authorization": "Bearer on"}, {"authorization": "Bearer one,two"}, {"x-api-key": ""}, {"x-api-key": "onetwo"}),
    *({"cookie": "authorization=Bearer one"}, {"x-forwarded-for": "127.0.0.1"}, {"x-original-url": "/health"}),
    *({"authorization": "Bearer one\tx"}, {"x-real-ip": "127.0.0.1", "x-rewrite-url": "/health"}, {"api-key": "one"}),
)


def _changed(path: str) -> list[str]:
    upper = path.upper()
    encoded = "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:])
    return [*(mutation.format(path) for mutation in MUTATIONS), upper, encoded, path.replace("/", "%2f")]


def _reveals(answer: wire.Answer) -> bool:
    """Whether a response is more than a refusal: some 2xx with what a protected route says."""
    return 200 <= answer.status < 300 and bool(
        re.search(rb'"object"|"tokens"|"choices"|"version"|"openapi"|"model', answer.body)
    )


@attack("high", "paths mutated in every way, without a key", quick=True)
def mutated_paths(target: Target, seen: Seen) -> None:
    server = target.server(*KEYED)
    through, count = [], 0
    for path in PROTECTED:
        for changed in _changed(path):
            for method in METHODS if path in PROTECTED[:2] else ("GET", "POST"):
                count += 1
                answer = wire.request(server, method, changed, None if method == "GET" else wire.PLAIN, seconds=10)
                if _reveals(answer):
                    through.append(f"{method} {changed}")
    seen.none_of("got through", through, count)


@attack("high", "wrong keys in every form", quick=True)
def wrong_keys(target: Target, seen: Seen) -> None:
    server = target.server(*KEYED)
    paths = ("/v1/models", "/server_info", wire.COMPLETIONS)
    through = []
    for path in paths:
        for given in CREDENTIALS:
            method = "POST" if path == wire.COMPLETIONS else "GET"
            answer = wire.request(server, method, path, None if method == "GET" else wire.PLAIN, given)
            if answer.status not in (400, 401):
                through.append(f"{path} {given}: {answer.status}")
    seen.none_of("got through", through, len(paths) * len(CREDENTIALS))
    seen.equal("a client's key at an operator's route", wire.get(server, "/server_info", wire.bearer("one")).status, 403)
    seen.equal("the operator's key", wire.get(server, "/server_info", wire.bearer("operator")).status, 200)
    seen.equal("a client's key", wire.get(server, "/v1/models", wire.bearer("two")).status, 200)


@attack("information", "/metrics without a key tells more than the documentation says", quick=True)
def metrics_names(target: Target, seen: Seen) -> None:
    server = target.server(*KEYED)
    wire.post(server, wire.COMPLETIONS, wire.PLAIN, wire.bearer("one"))
    answer = wire.get(server, "/metrics")
    labels = sorted(set(re.findall(rb'(model_name|lora_name|running_lora_adapters|model)="[^"]+"', answer.body)))
    names = [label.decode() for label in labels]
    page = " ".join((target.tree / "docs" / "DEPLOYMENT.md").read_text(encoding="utf-8").split())
    told = "holds numbers only" not in page and bool(re.search(r"/metrics`?[^.]{0,200}\bnames?\b", page))
    seen.equal(f"status {answer.status}, labels {', '.join(names) or 'none'}; documented", told or not names, True)
