"""Calls of a user-defined store, as tasks of threads (`Workers`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxllm.kv_tiers.transfers import PendingTransfer

if TYPE_CHECKING:
    from jaxllm.kv_tiers.own.own_store import OwnStore

DIGEST_BYTES = 32
"""Length of the key's digest, at the beginning of a content."""


class StoreCall(ABC):
    """A call of the store, see `Workers`."""

    has_returned = False

    def prepare(self, buffer: memoryview) -> None:  # noqa: B027
        """Do nothing."""

    @abstractmethod
    def call(self, buffer: memoryview) -> None:
        """Call the store's method."""

    def run(self, buffer: memoryview) -> None:
        try:
            self.call(buffer)
        except SystemExit as error:  # it would end the thread
            raise RuntimeError(f"SystemExit: {error}") from error
        finally:
            self.has_returned = True

    def complete(self) -> None:  # noqa: B027
        """Do nothing."""


@dataclass(eq=False)
class ContentCall(StoreCall):
    """One content of a transfer."""

    what: ClassVar[str]
    store: "OwnStore"
    transfer: PendingTransfer
    index: int
    key: str
    slot: int
    is_right: bool = True
    """Whether it was copied, if nothing failed."""

    def end(self, error: Exception | None, seconds: float) -> None:
        self.store.end_content(self, error, seconds)


class Read(ContentCall):
    what = "read"

    def prepare(self, buffer: memoryview) -> None:
        buffer[:DIGEST_BYTES] = bytes(DIGEST_BYTES)

    def call(self, buffer: memoryview) -> None:
        self.is_right, self._content = self.store.read_content(self.key, buffer), buffer

    def complete(self) -> None:
        if self.is_right:
            self.store.fill_slot(self.slot, self._content)


class Write(ContentCall):
    what = "write"

    def prepare(self, buffer: memoryview) -> None:
        self.store.copy_slot(self.slot, self.key, buffer)

    def call(self, buffer: memoryview) -> None:
        self.is_right = self.store.write_content(self.key, buffer)


@dataclass(eq=False)
class OtherCall(StoreCall):
    """A call without a content."""

    store: "OwnStore"
    what: str
    method: Callable[[], Any]
    is_over: bool = False

    def call(self, buffer: memoryview) -> None:
        self.method()

    def end(self, error: Exception | None, seconds: float) -> None:
        self.is_over = True
        if error is not None:
            self.store.note_failure(self.what, error, is_hanging=not self.has_returned)
