"""A real HTTP server over an engine, in a thread of the test's process."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi.routing import APIRoute

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from server.connection import uvicorn_config
from server.options import ServerOptions

SMALL = {
    "model": "demo",
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1},
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "token_buckets": (8, 512),
    "decode_buckets": (8,),
}
"""An engine that has few and small programs to compile: one layer of the demo model, with random weights."""
PLAIN = {"model": "demo", "prompt": "import ", "max_tokens": 1, "temperature": 0}


class LiveServer:
    """Where it listens, a client for it, and the engine behind it."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, port: int, app: Any):
        self.engine, self.host, self.port, self.app = engine, "127.0.0.1", port, app
        self.key = (options.access.api_key or [""])[0]
        self.headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self.client = httpx.Client(base_url=f"http://{self.host}:{port}", timeout=60)

    @classmethod
    @contextmanager
    def start(cls, engine: AsyncLLM | None = None, **options: Any) -> Iterator["LiveServer"]:
        """A server of this engine (else of SMALL) with these options, until the block ends."""
        own = None if engine is not None else AsyncLLM.from_options(**SMALL)
        chosen = ServerOptions.from_options(**options)
        app = create_app(engine or own, chosen)  # type: ignore[arg-type]
        runner = uvicorn.Server(uvicorn_config(app, chosen, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=runner.run, daemon=True)
        thread.start()
        while not runner.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        server = cls(engine or own, chosen, runner.servers[0].sockets[0].getsockname()[1], app)  # type: ignore[arg-type]
        try:
            yield server
        finally:
            server.client.close()
            runner.should_exit = True
            thread.join(10)
            if own is not None:
                own.shutdown()

    def assert_unharmed(self) -> None:
        """A plain request is answered as ever, and nothing of earlier ones is left in the engine."""
        reply = self.client.post("/v1/completions", json=PLAIN, headers=self.headers)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 1, reply.text[:300]
        deadline = time.monotonic() + 60
        while any((load := self.load()).values()):
            assert time.monotonic() < deadline, load
            time.sleep(0.002)

    def load(self) -> dict[str, float]:
        """Requests running and waiting, and the fraction of KV blocks in use."""
        text = self.client.get("/metrics", headers=self.headers).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: float(re.findall(rf"^jaxllm:{name}{{.*}} (\S+)", text, re.M)[0]) for name in names}

    def routes(self) -> Iterator[tuple[str, str]]:
        """(method, path) of every route."""
        for route in self.app.routes:
            for method in sorted(getattr(route, "methods", None) or ()):
                if isinstance(route, APIRoute) or hasattr(route, "endpoint"):
                    yield method, route.path

    def special_tokens(self) -> list[str]:
        """The texts of the model's control tokens."""
        return list(self.engine.get_tokenizer().special_tokens_map.values())

    def special_token_ids(self) -> set[int]:
        """Their ids."""
        tokenizer = self.engine.get_tokenizer()
        ids = (tokenizer.convert_token_to_id(text) for text in [*self.special_tokens(), "<|im_end|>", "<|im_start|>"])
        return {token for token in ids if token is not None}


def envelope(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply in OpenAI's shape. Fails if it has another."""
    assert reply.headers["content-type"].startswith("application/json"), reply.headers
    error = reply.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and isinstance(error["message"], str) and error["message"], error
    assert isinstance(error["type"], str) and "detail" not in reply.json()
    assert reply.headers.get("x-request-id"), "no request id"
    return dict(error)
