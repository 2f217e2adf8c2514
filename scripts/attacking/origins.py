"""Web pages that the user visits while a server without a key listens on loopback: other names for it, and requests across sites."""

import json
from collections.abc import Mapping

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.target import Target

EVIL = "attacker.example"
_BODY = json.dumps(wire.PLAIN).encode()
FOREIGN_ORIGINS: tuple[Mapping[str, str], ...] = (
    {"origin": f"http://{EVIL}", "sec-fetch-site": "cross-site"},
    {"origin": f"https://{EVIL}"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1.attacker.example"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://localhost@attacker.example"},
)
"""Headers that a browser adds to a request of a page elsewhere; old ones send Origin alone, forms without one Sec-Fetch-Site alone."""
OPERATORS = ("/reset_prefix_cache", "/sleep?level=1", "/wake_up", "/pause", "/resume", "/start_profile", "/stop_profile")


def _foreign_hosts(port: int) -> list[str]:
    names = [EVIL, f"127.0.0.1.{EVIL}", f"localhost.{EVIL}", f"{EVIL}.", "127.0.0.1.nip.io", "127-0-0-1.sslip.io", "localhostx"]
    return [f"{name}{end}" for name in names for end in ("", f":{port}")]


@attack("high", "DNS rebinding: a page whose name resolves to 127.0.0.1", quick=True)
def rebinding(target: Target, seen: Seen) -> None:
    server = target.server("--enable-dev-endpoints")
    served, hosts = [], _foreign_hosts(server.port)
    for host in hosts:
        same = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for told, answer in {
            "reads /v1/models": wire.get(server, "/v1/models", {"host": host}),
            "reads /": wire.get(server, "/", {"host": host}),
            "completes": wire.post(server, wire.COMPLETIONS, _BODY, same),
            "resets": wire.post(server, "/reset_prefix_cache", b"", same),
        }.items():
            if answer.status < 400 and answer.status != 0:
                served.append(f"{host} {told}: {answer.status}")
    seen.none_of("served", served, 4 * len(hosts))
    own = [f"{name}{end}" for name in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST") for end in ("", f":{server.port}")]
    refused = [host for host in own if wire.get(server, "/v1/models", {"host": host}).status != 200]
    seen.none_of("own names refused", refused, len(own))


@attack("medium", "a page elsewhere posts to routes without a body and with text/plain", quick=True)
def cross_site(target: Target, seen: Seen) -> None:
    server = target.server("--enable-dev-endpoints")
    served, count = [], 0
    for headers in FOREIGN_ORIGINS:
        for path in OPERATORS:
            count += 1
            answer = wire.post(server, path, b"", {**headers, "content-type": "text/plain"})
            if answer.status < 400:
                served.append(f"{path} {answer.status}")
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/json",
            "",
        ):
            for path in (wire.COMPLETIONS, "/tokenize", "/api/generate"):
                count += 1
                body = json.dumps({**wire.PLAIN, "model": "demo", "stream": False}).encode()
                answer = wire.post(server, path, body, {**headers, "content-type": kind})
                if answer.status < 400:
                    served.append(f"{path} {kind} {answer.status}")
    for path in ("/wake_up", "/resume"):  # for those that come after
        wire.post(server, path, b"")
    seen.none_of("served", served, count)
    own = {"origin": f"http://127.0.0.1:{server.port}", "sec-fetch-site": "same-origin"}
    seen.equal("the page's own request", wire.post(server, wire.COMPLETIONS, _BODY, own).status, 200)
    seen.equal("a request of no page", wire.post(server, "/reset_prefix_cache", b"").status, 200)


@attack("medium", "a page elsewhere asks for leave first (CORS preflight)", quick=True)
def preflight(target: Target, seen: Seen) -> None:
    server = target.server("--enable-dev-endpoints")
    allowed = []
    for headers in FOREIGN_ORIGINS:
        asked = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        answer = wire.request(server, "OPTIONS", wire.COMPLETIONS, None, asked)
        if "access-control-allow-origin" in answer.headers:
            allowed.append(headers.get("origin", "no origin"))
        if "access-control-allow-origin" in wire.get(server, "/v1/models", headers).headers:
            allowed.append(f"reads as {headers.get('origin', 'no origin')}")
    seen.none_of("allowed", allowed, 2 * len(FOREIGN_ORIGINS))


@attack("high", "the page's headers: nobody frames it, nothing from elsewhere runs in it", quick=True)
def page_headers(target: Target, seen: Seen) -> None:
    server = target.server("--enable-dev-endpoints")
    for path in ("/", "/docs"):
        headers = wire.get(server, path).headers
        policy = headers.get("content-security-policy", "")
        seen.equal(f"{path}: nosniff", headers.get("x-content-type-options"), "nosniff")
        seen.equal("frames", "frame-ancestors 'none'" in policy or headers.get("x-frame-options", "").upper() == "DENY", True)
        seen.equal("scripts of its own alone", "default-src" in policy and "unsafe-eval" not in policy, True)
