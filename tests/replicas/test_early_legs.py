"""Second legs that are sent while their first leg computes, over clients that record what they send."""

from dataclasses import replace
from typing import Any

import pytest

from jaxllm.engine.messages import Failed, Load, Outputs
from jaxllm.errors import EngineDeadError, OverloadedError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, FinishReason
from tests.replicas.test_prefill_decode import Fleet, request_of, with_fleet
from tests.routing.test_balancer import stats
from tests.test_kv_transfer import PULLED, TO_DECODE


def tell_early(fleet: Fleet, request_id: str = "a-prefill") -> None:
    """The first prefill engine tells where it stores the blocks that it computes."""
    fleet.tell_early(0, request_id)


def answer(fleet: Fleet, request_id: str = "a", reason: FinishReason | None = None) -> None:
    """The first decode engine gives a token."""
    load = Load(stats(), received={"client-0-x": len(fleet.clients[2].sent)})
    fleet.clients[2].on_outputs(Outputs([EngineCoreOutput(request_id, [7], reason)], load))  # type: ignore[attr-defined]


def test_a_second_leg_begins_while_the_first_computes() -> None:
    async def test(fleet: Fleet) -> None:
        request = request_of("a")
        fleet.core.add(request)
        assert fleet.clients[0].sent[0].options.kv_transfer.tells_early  # type: ignore[union-attr]
        tell_early(fleet)
        options = replace(request.options, kv_transfer=PULLED)
        assert fleet.clients[2].sent == [replace(request, options=options, awaits_first_token=True)]
        assert not fleet.listener.moves and fleet.core.core.replica_of("a") == 2
        fleet.end(0, "a-prefill", kv_transfer_params=TO_DECODE)
        assert fleet.told() == [("a", [5], None)] and fleet.listener.moves == [("a", 2, PULLED)]
        assert fleet.ids(2) == ["a"] and fleet.clients[2].continued == [("a", [5])], "it is not sent twice"
        answer(fleet)
        answer(fleet, reason=FinishReason.STOP)
        assert len(fleet.listener.outputs) == 3 and fleet.is_idle()
        assert not any(client.aborted or client.ended_leases for client in fleet.clients)

    with_fleet(test)


def test_answers_to_one_prompt_go_to_one_decode_engine_early() -> None:
    async def test(fleet: Fleet) -> None:
        requests = [request_of(name) for name in "abc"]
        fleet.core.add(requests[0])
        fleet.core.add(requests[1])
        tell_early(fleet)
        fleet.core.add(requests[2])
        assert fleet.ids(2) == ["a", "b", "c"] and len(fleet.clients[0].sent) == 1
        fleet.core.abort(["a"])
        answer(fleet, "b", FinishReason.STOP)
        assert not fleet.clients[0].aborted, "one answer needs it"
        fleet.core.abort(["c"])
        assert fleet.clients[0].aborted == ["a-prefill"] and fleet.clients[2].aborted == ["a", "c"] and fleet.is_idle()
        tell_early(fleet)
        assert fleet.clients[0].ended_leases == [PULLED], "it was told too late"

    with_fleet(test)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("cause", ["error", "step", "lost"])
def test_a_first_leg_that_fails_behind_its_second(cause: str, policy: Any) -> None:
    """The second leg learns from the lease that no more blocks come; with the policy fail the error is the request's."""

    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        tell_early(fleet)
        if cause == "error":
            fleet.end(0, "a-prefill", FinishReason.ERROR, stop_reason="NaN", error_kind=ErrorKind.NOT_FINITE)
        elif cause == "step":
            fleet.clients[0].on_failed(Failed("a step failed"))  # type: ignore[attr-defined]
        else:
            fleet.clients[0].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        assert not fleet.core.first_legs
        if policy == "recompute":
            assert not fleet.clients[2].aborted and not fleet.listener.failures and not fleet.listener.outputs
            answer(fleet, reason=FinishReason.STOP)
            assert len(fleet.listener.outputs) == 1
        else:
            assert fleet.clients[2].aborted == ["a"]
            ended = [output.request_id for output in fleet.listener.outputs] + [
                name for _, ids in fleet.listener.failures for name in ids
            ]
            assert ended == ["a"]
        assert fleet.is_idle()

    with_fleet(test, load_failure_policy=policy)


@pytest.mark.parametrize("cause", ["refused", "lost", "computed here", "aborted"])
def test_a_first_leg_ends_with_its_second(cause: str) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.core.add(request_of("a"))
        if cause == "computed here":  # an answer whose first token is drawn there
            fleet.core.add(request_of("b", seed=8))
            fleet.core.abort(["a"])
        if cause == "refused":
            for client in fleet.clients[2:]:
                client.refuses = OverloadedError("full", 1)
        tell_early(fleet)
        if cause == "lost":
            fleet.clients[2].on_dead(EngineDeadError("killed"))  # type: ignore[attr-defined]
        elif cause == "computed here":
            answer(fleet, "b")
            answer(fleet, "b", FinishReason.STOP)
        elif cause == "aborted":
            fleet.core.abort(["a"])
        assert fleet.clients[0].aborted == ["a-prefill"] and fleet.is_idle()
        assert len(fleet.clients[0].ended_leases) == (cause in ("refused", "lost"))
        assert bool(fleet.listener.refusals) == (cause == "refused")
        assert bool(fleet.listener.failures) == (cause == "lost")

    with_fleet(test)
