"""Options of a request other than its parameters: when, where and for whom it is computed."""

from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.kv_transfer import KVTransfer

_MAX_SALT_LENGTH, _NOT_IN_SALT = 128, frozenset("@/\\\0")
_MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0
_MAX_NUMBER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The fields of a request that callers set and what computes it reads; all between pass them on whole."""

    priority: int = 0
    """Under the scheduling policy "priority", lower is sooner."""
    cache_salt: str | None = None
    """Cached prefixes are shared only with requests of the same salt."""
    queue_timeout_seconds: float | None = None
    """The request ends with an error if it is not admitted within this many seconds after it was added."""
    timeout_seconds: float | None = None
    """The request ends with an error if it is not finished within this many seconds after it was added."""
    adapter: str | None = None
    """Name of the loaded adapter that computes it; None: the model alone."""
    data_parallel_rank: int | None = None
    """The replica that computes it; None: the balancer chooses one."""
    session_id: str | None = None
    """Requests of one session go to one replica as long as it takes them at once."""
    client: str = ""
    """The client that sent it, as the scheduling policy "fair" distinguishes clients."""
    kv_transfer: KVTransfer | None = None
    """Where blocks of its prompt come from, and for whom they are kept; None: this engine computes and uses them alone."""
    max_load_tokens: int | None = None
    """Most tokens that tiers behind the devices' cache load of it; None: as many as they have."""
    max_offload_tokens: int | None = None
    """Number of first tokens whose blocks tiers store when the request computes them; None: all."""

    def check(self) -> None:
        """Raise InvalidRequestError for a value that no engine takes."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority is {self.priority!r}, must be an integer", "priority")
        if not -(2**63) <= self.priority < 2**63:
            raise InvalidRequestError(f"priority is {self.priority}, must fit 64 bits", "priority")
        for name in ("queue_timeout_seconds", "timeout_seconds"):
            _check_timeout(name, getattr(self, name))
        for name in ("max_load_tokens", "max_offload_tokens"):
            _check_limit(name, getattr(self, name))
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)


NO_OPTIONS = RequestOptions()


OPTION_NAMES = tuple(field.name for field in fields(RequestOptions))


@dataclass(frozen=True)
class Placement:
    """Options that apply to all requests of a task, e.g. of one HTTP request. Set by the code that handles the task."""

    data_parallel_rank: int | None = None
    """The replica of requests that name none."""
    session_id: str | None = None
    """The session of requests that name none."""
    priority: int | None = None
    """Replaces the requests' own."""
    client: str = ""
    """The client that sent the requests."""

    def applied_to(self, options: RequestOptions) -> RequestOptions:
        """The options of a request of this task."""
        rank = options.data_parallel_rank
        return replace(
            options,
            priority=options.priority if self.priority is None else self.priority,
            data_parallel_rank=self.data_parallel_rank if rank is None else rank,
            session_id=options.session_id or self.session_id,
            client=self.client,
        )


_current: ContextVar[Placement | None] = ContextVar("placement", default=None)
set_placement, reset_placement = _current.set, _current.reset


def placement() -> Placement:
    """That of this task."""
    return _current.get() or Placement()


def _check_salt(salt: Any) -> None:
    """Raise InvalidRequestError unless a cache salt is a text that other tools take too."""
    if not isinstance(salt, str) or not salt:
        given = "empty" if isinstance(salt, str) else f"a {type(salt).__name__}"
        raise InvalidRequestError(f"cache_salt is {given}, must be a text that is not empty", "cache_salt")
    if len(salt) > _MAX_SALT_LENGTH:
        raise InvalidRequestError(f"cache_salt has {len(salt)} characters, may have {_MAX_SALT_LENGTH}", "cache_salt")
    if found := sorted(_NOT_IN_SALT & set(salt)):
        raise InvalidRequestError(
            f"cache_salt has the character {found[0]!r}, must not have '@', '/', '\\' or NUL", "cache_salt"
        )


def _check_timeout(name: str, seconds: Any) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise InvalidRequestError(
            f"{name} is {seconds!r}, must be seconds above 0 and at most {_MAX_TIMEOUT_SECONDS:.0f}", name
        )


def _check_limit(name: str, most: Any) -> None:
    if most is not None and (type(most) is not int or not 0 <= most <= _MAX_NUMBER):
        raise InvalidRequestError(f"{name} is {most!r}, must be an integer from 0 to {_MAX_NUMBER}", name)
