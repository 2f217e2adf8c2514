"""The LoRA manager: which adapters requests may name, and their way from disk through host memory into slots of the device.

Does not import JAX.
"""

import concurrent.futures
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.adapters import AdapterInfo, AdapterState, check_name
from jaxllm.device_ops import AnyDeviceOp, DropStaged, WriteAdapter
from jaxllm.errors import AdapterNotFoundError, InvalidRequestError, JaxLLMError
from jaxllm.log import logger
from jaxllm.lora.adapter import Adapter, AdapterVersion, Reader, read
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.errors import LostError
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import NO_ADAPTER
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.worker_thread import WorkerThread

if TYPE_CHECKING:
    from jaxllm.lora.device import DeviceSlots

CLAIM_SECONDS = 2.0
"""An adapter that waited this long for a slot gets one whose adapter admits no further requests meanwhile."""
_END_SECONDS = 10.0
"""How long `shutdown` waits for what is being read. A disk that hangs does not keep the process alive."""
_MAX_OUTCOMES = 1000
"""Adapters whose outcome is remembered, for those who still ask."""


class Executor(Protocol):
    """See `jaxllm.engine.executor.Executor`."""

    def stage(self, handle: int, data: np.ndarray) -> None: ...


class Ops(Protocol):
    """See `jaxllm.engine.op_queue.OpQueue`."""

    def new_handle(self) -> int: ...
    def add(self, op: AnyDeviceOp, *, failed: Callable[[Exception], None] | None = None) -> object: ...


@dataclass(frozen=True)
class _Staging:
    """An adapter that is being copied to the device, for a slot that is kept for it."""

    adapter: Adapter
    slot: int
    handle: int
    job: Future[None]


class LoRAManager:
    """The adapters of an engine core, a Preparation: a request fits while its adapter is in a slot.

    An adapter is read when a request names it, and gets a slot as soon as one is free or unused, before its request is next in line.

    Host memory holds a number of adapters as the device takes them; the least recently used one that is not needed now makes room.

    A slot with running requests is not taken. Of the others, an empty one is taken first, then the least recently used one. An adapter
    that requests wait for gives way only to one that an earlier request waits for, so two adapters never take turns without serving a
    request. For an adapter that waited long another one is closed: it admits no further requests, and loses its slot when the running
    ones have ended.

    The step loop's thread calls all methods. Threads of their own check new adapters, read those that requests wait for, and copy them
    to the device: an adapter in host memory does not wait for a slow disk.
    """

    def __init__(
        self,
        device: "DeviceSlots",
        executor: Executor,
        ops: Ops,
        reader: Reader,
        *,
        max_host: int | None = None,
        new_thread: Callable[[str], WorkerThread] = WorkerThread,
        wait: Callable[..., object] = concurrent.futures.wait,
        clock: Callable[[], float] = time.monotonic,
    ):
        """max_host: adapters in host memory; None: as many as slots. new_thread, wait, clock: replaced by tests in virtual time."""
        self._device, self._executor, self._ops, self._reader = device, executor, ops, reader
        self._wait, self._clock = wait, clock
        self._check_thread, self._read_thread, self._stage_thread = map(new_thread, ("lora-check", "lora-read", "lora-stage"))
        self._named: dict[str, Adapter] = {}
        """Adapters that requests may name."""
        self._new: dict[str, Adapter] = {}
        """Adapters that are read for the first time."""
        self._numbers = itertools.count(1)
        self._outcomes = OrderedDict[int, str]()
        """Why an adapter that is no longer new cannot be named, by its number; empty: it could be."""
        self._num_pinned = 0
        self._used: dict[Adapter, None] = {}
        """Adapters with unfinished requests."""
        self._wanting: dict[Adapter, float] = {}
        """Adapters that should have a slot and have none, with the time since when."""
        self._reads: dict[Adapter, Future[tuple[AdapterVersion, np.ndarray | None]]] = {}
        """Adapters that are being read."""
        self._max_host = max(max_host or 0, device.num_slots)
        self._host: dict[Adapter, np.ndarray | None] = {}
        """Adapters in host memory; None: the place is kept for one that is being read."""
        self._staging: _Staging | None = None
        self._slots: list[Adapter | None] = [None] * device.num_slots
        self._closed = set[Adapter]()
        """Adapters that admit no further requests, so that others that waited long get their slots."""
        self._ticks = itertools.count(1)
        self._num_loads = self._num_evictions = 0
        self._load_seconds = 0.0

    # Calls of API servers

    def add_adapter(self, name: str, path: str, replace: bool = False) -> int:
        """See ControlCalls. The adapter that is replaced is there until the new one is ready."""
        self._take_in_read()
        check_name(name, "name")
        pending = self._new.get(name)
        if not replace and name in self._named:
            raise InvalidRequestError(f"adapter {name!r} is loaded already; remove it first, or replace it", "name")
        if not replace and pending is not None:
            if pending.path == path:
                return pending.number  # several API servers add what they are asked for at the same time
            raise InvalidRequestError(f"adapter {name!r} is being loaded from {pending.path}; replace it, or wait", "name")
        if pending is not None:
            self._give_up(pending, "was replaced before it was loaded")
        adapter = self._new[name] = Adapter(next(self._numbers), name, path)
        if packs := len(self._host) < self._max_host:
            self._host[adapter] = None
        self._reads[adapter] = self._check_thread.submit(partial(self._read, adapter, packs))
        return adapter.number

    def adapter_state(self, number: int) -> AdapterState:
        """See ControlCalls."""
        self._take_in_read()
        if any(adapter.number == number for adapter in self._new.values()):
            return AdapterState("loading")
        if number not in self._outcomes:
            raise InvalidRequestError(f"no adapter was added with the number {number!r}", "number")
        error = self._outcomes[number]
        return AdapterState("failed", error) if error else AdapterState("ready")

    def remove_adapter(self, name: str) -> bool:
        """See ControlCalls."""
        self._take_in_read()
        new, adapter = self._new.get(name), self._named.pop(name, None)
        if new is not None:
            self._give_up(new, "was removed before it was loaded")
        for used in self._used:
            used.passes_pin &= used.name != name
        if adapter is not None:
            self._retire(adapter)
        return new is not None or adapter is not None

    def list_adapters(self) -> list[AdapterInfo]:
        """See ControlCalls."""
        self._take_in_read()
        return [
            AdapterInfo(
                name=adapter.name,
                path=adapter.path,
                rank=0 if adapter.version is None else adapter.version.rank,
                num_bytes=self._device.num_bytes,
                is_pinned=adapter.is_pinned,
                where="device" if adapter.slot != NO_ADAPTER else "host" if self._is_in_host(adapter) else "disk",
                cache_key=adapter.cache_key,
            )
            for adapter in self._named.values()
        ]

    def pin_adapter(self, name: str) -> None:
        """See ControlCalls. It gets its slot with the next request, whatever that names."""
        self._take_in_read()
        adapter = self._find(name, "name")
        if reason := self._why_not_pinned(adapter):
            raise InvalidRequestError(f"adapter {name!r} cannot be pinned: {reason}", "name")
        self._pin(adapter, True)

    # A Preparation

    def bind(self, request: Request) -> None:
        """See Preparation."""
        name = request.options.adapter
        if name is None:
            return
        if self._new:
            self._take_in_read()
        adapter = self._find(name, "adapter")
        if self._num_pinned == len(self._slots) and not adapter.is_pinned:
            raise InvalidRequestError(
                f"adapter {name!r} gets no slot: all {len(self._slots)} have pinned adapters; remove one, or raise --max-loras",
                "adapter",
            )
        request.adapter = adapter

    def admit(self, request: Request) -> None:
        """See Preparation. Begins to read the adapter."""
        adapter = _adapter_of(request)
        if adapter is None:
            return
        adapter.waiting.add(request)
        self._used[adapter] = None
        self._note(adapter)
        if adapter in self._wanting:
            self._start_reading(adapter)

    def fits(self, request: Request) -> Fit:
        """See AdmissionRoom."""
        adapter = request.adapter
        if adapter is None or (adapter.slot != NO_ADAPTER and adapter not in self._closed):
            return Fit.NOW
        return Fit.LATER

    def take(self, request: Request) -> None:
        """See AdmissionRoom."""
        adapter = _adapter_of(request)
        if adapter is None:
            return
        adapter.waiting.remove(request)
        adapter.running.add(request)
        self._touch(adapter)

    def release(self, request: Request) -> None:
        """See AdmissionRoom."""
        adapter = _adapter_of(request)
        if adapter is None:
            return
        if request in adapter.running:
            adapter.running.remove(request)
            if not request.status.is_finished:
                adapter.waiting.add(request)
        elif request.status.is_finished and request in adapter.waiting:
            adapter.waiting.remove(request)
        if not adapter.has_requests:
            self._used.pop(adapter, None)
            if adapter.is_retired:
                self._drop(adapter)
        self._note(adapter)

    def settle(self, scheduler: Scheduler) -> list[EngineCoreOutput]:
        """See Preparation."""
        if not (self._wanting or self._reads or self._staging) or not scheduler.requests:
            return []
        failed = self._take_in_read(scheduler)
        failed += self._take_in_staged(scheduler)
        in_turn = sorted(self._wanting, key=lambda adapter: adapter.order)
        self._start_staging(in_turn)
        self._close(in_turn)
        for adapter in self._in_slots():
            adapter.first_waiting = adapter.order
        for adapter in in_turn:
            if not self._start_reading(adapter):
                break
        return failed

    def jobs(self) -> Sequence[Future[Any]]:
        """See Preparation."""
        return [*self._reads.values(), *([] if self._staging is None else [self._staging.job])]

    def forget_slots(self) -> None:
        """See Preparation. Adapters that are needed get a slot again, from host memory or from their files. One that is being
        copied to the device is not lost."""
        for adapter in self._in_slots():
            self._clear_slot(adapter)
        self._closed = set()

    def shutdown(self) -> None:
        """End the threads. May be called again."""
        for thread in (self._check_thread, self._read_thread, self._stage_thread):
            thread.abandon()
        self._wait([job for job in self.jobs() if job.running()], _END_SECONDS)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Set the adapter fields of the stats."""
        stats.max_adapters = len(self._slots)
        stats.waiting_adapters = tuple(dict.fromkeys(adapter.name for adapter in self._used if len(adapter.waiting)))
        stats.running_adapters = tuple(dict.fromkeys(adapter.name for adapter in self._used if adapter.running))
        stats.num_adapter_loads, stats.num_adapter_evictions = self._num_loads, self._num_evictions
        stats.adapter_load_seconds = self._load_seconds

    def check_integrity(self, requests: Iterable[Request] = ()) -> None:
        """Raise AssertionError if adapters, slots, memory and these requests, the unfinished ones, disagree."""
        of_adapters = [request for request in requests if request.adapter is not None]
        held = [request for adapter in self._used for request in (*adapter.waiting, *adapter.running)]
        assert {id(request) for request in held} == {id(request) for request in of_adapters}, "an adapter has other requests"
        assert len(held) == len(of_adapters), "a request waits for an adapter and runs with it"
        for adapter in self._used:
            assert adapter.has_requests and (adapter.slot != NO_ADAPTER or not adapter.running), "a request runs without a slot"
        known = {*self._named.values(), *self._used}
        for slot, content in enumerate(self._slots):
            assert content is None or content.slot == slot and content in known, "a slot is held by nobody"
        assert self._staging is None or self._slots[self._staging.slot] is None, (
            "a slot that is kept for an adapter has another"
        )
        in_slots = [adapter for adapter in known if adapter.slot != NO_ADAPTER]
        assert all(self._slots[adapter.slot] is adapter for adapter in in_slots), "an adapter is not in its slot"
        assert not self._closed or self._wanting, "an adapter is closed for nobody"
        assert set(self._wanting) == {adapter for adapter in known if adapter.is_wanted and adapter.slot == NO_ADAPTER}
        for adapter, packed in self._host.items():
            assert packed is None or adapter in known, "an adapter in host memory can be named by nobody"
            assert (packed is None) == (adapter in self._reads), "a place in host memory is kept for nothing"
        assert len(self._host) <= self._max_host, "too many adapters are in host memory"
        assert set(self._new.values()) <= set(self._reads)
        assert self._num_pinned == sum(adapter.is_pinned for adapter in known) <= len(self._slots)

    # Adapters come and go

    def _find(self, name: str, param: str) -> Adapter:
        """The adapter of a name. Raises AdapterNotFoundError, which names the parameter."""
        adapter = self._named.get(name)
        if adapter is None:
            raise AdapterNotFoundError(f"there is no adapter {name!r}; add it first", param)
        return adapter

    def _take_in_read(self, scheduler: Scheduler | None = None) -> list[EngineCoreOutput]:
        """Take in the adapters that were read. Without a scheduler those that requests wait for stay until the next step.

        Returns the outputs of requests that failed.
        """
        failed: list[EngineCoreOutput] = []
        for adapter, job in list(self._reads.items()):
            is_new = self._new.get(adapter.name) is adapter
            is_gone = adapter.is_retired and not adapter.has_requests
            if not job.done() or not (is_new or is_gone or scheduler is not None):
                continue
            del self._reads[adapter]
            version, packed, error = None, None, ""
            try:
                version, packed = job.result()
            except JaxLLMError as failure:
                error = str(failure)
            except Exception as failure:
                logger.exception("adapter %r cannot be read", adapter.name)
                error = f"adapter {adapter.name!r} cannot be read from {adapter.path} ({type(failure).__name__})"
            if packed is None or is_gone:
                self._host.pop(adapter, None)
            else:
                self._host[adapter] = packed
                self._touch(adapter)
            if is_new:
                self._finish_adding(adapter, version, error)
            elif version is None and scheduler is not None:
                failed += self._fail(scheduler, adapter, error)
        return failed

    def _finish_adding(self, adapter: Adapter, version: AdapterVersion | None, error: str) -> None:
        """Let requests name an adapter that was read for the first time, in place of an earlier one; or note the error."""
        del self._new[adapter.name]
        self._note_outcome(adapter, error)
        if version is None:
            logger.info("adapter %r %s", adapter.name, error)
            return
        logger.info("adapter %r was added from %s, with rank %d", adapter.name, adapter.path, version.rank)
        adapter.version = version
        before = self._named.get(adapter.name)
        self._named[adapter.name] = adapter
        if before is not None:
            before.passes_pin = before.is_pinned
            self._retire(before)

    def _give_up(self, adapter: Adapter, reason: str) -> None:
        """Drop an adapter that is being read for the first time."""
        del self._new[adapter.name]
        adapter.is_retired = True
        self._note_outcome(adapter, f"adapter {adapter.name!r} {reason}")

    def _note_outcome(self, adapter: Adapter, error: str) -> None:
        self._outcomes[adapter.number] = error
        if len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def _retire(self, adapter: Adapter) -> None:
        """Drop an adapter that can no longer be named, when its last request has ended."""
        adapter.is_retired = True
        self._pin(adapter, False)
        if not adapter.has_requests:
            self._drop(adapter)

    def _drop(self, adapter: Adapter) -> None:
        if adapter.slot != NO_ADAPTER:
            self._clear_slot(adapter)
        if adapter not in self._reads:
            self._host.pop(adapter, None)
        heir = self._named.get(adapter.name)
        if adapter.passes_pin and heir is not None:
            if reason := self._why_not_pinned(heir):
                logger.warning("adapter %r, which was replaced, is not pinned any longer: %s", heir.name, reason)
            else:
                self._pin(heir, True)

    def _why_not_pinned(self, adapter: Adapter) -> str:
        """Empty if it can be: requests of other adapters still get a slot."""
        num_slots = len(self._slots)
        if adapter.is_pinned or self._num_pinned + 1 < num_slots:
            return ""
        if self._num_pinned == num_slots:
            return f"all {num_slots} slots have pinned adapters; remove one, or raise --max-loras"
        other = next((other.name for other in self._used if other is not adapter and not other.is_pinned), None)
        if other is None:
            return ""
        return f"it would take the last slot, and there are requests for {other!r}; wait for them, or raise --max-loras"

    def _pin(self, adapter: Adapter, is_pinned: bool) -> None:
        self._num_pinned += is_pinned - adapter.is_pinned
        adapter.is_pinned = is_pinned
        self._note(adapter)

    def _note(self, adapter: Adapter) -> None:
        """Record whether an adapter should have a slot and has none. Call when one of both may have changed."""
        if adapter.slot == NO_ADAPTER and adapter.is_wanted:
            self._wanting.setdefault(adapter, self._clock())
        elif self._wanting.pop(adapter, None) is not None and not self._wanting:
            self._closed = set()

    def _touch(self, adapter: Adapter) -> None:
        """The adapter is used."""
        adapter.last_used = next(self._ticks)

    def _fail(self, scheduler: Scheduler, adapter: Adapter, message: str) -> list[EngineCoreOutput]:
        """End the requests that wait for an adapter. The next one tries again."""
        if adapter.is_pinned:
            logger.warning("%s; it is not pinned any longer", message)
            self._pin(adapter, False)
        return scheduler.fail_requests([request.request_id for request in adapter.waiting], ErrorKind.ADAPTER, message)

    # From disk to host memory

    def _is_in_host(self, adapter: Adapter) -> bool:
        return self._host.get(adapter) is not None

    def _start_reading(self, adapter: Adapter) -> bool:
        """Read an adapter if it is not in host memory. Returns False if there is no place for it."""
        if adapter in self._host or adapter in self._reads:
            return True
        if len(self._host) == self._max_host:
            unneeded = [other for other in self._host if not self._is_needed(other)]
            if not unneeded:
                return False
            del self._host[min(unneeded, key=lambda other: other.last_used)]
        self._host[adapter] = None
        self._reads[adapter] = self._read_thread.submit(partial(self._read, adapter, True))
        return True

    def _is_needed(self, adapter: Adapter) -> bool:
        """Whether an adapter, or its place, must stay in host memory."""
        return adapter in self._reads or adapter in self._wanting or adapter.is_pinned

    def _read(self, adapter: Adapter, packs: bool) -> tuple[AdapterVersion, np.ndarray | None]:
        """Called in a thread. packs: for host memory; else it is only checked."""
        return read(adapter, self._reader, (lambda files: self._device.pack(files.tensor)) if packs else None)

    # From host memory to the device

    def _start_staging(self, in_turn: list[Adapter]) -> None:
        """Send the first adapter that is in host memory to the device, if a slot can be taken."""
        ready = ((adapter, packed) for adapter in in_turn if (packed := self._host.get(adapter)) is not None)
        if self._staging is not None or (first := next(ready, None)) is None:
            return
        adapter, packed = first
        slot = self._find_slot(adapter)
        if slot is None:
            return
        evicted = self._slots[slot]
        if evicted is not None:
            self._num_evictions += 1
            self._clear_slot(evicted)
        self._touch(adapter)
        handle = self._ops.new_handle()
        job = self._stage_thread.submit(partial(self._stage, adapter, handle, packed))
        self._staging = _Staging(adapter, slot, handle, job)

    def _stage(self, adapter: Adapter, handle: int, packed: np.ndarray) -> None:
        """Called in a thread."""
        self._executor.stage(handle, packed)

    def _take_in_staged(self, scheduler: Scheduler) -> list[EngineCoreOutput]:
        """Have the next plan write the adapter that arrived at the device into its slot. Returns the outputs of requests that failed."""
        staging = self._staging
        if staging is None or not staging.job.done():
            return []
        self._staging = None
        adapter, error = staging.adapter, staging.job.exception()
        if error is not None or adapter.is_retired and not adapter.has_requests:
            self._ops.add(DropStaged(staging.handle))
            if error is None:
                return []
            logger.error("adapter %r cannot be sent to the device", adapter.name, exc_info=error)
            message = f"adapter {adapter.name!r} cannot be sent to the device ({type(error).__name__}); try again"
            return self._fail(scheduler, adapter, message)
        self._ops.add(WriteAdapter(staging.slot, staging.handle), failed=partial(self._lose_slots, staging))
        self._slots[staging.slot] = adapter
        adapter.slot, adapter.first_waiting = staging.slot, None
        self._touch(adapter)
        seconds = self._clock() - self._wanting.get(adapter, self._clock())
        logger.debug("adapter %r has slot %d after %.3f s", adapter.name, adapter.slot, seconds)
        self._num_loads += 1
        self._load_seconds += seconds
        self._note(adapter)
        return []

    def _lose_slots(self, staging: _Staging, error: Exception) -> None:
        """Writing an adapter failed, and the contents of all slots are lost. Raises LostError."""
        self._ops.add(DropStaged(staging.handle))
        self.forget_slots()
        adapter = staging.adapter
        raise LostError([request.request_id for request in (*adapter.waiting, *adapter.running)]) from error

    def _clear_slot(self, adapter: Adapter) -> None:
        """The adapter has no slot any longer."""
        self._slots[adapter.slot] = None
        adapter.slot = NO_ADAPTER
        self._note(adapter)

    def _find_slot(self, adapter: Adapter) -> int | None:
        """The slot that an adapter can have now: an empty one, else the least recently used of those that are not in use."""
        reserved = None if self._staging is None else self._staging.slot
        for slot, content in enumerate(self._slots):
            if content is None and slot != reserved:
                return slot
        unused = [other for other in self._in_slots() if self._is_unused(other) and other.gives_way_to(adapter)]
        return min(unused, key=lambda other: (len(other.waiting) > 0, other.last_used)).slot if unused else None

    def _is_unused(self, adapter: Adapter) -> bool:
        """Whether no request runs with an adapter that is in a slot, or will with the next step."""
        if adapter.running:
            return False
        return not len(adapter.waiting) or adapter in self._closed or adapter.order == adapter.first_waiting

    def _close(self, in_turn: list[Adapter]) -> None:
        """Close as many adapters as others waited long for their slots, a quarter of the slots at most: those with the fewest running
        requests. Those that were closed before and need not be now admit requests again."""
        latest, staging = self._clock() - CLAIM_SECONDS, self._staging
        waited = [adapter for adapter in in_turn if adapter.is_pinned or self._wanting[adapter] <= latest]
        waited = [
            adapter for adapter in waited if self._is_in_host(adapter) and (staging is None or adapter is not staging.adapter)
        ]
        num_empty = self._slots.count(None) - (staging is not None)
        closed = set[Adapter]()
        for adapter in waited[num_empty : max(1, len(self._slots) // 4)]:
            found = [other for other in self._in_slots() if other not in closed and other.gives_way_to(adapter)]
            if found:
                closed.add(min(found, key=lambda other: (len(other.running), other not in self._closed)))
        self._closed = closed

    def _in_slots(self) -> list[Adapter]:
        return [adapter for adapter in self._slots if adapter is not None]

    # Waiting


def _adapter_of(request: Request) -> Adapter | None:
    adapter = request.adapter
    assert adapter is None or isinstance(adapter, Adapter)
    return adapter
