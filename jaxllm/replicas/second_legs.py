"""Answers that decode engines have not begun to report: where their blocks are, and how they run again after a failure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxllm.kv_transfer import KVTransfer
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import RequestOutputKind


class SecondLegs:
    """Leases and first tokens of second legs that have reported nothing, by request."""

    def __init__(self) -> None:
        self._unfetched: dict[str, tuple[int, KVTransfer]] = {}
        """Where their blocks are, after the rank of that prefill engine."""
        self._begun: dict[str, EngineCoreRequest] = {}
        """Requests whose first token was passed on, and no other: with it they may run again."""

    def __len__(self) -> int:
        return len(self._unfetched) + len(self._begun)

    def note_sent(self, second: EngineCoreRequest, prefill_rank: int) -> None:
        """A second leg is sent to a decode engine."""
        if (transfer := second.options.kv_transfer) is not None:
            self._unfetched[second.request_id] = prefill_rank, transfer

    def note_begun(self, second: EngineCoreRequest, first_token_ids: Sequence[int]) -> None:
        """A first leg has passed on these first tokens of a request. Where nothing follows, it goes on behind them; others can begin anew,
        and so can requests whose callers get all at the end."""
        if first_token_ids and second.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
            options = replace(second.options, kv_transfer=None)
            self._begun[second.request_id] = replace(
                second, options=options, output_token_ids=tuple(first_token_ids), awaits_first_token=False
            )

    def forget(self, request_id: str) -> None:
        """A request has reported something, or its decode engine ends what it has of it."""
        self._unfetched.pop(request_id, None)
        self._begun.pop(request_id, None)

    def take_lease(self, request_id: str) -> tuple[int, KVTransfer] | None:
        """Where the blocks of a request are kept that ended perhaps before it fetched them: a prefill engine's rank, and what it told."""
        return self._unfetched.pop(request_id, None)

    def take_begun(self, request_ids: Collection[str]) -> dict[str, EngineCoreRequest]:
        """The requests with these ids that can run again behind their first token, as they are to be sent."""
        return {request_id: self._begun.pop(request_id) for request_id in request_ids if request_id in self._begun}
