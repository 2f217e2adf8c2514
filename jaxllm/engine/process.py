"""The engine process: a core that serves API servers in other processes. Run by `jaxllm.engine.launch` as `python -m`."""

import contextlib
import dataclasses
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxllm import address_space, log
from jaxllm.collector import no_collections
from jaxllm.config import EngineConfig
from jaxllm.core_interface import SteppedCore
from jaxllm.engine import messages
from jaxllm.engine.launch import read_first_message
from jaxllm.engine.messages import (
    Abort,
    Add,
    Call,
    Continue,
    Dead,
    Drain,
    Draining,
    EndLease,
    EngineStart,
    Failed,
    Hello,
    Load,
    Meet,
    NoMore,
    Outputs,
    Ready,
    Refused,
    Reply,
    ShareMetrics,
    Update,
)
from jaxllm.engine.sockets import CPU_PATIENCE, EXIT_FAILED, Command, Gone, Listener, Outbox, Pulse, Stop
from jaxllm.errors import EngineDeadError, EngineError, JaxLLMError
from jaxllm.log import logger
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Metric
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.scheduler_stats import LOAD_SECONDS
from jaxllm.start_times import StartTimes, process_age_seconds

_IDLE_LOAD_SECONDS = 5.0
"""How often an engine without work looks at its load, which may change without a step: prompts kept for decode engines are fetched."""
_SHORT_PAUSE_SECONDS = 0.25
"""How often it does while a client lags behind, or the engine is to end."""
_FIRST_HELLO_SECONDS, _ALL_HELLOS_SECONDS = 2.0, 0.4
"""API servers say Hello four times a second until the engine serves."""
_UPDATE_SECONDS = 0.005
"""Least interval of the updates that one of several engines sends to all API servers, which count what they sent since."""


_GATHERING_SECONDS = 1.0
"""How long API servers have to share their metrics when they are asked; callers wait as long (`process_core.SHARE_SECONDS`)."""


@dataclass
class _Gathering:
    """A call that waits for metrics of other API servers."""

    command: Call
    number: int
    """The number of their question."""
    wanted: set[str]
    """API servers that have not answered."""
    since: float = field(default_factory=time.monotonic)


class EngineLoop:
    """Steps the core while there is work, and runs the API servers' commands between steps."""

    def __init__(
        self,
        core: SteppedCore,
        commands: "queue.SimpleQueue[Command]",
        outbox: Outbox,
        pulse: Pulse,
        *,
        num_replicas: int = 1,
        pid: int = 0,
    ):
        self._core = core
        self._commands = commands
        self._outbox = outbox
        self._pulse = pulse
        self._requests: dict[str, str] = {}
        """The API server of each request in the core."""
        self._latest_items: dict[str, tuple[str, tuple[PromptItem, ...]]] = {}
        """The latest request of each API server that came with its items, and these items."""
        self._lagging: set[str] = set()
        """API servers to notify, once they read again, that their requests were ended."""
        self._metrics: dict[str, list[Metric]] = {}
        self._metrics_of_gone: list[Metric] = []
        self._num_gatherings = 0
        self._gatherings: list[_Gathering] = []
        """Calls for the metrics of all API servers."""
        self._silent: set[str] = set()
        """API servers that did not answer the latest question in time. Until they share again none waits for them."""
        self._stopping = False
        self._held_by: set[str] | None = None
        """While the engine drains: API servers that have not released it."""
        self._received: dict[str, int] | None = {} if num_replicas > 1 else None
        """Number of requests of each API server; None if none has to choose among engines."""
        if self._received is not None:
            core.publish_cache_events()
        self._last_update = 0.0
        self._owes_update = False
        self._last_load = 0.0
        """When the load was last collected."""
        self._was_changed = False
        """Whether a command was run since the last step."""
        self._ready = messages.encode(
            Ready(
                core.config,
                core.model_config.as_served(),
                core.max_model_len,
                dict(core.processor_arguments),
                dict(core.start_times.seconds),
                core.kernels,
                pid,
                core.prefill_address,
            )
        )
        core.run_between_steps(commands.put)
        pulse.awaited_programs = lambda: core.awaited_programs
        pulse.load = self._load()
        pulse.is_loaded = True

    def run(self) -> None:
        """Run until a stop command. Raises EngineDeadError."""
        # A collection of all that JAX and the model keep would hold up a step. LLM does not do so: the device of one that is dropped
        # would stay full.
        gc.freeze()
        while self._obey():
            if self._core.has_unfinished_requests():
                self._step()

    def tell_all(self, message: Any) -> None:
        """Send a message to every API server."""
        frame = messages.encode(message)
        for client in self._outbox.clients:
            self._outbox.send(client, frame)

    # Between two steps

    def _obey(self) -> bool:
        """Run the commands queued since the last step; wait for one if the engine is idle. Returns False to stop."""
        is_idle = not self._core.has_unfinished_requests()
        obeyed = False
        while not self._stopping:
            self._tell_lagging()
            if is_idle and self._owes_update:
                self._send_update()
            if self._is_let_go():
                return False
            if is_idle:
                self._pulse.rest()
            try:
                is_due = self._lagging or self._held_by is not None  # when it drains, to end with the last lease
                pause = _SHORT_PAUSE_SECONDS if is_due else _IDLE_LOAD_SECONDS
                command = self._commands.get(block=is_idle, timeout=pause)
            except queue.Empty:
                if is_idle:
                    self._note_load()
                    continue
                break
            self._pulse.begin(command.name if isinstance(command, Call) else "")
            self._do(command)
            obeyed = True
            is_idle = is_idle and not self._core.has_unfinished_requests()
            if is_idle:
                self._pulse.load = self._load()
        if obeyed:
            self._was_changed = True
            self._note_load()
        return not self._stopping

    def _note_load(self) -> Load:
        """Show the load to the heartbeat, and to all API servers if they choose among engines, at most every _UPDATE_SECONDS."""
        self._pulse.load = load = self._load()
        self._last_load = now = time.monotonic()
        if self._received is not None:
            self._owes_update = True
            if now - self._last_update >= _UPDATE_SECONDS:
                self._send_update(load)
        return load

    def _note_load_of_step(self, *, has_ended: bool) -> Load | None:
        """After a step, call `_note_load` if the load may have changed or was noted long ago: collecting it takes a part of a short step.
        has_ended: whether a request ended in the step. Returns None if it is not due."""
        if self._received is None:
            is_due = time.monotonic() - self._last_load >= LOAD_SECONDS
        else:
            is_due = time.monotonic() - self._last_update >= _UPDATE_SECONDS
        # A step after commands shows their effect, e.g. runs a new request. No step may come after one that leaves no work.
        is_due |= has_ended or self._was_changed or not self._core.has_unfinished_requests()
        self._was_changed = False
        return self._note_load() if is_due else None

    def _send_update(self, load: Load | None = None) -> None:
        self._last_update, self._owes_update = time.monotonic(), False
        self.tell_all(Update(load or self._load(), self._core.take_cache_events()))

    def _do(self, command: Command) -> None:
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            self._end([id for id in command.request_ids if self._requests.get(id) == command.client])
        elif isinstance(command, Continue):
            if self._requests.get(command.request_id) == command.client:
                self._core.continue_request(command.request_id, command.output_token_ids)
        elif isinstance(command, EndLease):
            self._core.end_lease(command.transfer)
        elif isinstance(command, Meet):
            self._core.meet(command.transfer)
        elif isinstance(command, Call):
            self._call(command)
        elif isinstance(command, Hello):
            if command.client in self._outbox.clients or self._held_by is not None:
                return  # a new API server waits for the next process
            self._outbox.connect(command.client)
            self._outbox.send(command.client, self._ready)
            if self._received is not None:
                self._outbox.send(command.client, messages.encode(Update(self._load(), self._core.cache_snapshot())))
        elif isinstance(command, Gone):
            self._end_all_of(command.client)
            self._lagging.discard(command.client)
            self._latest_items.pop(command.client, None)
            if self._received is not None:
                self._received.pop(command.client, None)
            self._outbox.disconnect(command.client)
            self._metrics_of_gone = merged([self._metrics_of_gone, self._metrics.pop(command.client, [])])
            self._gatherings = [each for each in self._gatherings if each.command.client != command.client]
            self._silent.discard(command.client)
            self._has_shared(command.client, self._num_gatherings)
            self._let_go(command.client)
        elif isinstance(command, Drain):
            self._drain()
        elif isinstance(command, NoMore):
            self._let_go(command.client)
        elif isinstance(command, Stop):
            self._stopping = True
        else:
            command()

    def _drain(self) -> None:
        """Have the API servers send no more requests, and end when all have released this engine."""
        if self._held_by is None:
            frame = messages.encode(Draining())
            self._held_by = {client for client in self._outbox.clients if self._outbox.send(client, frame)}

    def _let_go(self, client: str) -> None:
        if self._held_by is not None:
            self._held_by.discard(client)

    def _is_let_go(self) -> bool:
        is_held = self._held_by is None or self._held_by
        if is_held or self._requests or self._core.has_unfinished_requests():
            return False
        return not self._core.stats().num_kv_leases  # decode engines still fetch what it keeps

    def _add(self, command: Add) -> None:
        request = command.request
        if self._received is not None:
            self._received[command.client] = self._received.get(command.client, 0) + 1
        try:
            if request.request_id in self._requests:
                raise EngineError("there is a request of this id already")
            self._core.add_request(self._with_items(command))
        except EngineDeadError:
            raise
        except Exception as error:  # fails only this request
            if not isinstance(error, JaxLLMError):
                logger.exception("a request could not be queued")
            refusal = Refused(request.request_id, messages.fault_of(error))
            self._outbox.send(command.client, messages.encode(refusal))
        else:
            self._requests[request.request_id] = command.client

    def _with_items(self, command: Add) -> EngineCoreRequest:
        """The request with its items. Answers to the same prompt share them."""
        request, client = command.request, command.client
        if not command.items_of:
            self._latest_items[client] = (request.request_id, request.items)
            return request
        owner, items = self._latest_items.get(client, ("", ()))
        if owner != command.items_of:
            raise EngineError("the engine could not read the images of the request")
        return dataclasses.replace(request, items=items)

    def _end(self, request_ids: list[str]) -> None:
        """Abort requests in the core and drop their records."""
        for request_id in request_ids:
            del self._requests[request_id]
        if request_ids:
            self._core.abort_requests(request_ids)

    def _end_all_of(self, client: str) -> None:
        self._end([request_id for request_id, owner in self._requests.items() if owner == client])

    def _call(self, command: Call) -> None:
        if isinstance(command.call, ShareMetrics):
            self._share(command, command.call)
        elif command.name == "finish_compiling":  # may take minutes

            def wait() -> None:
                reply = self._result_of(command)
                self._commands.put(lambda: self._answer(command, reply))

            threading.Thread(target=wait, name="finish-compiling", daemon=True).start()
        else:
            self._answer(command, self._result_of(command))

    def _share(self, command: Call, call: ShareMetrics) -> None:
        self._metrics[command.client] = call.own
        self._silent.discard(command.client)
        self._note_silent(but=command.client)
        wanted: set[str] = set()
        if call.fresh:
            self._num_gatherings += 1
            question = messages.encode(messages.WantMetrics(self._num_gatherings))
            wanted = {client for client in self._metrics if client != command.client and self._outbox.send(client, question)}
        self._gatherings.append(_Gathering(command, self._num_gatherings, wanted - self._silent))
        self._has_shared(command.client, call.asked)

    def _note_silent(self, but: str) -> None:
        """Wait no longer for API servers that let a question lie, but for one: callers have what these shared before."""
        late = [each for each in self._gatherings if time.monotonic() - each.since > _GATHERING_SECONDS]
        self._silent.update(*(each.wanted - {but} for each in late))
        for gathering in self._gatherings if late else ():
            gathering.wanted -= self._silent

    def _has_shared(self, client: str, asked: int) -> None:
        """An API server answered gathering `asked`, or left: answer the calls that waited only for it.

        What it shared before it was asked may lie in the queue behind the call, and lacks what it has counted since.
        """
        for gathering in self._gatherings:
            if gathering.number <= asked:
                gathering.wanted.discard(client)
        ready = [each.command for each in self._gatherings if not each.wanted]
        self._gatherings = [each for each in self._gatherings if each.wanted]
        for command in ready:
            others = [metrics for client, metrics in self._metrics.items() if client != command.client]
            found = merged([*others, self._metrics_of_gone])
            self._answer(command, Reply(command.number, found, load=self._load()))

    def _result_of(self, command: Call) -> Reply:
        try:
            result = getattr(self._core, command.name)(*msgspec.structs.astuple(command.call))
        except EngineDeadError:
            raise
        except Exception as error:  # reported to the caller
            if not isinstance(error, JaxLLMError):
                logger.exception("%s failed", command.name)
            return Reply(command.number, fault=messages.fault_of(error))
        return Reply(command.number, result)

    def _answer(self, command: Call, reply: Reply) -> None:
        self._outbox.send(command.client, messages.encode(reply))

    # A step

    def _step(self) -> None:
        self._pulse.begin()
        num_requests = len(self._requests)
        try:
            step_outputs = self._core.step()
        except EngineDeadError:
            raise
        except EngineError as error:  # its requests have ended; the engine continues
            logger.error("a step failed: %s", error)
            self._end(list(self._requests))
            self.tell_all(Failed(str(error)))
            step_outputs = []
        by_client = self._sorted(step_outputs)
        load = self._note_load_of_step(has_ended=len(self._requests) < num_requests)
        for client, outputs in by_client.items():
            frame = messages.encode(Outputs(outputs, load))
            if not self._outbox.send(client, frame):
                logger.error("an API server does not fetch its outputs; its requests are ended")
                self._end_all_of(client)
                self._lagging.add(client)

    def _sorted(self, outputs: list[EngineCoreOutput]) -> dict[str, list[EngineCoreOutput]]:
        """Group outputs by API server, and drop the records of finished requests."""
        by_client: dict[str, list[EngineCoreOutput]] = {}
        requests = self._requests
        for output in outputs:
            client = requests.get(output.request_id)
            if client is None:
                continue
            if client in by_client:
                by_client[client].append(output)
            else:
                by_client[client] = [output]
            if output.finish_reason is not None:
                del requests[output.request_id]
        return by_client

    def _tell_lagging(self) -> None:
        for client in list(self._lagging):
            if self._outbox.send(client, messages.encode(Failed("the server was too slow to fetch what the engine wrote"))):
                self._lagging.discard(client)

    def _load(self) -> Load:
        load = Load(self._core.stats(), self._core.num_compiled_after_warmup, self._core.sleep_level)
        if self._received is not None:
            load.received = self._received
        return load


def serve(start: EngineStart, parent_fd: int | None = None) -> int:
    """Load the core and serve API servers until a stop command. Returns the exit code."""
    pulse = Pulse()
    listener = Listener(
        start.directory,
        pulse,
        step_timeout_seconds=start.step_timeout_seconds,
        compile_timeout_seconds=start.compile_timeout_seconds,
        stall_timeout_seconds=start.stall_timeout_seconds,
        parent_fd=parent_fd,
    )
    listener.start()
    outbox = Outbox(listener.context, start.directory)
    last_words, code = Dead("the engine was shut down"), 0
    core = None
    try:
        core = _load_core(start, pulse)
        if (hosts := getattr(core, "hosts", None)) is not None:
            hosts.tell_when_lost(lambda: listener.commands.put(hosts.check))  # ends an idle engine too
        signal.signal(signal.SIGTERM, lambda *_: listener.commands.put(Stop()))
        pid = 0 if start.has_remote_clients else os.getpid()
        EngineLoop(core, listener.commands, outbox, pulse, num_replicas=start.num_replicas, pid=pid).run()
    except JaxLLMError as error:
        logger.error("%s", error)
        last_words, code = Dead(str(error)), EXIT_FAILED
    except Exception as error:
        logger.exception("the engine failed")
        why = address_space.describe_limit() if address_space.is_full(error) else ""
        last_words, code = Dead(f"the engine failed: {type(error).__name__}{why}; its log has more"), EXIT_FAILED
    if code or outbox.clients:
        _say_to_all(last_words, listener, outbox, all_hellos=core is None)
    listener.stop()
    if core is not None and code == 0:
        core.shutdown()
    listener.context.destroy(linger=1000)
    return code


def _say_to_all(last_words: Dead, listener: Listener, outbox: Outbox, *, all_hellos: bool) -> None:
    """Send a last message to all API servers, also to those with an unread Hello because loading failed. Waits for one if there
    is none yet, and with `all_hellos` until each has repeated its own."""
    began = time.monotonic()
    deadline, enough = began + _FIRST_HELLO_SECONDS, began + (_ALL_HELLOS_SECONDS if all_hellos else 0.0)
    while not listener.commands.empty() or time.monotonic() < (enough if outbox.clients else deadline):
        with contextlib.suppress(queue.Empty):
            command = listener.commands.get(timeout=0.05)
            if isinstance(command, Hello):
                outbox.connect(command.client)
    frame = messages.encode(last_words)
    for client in outbox.clients:
        outbox.send(client, frame)
    outbox.close()


def _load_core(start: EngineStart, pulse: Pulse) -> SteppedCore:
    if start.core_factory is not None:
        module, _, function = start.core_factory.partition(":")
        return getattr(importlib.import_module(module), function)(start.config, pulse.progress)
    times = StartTimes()
    if (age := process_age_seconds()) is not None:
        times.add("process before the engine", age)
    with times.part("imports"), no_collections():
        from jaxllm.engine.core import EngineCore  # imports JAX
    from jaxllm.engine.resolve import backend

    core = EngineCore(_for_serving(start.config), pulse.progress, (), times, replica=start.replica)
    pulse.patience = CPU_PATIENCE if backend() == "cpu" else 1.0
    return core


def _for_serving(config: EngineConfig) -> EngineConfig:
    """On a CPU, where programs are compiled on first use, also compile programs for later requests while the engine is idle."""
    from jaxllm.engine.resolve import backend

    if config.parallel.nnodes > 1 or config.parallel.distributed_executor_backend == "ray":
        return config  # JAX may not find its devices before the other hosts are there
    return config.replace(warmup="idle") if config.compile.warmup == "auto" and backend() == "cpu" else config


def main() -> int:
    """Run `python -m jaxllm.engine.process`. Reads an EngineStart from standard input, which ends when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the parent decides
    start = messages.decode_engine_start(read_first_message(sys.stdin.fileno()))
    part = f"replica {start.replica}" if start.num_replicas > 1 else ""
    log.set_up(start.log_level, format=start.log_format, part=part)
    return serve(start, parent_fd=sys.stdin.fileno())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still compile, and the device's, need not be waited for
