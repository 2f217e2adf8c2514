"""Prints the start of a server once requests are accepted: the model, its address, and examples of requests."""

import json
import shlex
import sys

from jaxllm import log
from server.listening import address_of, is_local
from server.serve import Serving

_CALLS: dict[str, tuple[str, dict[str, object], tuple[str, ...], str]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}, (), "choices[0].message.content"),
    "completions": ("completions", {"prompt": "Once upon a time", "max_tokens": 32}, (), "choices[0].text"),
    "token ids": ("completions", {"prompt": [1, 2, 3], "max_tokens": 32}, ("return_token_ids",), "choices[0].token_ids"),
    "embeddings": ("embeddings", {"input": "Hello!"}, (), "data[0].embedding"),
    "classes": ("classify", {"input": "Hello!"}, (), ""),
}
"""Requests of examples, by name: the path, the fields of the body, those that OpenAI lacks, and the part of the answer to print; none if
OpenAI's client cannot send it."""


def show_start(serving: Serving) -> None:
    """Print the whole report on stderr; to a log of JSON lines only the model and the address."""
    report = start_report(serving)
    if not log.writes_json():
        print(report, file=sys.stderr, flush=True)
        return
    for line in report.strip().partition("\n\n")[0].splitlines():
        log.logger.info("%s", line)


def start_report(serving: Serving) -> str:
    """The served model, its address, and how to try it."""
    network, access = serving.options.network, serving.options.access
    model = serving.options.replies.names_of(serving.config.model.model)[0]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in serving.start_seconds.items() if seconds >= 0.05)
    lines = [f"ready in {serving.seconds:.1f} s" + (f" ({parts}; some at the same time)" if parts else "")]
    if network.uds is not None:
        base, curl = "http://localhost", f"curl --unix-socket {shlex.quote(network.uds)}"
        lines.append(f"{model} is served at the Unix socket {network.uds}")
    else:
        host, port = address_of(serving.socket)
        scheme = "https" if network.ssl_certfile else "http"
        base, curl = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{network.root_path}", "curl"
        lines.append(f"{model} is served at {base}/v1" + (f", with a page at {base}/" if serving.options.replies.web else ""))
        if not access.api_key and not is_local(network):
            lines.append("whoever reaches this machine can use it: --api-key KEY, or --host 127.0.0.1")
    path, body, extra, reply = _CALLS[serving.offers]
    request = shlex.quote(json.dumps({"model": model, **body, **dict.fromkeys(extra, True)}))
    key = ' \\\n    -H "Authorization: Bearer $API_KEY"' if access.api_key else ""
    lines += ["", f"  {curl} {base}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d {request}"]
    if network.uds is None and reply:
        keywords = [f"{name}={json.dumps(value)}" for name, value in {"model": model, **body}.items()]
        keywords += [f'extra_body={{"{name}": True}}' for name in extra]
        lines += [
            "",
            "  from openai import OpenAI",
            f'  client = OpenAI(base_url="{base}/v1", api_key="{"API_KEY" if access.api_key else "none"}")',
            f"  reply = client.{path.replace('/', '.')}.create({', '.join(keywords)})",
            f"  print(reply.{reply})",
        ]
    return "\n".join(["", *lines, ""])
