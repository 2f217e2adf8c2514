"""Adapters: what requests may name, and their way from disk through host memory into the slots of the device. Does not import JAX."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.device_ops import AnyDeviceOp, DropStaged, WriteAdapter
from jaxllm.errors import InvalidRequestError, JaxLLMError
from jaxllm.log import logger
from jaxllm.lora.adapter import Adapter
from jaxllm.lora.host_memory import AdapterFiles, HostMemory, Reader, Reading, read
from jaxllm.lora.lanes import Lanes
from jaxllm.lora.registry import Registry
from jaxllm.lora.slots import SlotTable
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.errors import LostError
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import NO_ADAPTER
from jaxllm.scheduler_stats import SchedulerStats

CLAIM_SECONDS = 2.0
"""An adapter that waited this long for a slot gets one whose adapter admits no further requests meanwhile."""
MAX_WAIT_SECONDS = 0.02
"""Longest time that one step waits for an adapter when there is no other work."""


class AdapterDevice(Protocol):
    """The slots of adapters on the device."""

    num_slots: int
    num_bytes: int
    """Memory of one packed adapter, in bytes."""

    def pack(self, files: AdapterFiles) -> np.ndarray:
        """An adapter as `stage` takes it. Called in a thread."""

    def stage(self, handle: int, packed: np.ndarray) -> None:
        """See Executor. Called in a thread."""


class Ops(Protocol):
    """See `jaxllm.engine.op_queue.OpQueue`."""

    def new_handle(self) -> int: ...
    def add(self, op: AnyDeviceOp, *, failed: Callable[[Exception], None] | None = None) -> object: ...


class Adapters:
    """The adapters of an engine core, a Preparation: a request fits while its adapter is in a slot.

    The step loop's thread calls all methods; files are read and adapters sent to the device in threads. An adapter is read when a
    request names it, and gets a slot as soon as one is free or unused, before its request is next in line. See SlotTable for which
    slot it takes, and HostMemory for what stays there.
    """

    def __init__(
        self,
        device: AdapterDevice,
        ops: Ops,
        reader: Reader,
        *,
        max_host: int | None = None,
        lanes: Lanes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """max_host: adapters in host memory; None: as many as slots."""
        self._device, self._ops, self._reader, self._clock = device, ops, reader, clock
        self._slots = SlotTable(device.num_slots)
        self._host = HostMemory(max(max_host or 0, device.num_slots))
        self._lanes = lanes or Lanes()
        self._registry = Registry()
        self._num_pinned = 0
        self._used: dict[Adapter, None] = {}
        """Adapters with unfinished requests."""
        self._wanting: dict[Adapter, float] = {}
        """Adapters that should have a slot and have none, with the time since when."""
        self._reads: dict[Adapter, Future[Reading]] = {}
        """Adapters that are being read."""
        self._staging: tuple[Adapter, int, Future[None]] | None = None
        """The adapter that is being copied to the device, for the reserved slot, with its handle."""
        self._num_loads = 0
        self._load_seconds = 0.0

    # Calls of API servers

    def add_adapter(self, name: str, path: str, replace: bool = False) -> int:
        """See ControlCalls. The adapter that is replaced is there until the new one is ready."""
        self._take_in_read()
        adapter = self._registry.begin(name, path, replace=replace)
        if adapter not in self._reads:
            packs = self._host.has_place and self._host.expect(adapter, self._is_needed)
            self._reads[adapter] = self._lanes.submit("read", partial(self._read, adapter, packs), urgent=False)
        return adapter.number

    def adapter_state(self, number: int) -> AdapterState:
        """See ControlCalls."""
        self._take_in_read()
        return self._registry.state(number)

    def remove_adapter(self, name: str) -> bool:
        """See ControlCalls."""
        self._take_in_read()
        is_new = name in self._registry.new
        if is_new:
            self._registry.give_up(name, "was removed before it was loaded")
        for used in self._used:
            used.passes_pin &= used.name != name
        adapter = self._registry.named.pop(name, None)
        if adapter is not None:
            self._retire(adapter)
        return is_new or adapter is not None

    def list_adapters(self) -> list[AdapterInfo]:
        """See ControlCalls."""
        self._take_in_read()
        return [
            AdapterInfo(
                name=adapter.name,
                path=adapter.path,
                rank=adapter.rank,
                num_bytes=self._device.num_bytes,
                is_pinned=adapter.is_pinned,
                where="device" if adapter.slot != NO_ADAPTER else "host" if adapter in self._host.packed else "disk",
                cache_key=adapter.cache_key,
            )
            for adapter in self._registry.named.values()
        ]

    def pin_adapter(self, name: str) -> None:
        """See ControlCalls. It gets its slot with the next request, whatever that names."""
        self._take_in_read()
        adapter = self._registry.find(name, "name")
        if reason := self._why_not_pinned(adapter):
            raise InvalidRequestError(f"adapter {name!r} cannot be pinned: {reason}", "name")
        self._pin(adapter, True)

    def _why_not_pinned(self, adapter: Adapter) -> str:
        """Empty if it can be: requests of other adapters still get a slot."""
        num_slots = self._device.num_slots
        if adapter.is_pinned or self._num_pinned + 1 < num_slots:
            return ""
        if self._num_pinned == num_slots:
            return f"all {num_slots} slots have pinned adapters; remove one, or raise --max-loras"
        other = next((other.name for other in self._used if other is not adapter and not other.is_pinned), None)
        if other is None:
            return ""
        return f"it would take the last slot, and there are requests for {other!r}; wait for them, or raise --max-loras"

    # A Preparation

    def bind(self, request: Request) -> None:
        """See Preparation."""
        name = request.options.adapter
        if name is None:
            return
        if self._registry.new:
            self._take_in_read()
        adapter = self._registry.find(name, "adapter")
        if self._num_pinned == self._device.num_slots and not adapter.is_pinned:
            raise InvalidRequestError(
                f"adapter {name!r} gets no slot: all {self._device.num_slots} have pinned adapters; remove one, or raise --max-loras",
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
        if adapter is None or (adapter.slot != NO_ADAPTER and adapter.slot not in self._slots.closed):
            return Fit.NOW
        return Fit.LATER

    def take(self, request: Request) -> None:
        """See AdmissionRoom."""
        adapter = _adapter_of(request)
        if adapter is None:
            return
        adapter.waiting.remove(request)
        adapter.running.add(request)
        self._slots.touch(adapter.slot)
        self._host.touch(adapter)

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
        """See Preparation. Waits up to MAX_WAIT_SECONDS if every request waits for its adapter."""
        if not (self._wanting or self._reads or self._staging) or not scheduler.requests:
            return []
        self._wait_if_idle(scheduler)
        news = self._take_in_read(scheduler)
        news += self._take_in_staged(scheduler)
        in_turn = sorted(self._wanting, key=lambda adapter: adapter.order)
        self._start_staging(in_turn)
        self._close_slots(in_turn)
        self._slots.note_waiting()
        for adapter in in_turn:
            if not self._start_reading(adapter):
                break
        return news

    def forget_slots(self) -> None:
        """See Preparation. Adapters that are needed get a slot again, from host memory or from their files. One that is being
        copied to the device is not lost."""
        for adapter in self._slots.contents:
            if adapter is not None:
                self._slots.clear(adapter)
                self._note(adapter)
        self._slots.closed = frozenset()

    def shutdown(self) -> None:
        """End the threads. May be called again."""
        self._lanes.shutdown()

    def add_stats(self, stats: SchedulerStats) -> None:
        """Set the adapter fields of the stats."""
        stats.max_adapters = self._device.num_slots
        stats.waiting_adapters = tuple(dict.fromkeys(adapter.name for adapter in self._used if len(adapter.waiting)))
        stats.running_adapters = tuple(dict.fromkeys(adapter.name for adapter in self._used if adapter.running))
        stats.num_adapter_loads, stats.num_adapter_evictions = self._num_loads, self._slots.num_evictions
        stats.adapter_load_seconds = self._load_seconds

    def check_integrity(self, requests: Iterable[Request] = ()) -> None:
        """Raise AssertionError if adapters, slots, memory and these requests, the unfinished ones, disagree."""
        of_adapters = [request for request in requests if request.adapter is not None]
        held = [request for adapter in self._used for request in (*adapter.waiting, *adapter.running)]
        assert {id(request) for request in held} == {id(request) for request in of_adapters}, "an adapter has other requests"
        assert len(held) == len(of_adapters), "a request waits for an adapter and runs with it"
        for adapter in self._used:
            assert adapter.has_requests and (adapter.slot != NO_ADAPTER or not adapter.running), "a request runs without a slot"
        known = {*self._registry.named.values(), *self._used}
        for slot, content in enumerate(self._slots.contents):
            assert content is None or content.slot == slot and content in known, "a slot is held by nobody"
            assert content is None or slot != self._slots.reserved
        in_slots = [adapter for adapter in known if adapter.slot != NO_ADAPTER]
        assert all(self._slots.contents[adapter.slot] is adapter for adapter in in_slots), "an adapter is not in its slot"
        assert (self._slots.reserved is None) == (self._staging is None), "a slot is reserved for nothing"
        assert not self._slots.closed or self._wanting, "a slot is closed for nobody"
        assert set(self._wanting) == {adapter for adapter in known if adapter.is_wanted and adapter.slot == NO_ADAPTER}
        assert set(self._host.packed) <= known, "an adapter in host memory can be named by nobody"
        assert len(self._host.packed) + len(self._host.expected) <= self._host.capacity, "too many adapters are in host memory"
        assert self._host.expected <= set(self._reads), "a place in host memory is kept for nothing"
        assert set(self._registry.new.values()) <= set(self._reads)
        assert self._num_pinned == sum(adapter.is_pinned for adapter in known) <= self._device.num_slots

    # Adapters come and go

    def _take_in_read(self, scheduler: Scheduler | None = None) -> list[EngineCoreOutput]:
        """Take in the adapters that were read. Without a scheduler those that requests wait for stay until the next step.

        Returns the outputs of requests that failed.
        """
        news: list[EngineCoreOutput] = []
        for adapter, job in list(self._reads.items()):
            is_new = self._registry.new.get(adapter.name) is adapter
            is_gone = adapter.is_retired and not adapter.has_requests
            if not job.done() or not (is_new or is_gone or scheduler is not None):
                continue
            del self._reads[adapter]
            reading, error = None, ""
            try:
                reading = job.result()
            except JaxLLMError as failure:
                error = str(failure)
            except Exception as failure:
                logger.exception("adapter %r cannot be read", adapter.name)
                error = f"adapter {adapter.name!r} cannot be read from {adapter.path} ({type(failure).__name__})"
            self._host.arrive(adapter, None if reading is None or is_gone else reading.packed)
            if is_new:
                before = self._registry.finish(adapter, reading, error)
                logger.info("adapter %r %s", adapter.name, error or f"was added from {adapter.path}, with rank {adapter.rank}")
                if before is not None:
                    before.passes_pin = before.is_pinned
                    self._retire(before)
            elif reading is None and scheduler is not None:
                news += self._fail(scheduler, adapter, error)
        return news

    def _retire(self, adapter: Adapter) -> None:
        """Drop an adapter that can no longer be named, when its last request has ended."""
        adapter.is_retired = True
        self._pin(adapter, False)
        if not adapter.has_requests:
            self._drop(adapter)

    def _drop(self, adapter: Adapter) -> None:
        if adapter.slot != NO_ADAPTER:
            self._slots.clear(adapter)
        self._host.packed.pop(adapter, None)
        heir = self._registry.named.get(adapter.name)
        if adapter.passes_pin and heir is not None:
            if reason := self._why_not_pinned(heir):
                logger.warning("adapter %r, which was replaced, is not pinned any longer: %s", heir.name, reason)
            else:
                self._pin(heir, True)

    def _pin(self, adapter: Adapter, is_pinned: bool) -> None:
        self._num_pinned += is_pinned - adapter.is_pinned
        adapter.is_pinned = is_pinned
        self._note(adapter)

    def _note(self, adapter: Adapter) -> None:
        """Record whether an adapter should have a slot and has none. Call when one of both may have changed."""
        if adapter.slot == NO_ADAPTER and adapter.is_wanted:
            self._wanting.setdefault(adapter, self._clock())
        elif self._wanting.pop(adapter, None) is not None and not self._wanting:
            self._slots.closed = frozenset()

    # Their way to the device

    def _is_needed(self, adapter: Adapter) -> bool:
        """Whether an adapter must stay in host memory."""
        return adapter in self._wanting or adapter.is_pinned

    def _start_reading(self, adapter: Adapter) -> bool:
        """Read an adapter if it is not in host memory. Returns False if there is no place for it."""
        if adapter in self._host.packed or adapter in self._reads:
            return True
        if not self._host.expect(adapter, self._is_needed):
            return False
        self._reads[adapter] = self._lanes.submit("read", partial(self._read, adapter, True))
        return True

    def _start_staging(self, in_turn: list[Adapter]) -> None:
        """Send the first adapter that is in host memory to the device, if a slot can be taken."""
        adapter = next((adapter for adapter in in_turn if adapter in self._host.packed), None)
        if self._staging is not None or adapter is None:
            return
        reserved = self._slots.reserve(adapter)
        if reserved is None:
            return
        evicted = reserved[1]
        if evicted is not None:
            self._note(evicted)
        self._host.touch(adapter)
        handle = self._ops.new_handle()
        job = self._lanes.submit("stage", partial(self._stage, adapter, handle, self._host.packed[adapter]))
        self._staging = adapter, handle, job

    def _close_slots(self, in_turn: list[Adapter]) -> None:
        """Keep slots from further requests for the adapters that waited long: a quarter of the slots at most."""
        latest = self._clock() - CLAIM_SECONDS
        most = max(1, self._device.num_slots // 4)
        waited = [adapter for adapter in in_turn if adapter.is_pinned or self._wanting[adapter] <= latest]
        waited = [adapter for adapter in waited if adapter in self._host.packed and not self._is_staging(adapter)]
        if waited or self._slots.closed:
            self._slots.close(waited[:most])

    def _is_staging(self, adapter: Adapter) -> bool:
        return self._staging is not None and self._staging[0] is adapter

    def _take_in_staged(self, scheduler: Scheduler) -> list[EngineCoreOutput]:
        """Have the next plan write the adapter that arrived at the device into its slot. Returns the outputs of requests that failed."""
        if self._staging is None or not self._staging[2].done():
            return []
        (adapter, handle, job), slot = self._staging, self._slots.reserved
        assert slot is not None
        self._staging = None
        error = job.exception()
        if error is not None or adapter.is_retired and not adapter.has_requests:
            self._slots.reserved = None
            self._ops.add(DropStaged(handle))
            if error is None:
                return []
            logger.error("adapter %r cannot be sent to the device", adapter.name, exc_info=error)
            message = f"adapter {adapter.name!r} cannot be sent to the device ({type(error).__name__}); try again"
            return self._fail(scheduler, adapter, message)
        self._ops.add(WriteAdapter(slot, handle), failed=partial(self._lose_slots, adapter, handle))
        self._slots.put(slot, adapter)
        seconds = self._clock() - self._wanting.get(adapter, self._clock())
        logger.debug("adapter %r has slot %d after %.3f s", adapter.name, slot, seconds)
        self._num_loads += 1
        self._load_seconds += seconds
        self._note(adapter)
        return []

    def _lose_slots(self, adapter: Adapter, handle: int, error: Exception) -> None:
        """Writing an adapter failed, and the contents of all slots are lost. Raises LostError."""
        self._ops.add(DropStaged(handle))
        self.forget_slots()
        raise LostError([request.request_id for request in (*adapter.waiting, *adapter.running)]) from error

    def _fail(self, scheduler: Scheduler, adapter: Adapter, message: str) -> list[EngineCoreOutput]:
        """End the requests that wait for an adapter. The next one tries again."""
        if adapter.is_pinned:
            logger.warning("%s; it is not pinned any longer", message)
            self._pin(adapter, False)
        return scheduler.fail_requests([request.request_id for request in adapter.waiting], ErrorKind.ADAPTER, message)

    def _wait_if_idle(self, scheduler: Scheduler) -> None:
        jobs: list[Future[Any]] = (
            [*self._reads.values()] if self._staging is None else [self._staging[2], *self._reads.values()]
        )
        if jobs and sum(len(adapter.waiting) for adapter in self._wanting) == len(scheduler.requests):
            self._lanes.wait(jobs, MAX_WAIT_SECONDS)

    # In threads, or where faults are injected

    def _read(self, adapter: Adapter, packs: bool) -> Reading:
        return read(adapter, self._reader, self._device.pack if packs else None)

    def _stage(self, adapter: Adapter, handle: int, packed: np.ndarray) -> None:
        self._device.stage(handle, packed)


def _adapter_of(request: Request) -> Adapter | None:
    adapter = request.adapter
    assert adapter is None or isinstance(adapter, Adapter)
    return adapter
