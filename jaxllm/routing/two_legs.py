"""A request in two legs: a prefill engine computes its prompt, a decode engine fetches the blocks and computes the answer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.request import EngineCoreRequest
from jaxllm.routing.balancer import Balancer

PREFILL_SUFFIX = "-prefill"
"""Ends the id of a first leg."""
_KEEP = KVTransfer(keep_for_decode=True, tells_early=True)


class TwoLegs:
    """Which engines a request goes to: some replicas of a balancer prefill, the others decode."""

    def __init__(
        self, balancer: Balancer, prefill_ranks: Collection[int], threshold: int, max_model_len: int, num_hosts: int = 1
    ):
        """threshold: a prompt with fewer tokens to compute is computed by the decode engine itself. max_model_len: the longest request.
        num_hosts: hosts that have the next replicas each, and as many."""
        self._balancer, self._threshold, self._max_model_len = balancer, threshold, max_model_len
        self._prefills = np.isin(np.arange(balancer.num_replicas), list(prefill_ranks))
        self._decodes = ~self._prefills
        self._host_of = np.arange(balancer.num_replicas) // (balancer.num_replicas // num_hosts)
        self._num_hosts = num_hosts

    @property
    def can_answer(self) -> bool:
        """Whether a decode engine takes requests."""
        return self._balancer.takes_requests(self._decodes)

    def begins_with_prefill(self, request: EngineCoreRequest) -> bool:
        """Whether a prefill engine computes the prompt for a decode engine. Raises InvalidRequestError or EngineDeadError."""
        if request.options.data_parallel_rank is not None:
            raise InvalidRequestError(
                f"data_parallel_rank is {request.options.data_parallel_rank}, but this server chooses the prefill and the decode engine; "
                "leave it out",
                "data_parallel_rank",
            )
        if (
            self._ends_with_prompt(request)
            or not request.reads_prefix_cache
            or not self._balancer.takes_requests(self._prefills)
        ):
            return False
        if not self.can_answer:
            raise EngineDeadError("no decode engine takes requests now")
        return self._balancer.fewest_uncached(request, self._decodes) >= self._threshold

    def choose_prefill(self, leg: EngineCoreRequest) -> int:
        """The engine for a first leg: of the fewest uncached tokens queued, its own included."""
        return self._balancer.choose(leg, among=self._prefills)

    def choose_whole(self, request: EngineCoreRequest, rank: int | None = None) -> int:
        """The engine for a request that one engine computes whole: a decode engine, or for one without an answer to speak of, a prefill
        engine. rank: the engine, if it is chosen already."""
        among = (
            self._prefills
            if self._ends_with_prompt(request) and self._balancer.takes_requests(self._prefills)
            else self._decodes
        )
        return self._balancer.choose(request, rank, among=among)

    def choose_decode(self, request: EngineCoreRequest, prefill_rank: int, rank: int | None = None) -> int:
        """The engine for a second leg, whose first ran on this prefill engine: of the fewest tokens running, on the same host if that is
        about as good. If the first leg left no blocks, as for a whole request. rank: the engine, if it is chosen already."""
        is_prefilled = request.options.kv_transfer is not None
        near = self._host_of == self._host_of[prefill_rank] if self._num_hosts > 1 else None
        return self._balancer.choose(request, rank, among=self._decodes, near=near, is_prefilled=is_prefilled)

    def _ends_with_prompt(self, request: EngineCoreRequest) -> bool:
        """Whether nothing follows the step that computes the last prompt token."""
        is_full = len(request.prompt_token_ids) + 1 >= self._max_model_len
        return request.pooling_params is not None or request.sampling_params.max_tokens == 1 or is_full


def prefill_leg(request: EngineCoreRequest) -> EngineCoreRequest:
    """The first leg of a request: it ends with the first token, drawn as the request asks, for the reason "length" if the request goes on.
    It belongs to no session: a prefix that a prefill engine has is found by its cache."""
    params = request.sampling_params.clone()
    params.max_tokens, params.min_tokens = 1, min(params.min_tokens, 1)
    return replace(
        request,
        request_id=request.request_id + PREFILL_SUFFIX,
        sampling_params=params,
        options=replace(request.options, kv_transfer=_KEEP, session_id=None),
        output_token_ids=(),
    )


def decode_leg(
    request: EngineCoreRequest,
    params: Mapping[str, Any] | None,
    first_token_ids: Sequence[int] = (),
    *,
    awaits_first_token: bool = False,
) -> EngineCoreRequest:
    """The second leg of a request, whose first leg answered with these `kv_transfer_params`; None: the decode engine computes it all.
    first_token_ids: what the first leg has drawn for it. awaits_first_token: it will."""
    return replace(
        request,
        options=replace(request.options, kv_transfer=read_kv_transfer(params)),
        output_token_ids=(*request.output_token_ids, *first_token_ids),
        awaits_first_token=awaits_first_token,
    )
