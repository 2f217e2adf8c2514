"""Requests whose prompts prefill engines computed: each waits until this engine may fetch its blocks, or is sure that it cannot."""

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.errors import InvalidRequestError, JaxLLMError
from jaxllm.kv_tiers.peers.client import Target
from jaxllm.kv_tiers.peers.identity import is_signed
from jaxllm.kv_tiers.peers.peer_store import PeerStore
from jaxllm.kv_transfer import PARAM, KVTransfer
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request
from jaxllm.scheduler.admission import Fit
from jaxllm.scheduler.interface import AnyScheduler

_FAILED = "the prefill engine that computed the prompt did not deliver its blocks; the engine's log has the reason"


@dataclass(eq=False)
class _Waiting:
    """A request that is not admitted yet."""

    request: Request
    attaching: "Future[Sequence[bytes]]"
    deadline: float
    is_over: bool = False
    """Whether `settle` has processed the end of its attempt."""
    is_lost: bool = False
    """Whether it failed."""
    is_told: bool = False
    """Whether the log has why."""


class RemotePrefills:
    """A Preparation of decode engines (see `jaxllm.engine.preparations`)."""

    def __init__(self, store: PeerStore, token: bytes, timeout_seconds: float, policy: Literal["recompute", "fail"]):
        self._store, self._token, self._timeout, self._fails = store, token, timeout_seconds, policy == "fail"
        self._waiting: dict[str, _Waiting] = {}

    def bind(self, request: Request) -> None:
        """Raises InvalidRequestError for parameters that no prefill engine signed."""
        transfer = request.options.kv_transfer
        if transfer is not None and transfer.remote_engine_id is not None and not is_signed(self._token, transfer):
            raise InvalidRequestError(
                f"{PARAM} has {'a wrong' if transfer.signature else 'no'} jaxllm_signature, but this engine has a token (JAXLLM_KV_TOKEN); "
                "pass on the parameters as a prefill engine with the same token answered them",
                PARAM,
            )

    def end_lease(self, transfer: KVTransfer) -> None:
        """Blocks that a prefill engine keeps for a request will not be fetched by it: have that engine free them, unless other requests
        of this engine use the lease. Nothing is sent anywhere for parameters that no prefill engine signed."""
        if transfer.remote_engine_id is not None and is_signed(self._token, transfer):
            self._store.end_lease(_target(transfer), str(transfer.lease_id))

    def meet(self, transfer: KVTransfer) -> None:
        """Connect to a prefill engine, before a request needs it. Does nothing for an address that no prefill engine signed."""
        if transfer.remote_engine_id is not None and is_signed(self._token, transfer):
            self._store.meet(_target(transfer))

    def admit(self, request: Request) -> None:
        transfer = request.options.kv_transfer
        if transfer is None or transfer.remote_engine_id is None:
            return
        request_id = request.request_id
        attaching: Future[Sequence[bytes]]
        try:
            attaching = self._store.attach(request_id, _target(transfer), str(transfer.lease_id))
        except JaxLLMError as error:
            attaching = Future()
            attaching.set_exception(error)
        self._waiting[request_id] = _Waiting(request, attaching, time.monotonic() + self._timeout)

    def fits(self, request: Request) -> Fit:
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            return Fit.NOW
        is_failing = self._fails and (waiting.is_lost or self._store.fault_of(request.request_id) is not None)
        return Fit.NOW if waiting.is_over and not is_failing else Fit.LATER

    def settle(self, scheduler: AnyScheduler) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        if wrong := self._store.take_news():
            scheduler.discard(wrong)
        for waiting in list(self._waiting.values()):
            if (fault := self._end(waiting)) is None:
                continue
            request_id = waiting.request.request_id
            if not waiting.is_told:
                logger.info("request %s: blocks of its prompt do not come from the prefill engine: %s", request_id, fault)
                waiting.is_told = True
            if self._fails:
                outputs += scheduler.fail_requests([request_id], ErrorKind.KV_TRANSFER, _FAILED)
        return outputs

    def _end(self, waiting: _Waiting) -> str | None:
        """Process the end of an attempt, if it is over. Returns why it failed."""
        request = waiting.request
        if waiting.is_over:
            return self._store.fault_of(request.request_id)
        if not waiting.attaching.done():
            if time.monotonic() < waiting.deadline:
                return None
            fault: str | None = f"no answer within {self._timeout:g} s (kv_pull_timeout)"
            self._store.detach(request.request_id)
        else:
            fault = _fault_of(waiting.attaching)
        waiting.is_over, waiting.is_lost = True, fault is not None
        return fault

    def take(self, request: Request) -> None:
        """Its blocks are loaded, or are computed here."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._store.detach(request.request_id)
            request.may_try_again &= not self._fails

    def release(self, request: Request) -> None:
        if request.status.is_finished:
            self.take(request)

    def jobs(self) -> Sequence["Future[Any]"]:
        return [waiting.attaching for waiting in self._waiting.values() if not waiting.is_over]

    def forget_slots(self) -> None:
        """The devices have nothing of it."""

    def check_integrity(self) -> None:
        assert not self._waiting, "requests wait for blocks that have ended"
        self._store.check_integrity()

    def shutdown(self) -> None:
        """The tiers close the store."""


def _target(transfer: KVTransfer) -> Target:
    assert transfer.remote_engine_id is not None and transfer.host is not None and transfer.port is not None
    return Target(transfer.remote_engine_id, transfer.host, transfer.port)


def _fault_of(future: "Future[Any]") -> str | None:
    error = future.exception()
    if isinstance(error, CancelledError):
        return "the prefill engine is lost"
    return None if error is None else str(error) or type(error).__name__
