"""Which requests wait for prompts that prefill engines compute, or fetch blocks of them."""

from dataclasses import dataclass, field
from typing import Any

from jaxllm.request import EngineCoreRequest


@dataclass
class FirstLeg:
    """A prompt that a prefill engine computes."""

    rank: int
    drawn_for: str | None = None
    """The request whose first token it draws. Another answer to the prompt, and one that has its first token, takes its blocks alone."""
    waiting: dict[str, EngineCoreRequest] = field(default_factory=dict)
    """The requests that continue from it, by id: the answers to one prompt."""
    sent: dict[str, EngineCoreRequest] = field(default_factory=dict)
    """Second legs that fetch blocks while this one computes more."""
    params: dict[str, Any] | None = None
    """The `kv_transfer_params` of its early output."""
    decode_rank: int | None = None
    """Where second legs were sent."""


class FirstLegs:
    """First legs by their own id, which no caller knows, and the one of each request that needs one."""

    def __init__(self) -> None:
        self._legs: dict[str, FirstLeg] = {}
        self._leg_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._legs) + len(self._leg_of)

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._legs

    def __getitem__(self, leg_id: str) -> FirstLeg:
        return self._legs[leg_id]

    def add(self, leg_id: str, leg: FirstLeg) -> None:
        """A prefill engine has been sent a prompt."""
        self._legs[leg_id] = leg

    def wait(self, request: EngineCoreRequest, leg_id: str) -> FirstLeg:
        """A request waits for a first leg, which is returned."""
        leg = self._legs[leg_id]
        leg.waiting[request.request_id] = request
        self._leg_of[request.request_id] = leg_id
        return leg

    def of(self, request_id: str) -> FirstLeg | None:
        """The leg that a request waits for, or fetches blocks of."""
        return self._legs.get(self._leg_of.get(request_id, ""))

    def fetched_from(self, rank: int) -> list[str]:
        """The ids of a prefill engine's legs whose blocks are being fetched."""
        return [leg_id for leg_id, leg in self._legs.items() if leg.rank == rank and leg.sent]

    def take(self, request_id: str) -> EngineCoreRequest:
        """A request needs its first leg no more, which stays. Returns it as it waited or was sent."""
        leg = self._legs[self._leg_of.pop(request_id)]
        places = leg.waiting if request_id in leg.waiting else leg.sent
        return places.pop(request_id)

    def leave(self, request_id: str) -> str | None:
        """A request, if it needs a first leg, does so no more. Returns the id of the leg, which is forgotten, if none does."""
        leg_id = self._leg_of.get(request_id)
        if leg_id is None:
            return None
        leg = self._legs[leg_id]
        self.take(request_id)
        if leg.waiting or leg.sent:
            return None
        del self._legs[leg_id]
        return leg_id

    def drop(self, leg_id: str) -> FirstLeg:
        """Forget a leg, and that requests need it. Returns it."""
        leg = self._legs.pop(leg_id)
        for request_id in (*leg.waiting, *leg.sent):
            del self._leg_of[request_id]
        return leg

    def end(self, leg_id: str) -> None:
        """Forget a leg that no request needs, if it is known."""
        self._legs.pop(leg_id, None)
