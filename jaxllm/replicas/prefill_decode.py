"""Replicas of two roles as one AsyncCore: a request with a long prompt runs in two legs, on a prefill and then on a decode engine."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from jaxllm.engine import messages
from jaxllm.engine.async_core import ReplicaInfo
from jaxllm.engine.client import EngineClient
from jaxllm.engine.messages import Outputs, Refused
from jaxllm.errors import EngineDeadError, EngineError, JaxLLMError, ReplicaLostError
from jaxllm.kv_transfer import read_kv_transfer
from jaxllm.log import logger
from jaxllm.options.kv_transfer import LOOPBACK, PORT
from jaxllm.outputs import EngineCoreOutput
from jaxllm.replicas.core import Replicas
from jaxllm.replicas.first_legs import FirstLeg, FirstLegs
from jaxllm.replicas.second_legs import SecondLegs
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.routing.balancer import RoutingPolicy
from jaxllm.routing.two_legs import TwoLegs, decode_leg, prefill_leg

_ENDS_REQUEST = frozenset({ErrorKind.TIMEOUT, ErrorKind.QUEUE_TIMEOUT, ErrorKind.ADAPTER, ErrorKind.CONSTRAINT})
"""Errors of a first leg that a second one would meet too."""


class PrefillDecode(Replicas):
    """Replicas of which those with `prefill_ranks` prefill, and the others decode. Callers see one request: its first leg has an id that no
    caller knows, and where that leg fails the decode engine computes the prompt itself, unless the request is to fail too."""

    def __init__(
        self,
        connect: Callable[[int, int | None], EngineClient],
        pids: Sequence[int | None],
        *,
        prefill_ranks: Collection[int],
        num_hosts: int = 1,
        threshold: int,
        load_failure_policy: Literal["recompute", "fail"] = "recompute",
        pull_timeout: float = 10.0,
        policy: RoutingPolicy = "cache_aware",
        num_api_servers: int = 1,
        retries: bool = False,
    ):
        """threshold: a prompt with fewer uncached tokens runs on a decode engine alone. load_failure_policy: the option
        kv_load_failure_policy; "fail": what ends a first leg with an error ends its request. pull_timeout: the option kv_pull_timeout.
        num_hosts: hosts, each with as many of the engines, of the next ranks."""
        super().__init__(connect, pids, policy=policy, num_api_servers=num_api_servers, retries=retries)
        self._prefills, self._num_hosts = frozenset(prefill_ranks), num_hosts
        self._threshold, self._fails = threshold, load_failure_policy == "fail"
        self._pull_timeout = pull_timeout
        self.first_legs, self.second_legs = FirstLegs(), SecondLegs()
        self._last_leg = ""

    async def ready(self) -> "PrefillDecode":
        await super().ready()
        self.routes = TwoLegs(self.balancer, self._prefills, self._threshold, self.core.max_model_len, self._num_hosts)
        # Clients send whole requests: they name no engines.
        self.core.config = self.core.config.replace(kv_role=None, kv_host=LOOPBACK, kv_port=PORT, kv_peers=None)
        return self

    @property
    def dead_error(self) -> EngineDeadError | None:
        error = super().dead_error
        if error is None and "loading" not in self._states and not self.routes.can_answer:
            return EngineDeadError("no decode engine serves now")
        return error

    def replicas(self) -> list[ReplicaInfo]:
        return [replace(each, role="prefill" if each.rank in self._prefills else "decode") for each in super().replicas()]

    def replica_of(self, request_id: str) -> int | None:
        leg = self.first_legs.of(request_id)
        return super().replica_of(request_id) if leg is None or request_id in leg.sent else leg.rank

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to a prefill engine, or to the engine that computes it whole."""
        if request.prompt_token_ids is self._last_prompt:  # another answer to the same prompt
            if self._last_leg in self.first_legs:
                self._wait(request, self._last_leg)
                return
            if not self._last_leg:
                self._send_whole(request, self._last_rank)
                return
        if not self.routes.begins_with_prefill(request):
            self._send_whole(request)
            return
        first = prefill_leg(request)
        rank = self.routes.choose_prefill(first)
        try:
            self._send_to(rank, first)
        except EngineError:  # it has just ended
            if self._fails:
                raise
            self._send_whole(request)
            return
        self._last_prompt, self._last_rank, self._last_leg = request.prompt_token_ids, rank, first.request_id
        self.first_legs.add(first.request_id, FirstLeg(rank, None if request.output_token_ids else request.request_id))
        self._wait(request, first.request_id)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests. A first leg ends with the last request that waits for it."""
        ended: list[str] = []
        for request_id in request_ids:
            leg = self.first_legs.of(request_id)
            if leg is None or request_id in leg.sent:
                self.second_legs.forget(request_id)  # the decode engine ends the lease
                ended.append(request_id)
            if (leg_id := self.first_legs.leave(request_id)) is not None:
                ended.append(leg_id)
        super().abort(ended)

    def _admit(self, rank: int) -> None:
        super()._admit(rank)
        for other in self._serving:
            self._introduce(rank, other)
            self._introduce(other, rank)

    def _watch(self, rank: int) -> None:
        super()._watch(rank)
        if rank in self._prefills and self.clients[rank].silent_seconds > self._pull_timeout:
            self._wait_no_more(rank)

    def _wait_no_more(self, rank: int) -> None:
        """A prefill engine gives no sign of life: its blocks do not come either. Decode engines that wait for first tokens draw them."""
        legs = self.first_legs.fetched_from(rank)
        if legs:
            logger.warning("prefill engine %d is silent: decode engines go on with %d prompts by themselves", rank, len(legs))
        super().abort(legs)
        for leg_id in legs:
            if leg_id in self.first_legs:
                self._continue(leg_id, None)

    def _introduce(self, first: int, second: int) -> None:
        """If the first is a prefill engine and the second a decode engine, have this connect to it now, and not with the first request."""
        if first not in self._prefills or second in self._prefills:
            return
        if (address := self.clients[first].prefill_address) is not None:
            with contextlib.suppress(EngineError):  # it has just ended
                self.clients[second].meet(address)

    # Legs

    def _wait(self, request: EngineCoreRequest, leg_id: str) -> None:
        leg = self.first_legs.wait(request, leg_id)
        if leg.params is not None:
            self._send_early(leg_id, leg.params)

    def _leave_all(self, request_ids: Iterable[str]) -> None:
        """Requests have ended, or have all blocks of their prompts. First legs without such requests end too."""
        found = [leg_id for request_id in request_ids if (leg_id := self.first_legs.leave(request_id)) is not None]
        if found:
            super().abort(found)

    def _send_whole(self, request: EngineCoreRequest, wanted: int | None = None) -> None:
        """Send a request to the engine that computes it whole: to `wanted`, if it would be admitted there at once."""
        rank = self.routes.choose_whole(request, wanted if wanted is not None and self.balancer.has_seat(wanted) else None)
        self._last_prompt, self._last_rank, self._last_leg = request.prompt_token_ids, rank, ""
        self._send_to(rank, request)

    def _continue(self, leg_id: str, params: dict[str, Any] | None, first_token_ids: Sequence[int] = ()) -> None:
        """A first leg has ended: send all that wait for it to one decode engine. params: what it left there; None: nothing.
        first_token_ids: what it drew."""
        leg = self.first_legs[leg_id]
        while leg.sent:  # a refusal ends all answers to the prompt, by `abort`
            request_id = next(iter(leg.sent))
            second = self.first_legs.take(request_id)
            self._note_move(leg, second)
            if second.awaits_first_token:
                self.second_legs.note_begun(second, first_token_ids)
                self._tell_first(leg, request_id, first_token_ids)
        while leg.waiting:
            request_id = next(iter(leg.waiting))
            own_token_ids = first_token_ids if request_id == leg.drawn_for else ()
            second = decode_leg(self.first_legs.take(request_id), params, own_token_ids)
            self.second_legs.note_begun(second, own_token_ids)
            if self._send_second(leg, second):
                self._note_move(leg, second)
        self.first_legs.end(leg_id)

    def _tell_first(self, leg: FirstLeg, request_id: str, first_token_ids: Sequence[int]) -> None:
        """Let a request run at its decode engine that waits for its first token."""
        assert leg.decode_rank is not None
        try:
            self.clients[leg.decode_rank].continue_request(request_id, first_token_ids)
        except EngineDeadError:
            return  # its requests are about to end
        except EngineError as error:
            super().abort([request_id])
            self._refuse(request_id, error)

    def _send_early(self, leg_id: str, params: dict[str, Any]) -> None:
        """A first leg computes, and what is computed can be fetched: send all that wait for it."""
        leg = self.first_legs[leg_id]
        leg.params = params
        while leg.waiting:  # as above
            request_id = next(iter(leg.waiting))
            second = decode_leg(leg.waiting.pop(request_id), params, awaits_first_token=request_id == leg.drawn_for)
            leg.sent[request_id] = second
            self._send_second(leg, second)

    def _send_second(self, leg: FirstLeg, second: EngineCoreRequest) -> bool:
        """Send a request to the decode engine of its first leg, or refuse it. Returns whether it was sent."""
        self.second_legs.note_sent(second, leg.rank)
        try:
            leg.decode_rank = self.routes.choose_decode(second, leg.rank, leg.decode_rank)
            self._send_to(leg.decode_rank, second)
        except JaxLLMError as error:
            self._refuse(second.request_id, error)
            return False
        return True

    def _note_move(self, leg: FirstLeg, second: EngineCoreRequest) -> None:
        """A request counts at its decode engine from now on."""
        if self._listener is not None and leg.decode_rank is not None:
            self._listener.take_move(second.request_id, leg.decode_rank, second.options.kv_transfer)

    def _pass_on(self, leg_id: str, output: EngineCoreOutput) -> None:
        """Pass the token that a first leg drew on to the caller of its request, with the end of the request if it is the last."""
        leg = self.first_legs[leg_id]
        request_id = leg.drawn_for
        if request_id is None or not (request_id in leg.waiting or request_id in leg.sent):
            return  # it has ended
        told = msgspec.structs.replace(output, request_id=request_id, kv_transfer_params=None)
        if output.finish_reason is FinishReason.LENGTH:  # see `prefill_leg`
            told.finish_reason, told.num_preemptions = None, 0
        else:
            if request_id in leg.sent:
                self.second_legs.forget(request_id)  # the decode engine ends the lease
                super().abort([request_id])
            self.first_legs.leave(request_id)
        if self._listener is not None:
            self._listener.take_outputs([told])

    def _run_again(self, request: EngineCoreRequest) -> None:
        """Have another decode engine continue a request, of which the caller has the first token."""
        request_id = request.request_id
        try:
            self.add(request)
        except JaxLLMError as error:
            self._refuse(request_id, error)
            return
        if self._listener is not None and (rank := self.replica_of(request_id)) is not None:
            self._listener.take_move(request_id, rank, None)

    def _end_waiting(self, leg_id: str, output: EngineCoreOutput) -> None:
        """A first leg has ended, and with it all that wait for it."""
        ids = self._drop_leg(leg_id)
        if self._listener is not None:
            end = (output.finish_reason, output.stop_reason)
            self._listener.take_outputs([EngineCoreOutput(each, [], *end, error_kind=output.error_kind) for each in ids])

    def _drop_leg(self, leg_id: str) -> list[str]:
        """Forget a first leg. Returns the requests that wait for it."""
        leg = self.first_legs.drop(leg_id)
        ids = [*leg.waiting, *leg.sent]
        for request_id in ids:
            self.second_legs.forget(request_id)  # decode engines end the lease
        super().abort([*leg.sent])
        return ids

    def _end_leases(self, request_ids: Collection[str]) -> None:
        """Second legs have ended, perhaps before they fetched their blocks."""
        for request_id in request_ids:
            if (found := self.second_legs.take_lease(request_id)) is not None:
                self._send_end_of_lease(*found)

    # What engines report

    def _take_outputs(self, rank: int, message: Outputs) -> None:
        told = {each.request_id: leg for each in message.outputs if (leg := self.first_legs.of(each.request_id)) is not None}
        for request_id, leg in told.items():  # drawn before its first leg is over
            self._note_move(leg, leg.sent[request_id])
        for output in message.outputs:
            self.second_legs.forget(output.request_id)
            is_late = output.request_id not in self.first_legs  # it was aborted meanwhile
            if is_late and (transfer := read_kv_transfer(output.kv_transfer_params)) is not None:
                self._send_end_of_lease(rank, transfer)
        ended = [each for each in message.outputs if each.finish_reason is not None and each.request_id in self.first_legs]
        early = [each for each in message.outputs if each.finish_reason is None and each.request_id in self.first_legs]
        super()._take_outputs(rank, message)  # listeners have no request with the id of a first leg
        self._leave_all(told)
        for output in early:
            if output.request_id in self.first_legs and output.kv_transfer_params is not None:
                self._send_early(output.request_id, output.kv_transfer_params)
        for output in ended:
            if output.request_id not in self.first_legs:
                continue
            is_error = output.finish_reason is FinishReason.ERROR
            is_end = output.finish_reason is FinishReason.ABORT or output.error_kind in _ENDS_REQUEST
            if is_end or (is_error and self._fails):
                self._end_waiting(output.request_id, output)
                continue
            if is_error:
                logger.warning("prefill failed, a decode engine computes the prompt: %s", output.stop_reason)
                self._continue(output.request_id, None)
                continue
            self._pass_on(output.request_id, output)
            if output.request_id in self.first_legs:
                self._continue(output.request_id, output.kv_transfer_params, output.new_token_ids)
            elif (transfer := read_kv_transfer(output.kv_transfer_params)) is not None:  # all has ended with that token
                self._send_end_of_lease(rank, transfer)

    def _take_refusal(self, rank: int, message: Refused) -> None:
        if message.request_id not in self.first_legs:
            super()._take_refusal(rank, message)
            return
        self.balancer.ended(message.request_id)
        self._let_go(rank)
        error = messages.error_of(message.fault)
        if self._fails:
            for request_id in self._drop_leg(message.request_id):
                self._refuse(request_id, error)
            return
        logger.warning("prefill was refused, a decode engine computes the prompt: %s", error)
        self._continue(message.request_id, None)

    def _refuse(self, request_id: str, error: JaxLLMError) -> None:
        self._end_leases([request_id])
        self.second_legs.forget(request_id)
        self._leave_all([request_id])
        super()._refuse(request_id, error)

    def _fail(self, error: EngineError, ids: Collection[str]) -> None:
        self._end_leases(ids)
        may_retry = isinstance(error, ReplicaLostError) and error.may_retry
        begun = self.second_legs.take_begun(ids)
        again = begun if may_retry else {}
        legs = [request_id for request_id in ids if request_id in self.first_legs]
        ended = [request_id for request_id in ids if request_id not in self.first_legs and request_id not in again]
        if self._fails:
            ended += [request_id for leg_id in legs for request_id in self._drop_leg(leg_id)]
            legs = []
        self._leave_all(ended)
        super()._fail(error, ended)
        legs = [leg_id for leg_id in legs if leg_id in self.first_legs]
        if legs:
            logger.warning("prefill of %d prompts failed, decode engines compute them: %s", len(legs), error)
        for leg_id in legs:
            self._continue(leg_id, None)
        for request in again.values():
            self._run_again(request)
