"""An API server: HTTP, tokenizing and detokenizing for connections that it accepts. The supervisor runs it with `python -m`."""

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from jaxllm import clock, log
from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import read_first_message
from jaxllm.engine.process_core import ProcessCore
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.log import logger
from jaxllm.replicas.core import Replicas
from jaxllm.replicas.prefill_decode import PrefillDecode
from jaxllm.request_processor import load_texts
from server.browser_access import BrowserAccess
from server.gate import Gate
from server.options import ServerOptions
from server.routes.page import page_replies

if TYPE_CHECKING:
    from server.context import ServerContext

LAST_WORDS_SECONDS = 2.0
"""Seconds to write the last events of aborted streams."""
READY = "ready "
MAX_OPEN_FILES = 1 << 16


class ApiServerStart(msgspec.Struct):
    """The configuration of an API server. `socket_fd` listens; the API server writes READY or its error to `report_fd`."""

    index: int
    engines: list[tuple[str, int | None]]
    """For each replica the directory of its sockets, and its process; None: it is being started again."""
    config: EngineConfig
    options: ServerOptions
    socket_fd: int
    report_fd: int
    log_level: str | None
    silence_seconds: float
    accepts_while_loading: bool
    """Whether to answer 503 until it serves, because no other API server serves meanwhile."""
    epoch: float
    """Epoch of the clock, so that the requests of all API servers can be ordered by their times of arrival."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals drain the API server instead."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Runs one API server."""

    def __init__(self, start: ApiServerStart):
        self._start = start
        self._options = start.options
        self._stop = asyncio.Event()
        self._core = self._make_core()
        page = page_replies() if start.options.replies.web else {}
        self._gate = Gate(
            lambda: self._core.status,
            lambda: self._core.dead_error,
            page,
            start.options.network.root_path,
            start.options.replies.error_format,
            BrowserAccess(start.options),
        )
        from server.connection import uvicorn_config

        settings: dict[str, Any] = {"lifespan": "off", "timeout_graceful_shutdown": 1}
        self._server = _Server(uvicorn_config(self._gate, self._options, **settings))
        self._serving: asyncio.Task[None] | None = None

    def _make_core(self) -> ProcessCore | Replicas:
        pids, parallel = [pid for _, pid in self._start.engines], self._start.config.parallel
        if len(pids) == 1:
            return ProcessCore(self._connect(0, pids[0]))
        settings: dict[str, Any] = {
            "policy": parallel.data_parallel_routing,
            "num_api_servers": self._options.network.api_server_count,
            "retries": self._options.processes.retry_on_engine_death,
        }
        if (roles := self._options.processes.roles) is None:
            return Replicas(self._connect, pids, **settings)
        settings["threshold"] = self._options.processes.prefill_threshold
        transfer = self._start.config.kv_transfer
        settings["load_failure_policy"], settings["pull_timeout"] = transfer.kv_load_failure_policy, transfer.kv_pull_timeout
        ranks, num_hosts = roles.prefill_ranks(parallel.nnodes), parallel.nnodes
        return PrefillDecode(self._connect, pids, prefill_ranks=ranks, num_hosts=num_hosts, **settings)

    def _connect(self, rank: int, pid: int | None) -> EngineClient:
        directory, _ = self._start.engines[rank]
        return EngineClient(
            directory,
            pid,
            index=self._start.index,
            silence_seconds=self._start.silence_seconds,
            stall_seconds=self._options.processes.stall_timeout,
        )

    async def run(self) -> None:
        """Serve until stopped, then drain. Raises JaxLLMError if the application cannot be built."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_reader(sys.stdin.fileno(), self._parent_is_gone)
        if self._start.accepts_while_loading:
            self._accept()
        try:
            await self._serve()
        finally:
            if self._serving is not None:
                self._server.should_exit = True
                await self._serving
            self._core.shutdown()

    def _accept(self) -> None:
        """Accept connections from now on."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[socket.socket(fileno=self._start.socket_fd)]))
            self._serving.add_done_callback(lambda _: self._stop.set())  # an API server that cannot serve must not report READY

    async def _serve(self) -> None:
        texts = await asyncio.to_thread(load_texts, self._start.config)
        from server.app import create_app  # import while the engine loads
        from server.grpc.start import start_grpc
        from server.speech import check_names

        check_names(self._options.chat)  # fail before the engine has loaded
        try:
            core = await self._unless_stopped(self._core.ready())
        except EngineDeadError:
            await self._stop.wait()  # the supervisor detects it too and decides
            return
        if core is None:
            return
        engine = await AsyncLLM.over(core, texts)
        app = create_app(engine, self._options)
        context = app.state.context
        async with app.router.lifespan_context(app):
            grpc = await start_grpc(context)
            gc.freeze()  # a collection of all that the imports keep would hold up every request
            self._gate.open(app)
            self._accept()
            os.write(self._start.report_fd, f"{READY}{_offers(engine)}\n".encode())
            await self._stop.wait()
            await self._drain(engine, context)
            if grpc is not None:
                await grpc.stop(0)
            engine.shutdown()

    async def _unless_stopped(self, work: Any) -> Any:
        """Return the result of a coroutine, or None if the API server is stopped first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def _drain(self, engine: AsyncLLM, context: "ServerContext") -> None:
        """Refuse new requests, let running ones finish in time, and abort the rest, each with a last event."""
        seconds = self._options.network.shutdown_timeout
        context.refusal = self._gate.drain(seconds)

        def num_running() -> int:
            return max(self._gate.num_running, context.num_running)  # gRPC calls and background responses bypass the gate

        if await _until_idle(num_running, seconds):
            return
        logger.warning("%d requests did not end within %g s and are aborted", num_running(), seconds)
        with contextlib.suppress(EngineDeadError):
            await engine.abort_all()
        await _until_idle(num_running, LAST_WORDS_SECONDS)

    def _parent_is_gone(self) -> None:
        logger.warning("the server's main process is gone; this API server ends")
        for directory, _ in self._start.engines:  # no other process removes those of replicas on other hosts
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(directory).parent.rmdir()
        os._exit(1)


async def _until_idle(num_running: Callable[[], int], seconds: float) -> bool:
    """Wait, and return whether all requests ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while num_running():
                await asyncio.sleep(0.02)
    return not num_running()


def _allow_many_connections() -> None:
    """Raise the limit of open files to the hard limit: many shells set 1024, and each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _offers(engine: AsyncLLM) -> str:
    """The kind of most requests, as one word for the start screen."""
    if not engine.model_config.generates:
        return "embeddings" if engine.model_config.classifier is None else "classes"
    if engine.config.model.skip_tokenizer_init:
        return "token ids"
    has_template = engine.chat_template is not None or bool(engine.get_tokenizer().chat_templates)
    return "chat" if has_template else "completions"


def main() -> int:
    """Entry point of `python -m server.api_server`: reads a ApiServerStart from stdin; end of input means the supervisor has ended."""
    import uvloop

    start = msgspec.msgpack.decode(read_first_message(sys.stdin.fileno()), type=ApiServerStart)
    clock.follow(start.epoch)
    log.set_up(start.log_level, format=start.options.logging.log_format)
    log.adopt("uvicorn", level=start.options.logging.uvicorn_log_level)
    _allow_many_connections()

    async def run() -> None:
        await ApiServer(start).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except JaxLLMError as error:
        os.write(start.report_fd, f"{error}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
