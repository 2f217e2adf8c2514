"""Which adapters there are: those that requests may name, and those that are being added. Does not import JAX."""

import itertools
from collections import OrderedDict

from jaxllm.adapters import AdapterState, check_name
from jaxllm.errors import AdapterNotFoundError, InvalidRequestError
from jaxllm.lora.adapter import Adapter
from jaxllm.lora.host_memory import Reading

_MAX_OUTCOMES = 1000
"""Adapters whose outcome is remembered, for those who still ask."""


class Registry:
    """Adapters by name. Each addition is a separate adapter, with a number."""

    def __init__(self) -> None:
        self.named: dict[str, Adapter] = {}
        """Adapters that requests may name."""
        self.new: dict[str, Adapter] = {}
        """Adapters that are read for the first time."""
        self._numbers = itertools.count(1)
        self._outcomes: OrderedDict[int, str] = OrderedDict()
        """Why an adapter that is no longer new cannot be named, by its number; empty: it could be."""

    def find(self, name: str, param: str) -> Adapter:
        """The adapter of a name. Raises AdapterNotFoundError, which names the parameter."""
        adapter = self.named.get(name)
        if adapter is None:
            raise AdapterNotFoundError(f"there is no adapter {name!r}; add it first", param)
        return adapter

    def begin(self, name: str, path: str, *, replace: bool) -> Adapter:
        """Add an adapter that is to be read; one that is being added from the same path is returned again.

        Raises InvalidRequestError if there is another of this name and it is not to be replaced.
        """
        check_name(name, "name")
        pending = self.new.get(name)
        if not replace and name in self.named:
            raise InvalidRequestError(f"adapter {name!r} is loaded already; remove it first, or replace it", "name")
        if not replace and pending is not None:
            if pending.path == path:
                return pending  # several API servers add what they are asked for at the same time
            raise InvalidRequestError(f"adapter {name!r} is being loaded from {pending.path}; replace it, or wait", "name")
        if pending is not None:
            self.give_up(name, "was replaced before it was loaded")
        adapter = self.new[name] = Adapter(next(self._numbers), name, path)
        return adapter

    def finish(self, adapter: Adapter, reading: Reading | None, error: str) -> Adapter | None:
        """Let requests name an adapter that was read for the first time, or note the error. Returns the adapter that it replaces."""
        del self.new[adapter.name]
        self._note(adapter, error)
        if reading is None:
            return None
        adapter.rank, adapter.directory, adapter.files = reading.rank, reading.directory, reading.files
        before = self.named.get(adapter.name)
        self.named[adapter.name] = adapter
        return before

    def give_up(self, name: str, reason: str) -> None:
        """Drop an adapter that is being read for the first time."""
        adapter = self.new.pop(name)
        adapter.is_retired = True
        self._note(adapter, f"adapter {name!r} {reason}")

    def state(self, number: int) -> AdapterState:
        """See ControlCalls.adapter_state."""
        if any(adapter.number == number for adapter in self.new.values()):
            return AdapterState("loading")
        if number not in self._outcomes:
            raise InvalidRequestError(f"no adapter was added with the number {number!r}", "number")
        error = self._outcomes[number]
        return AdapterState("failed", error) if error else AdapterState("ready")

    def _note(self, adapter: Adapter, error: str) -> None:
        self._outcomes[adapter.number] = error
        if len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)
