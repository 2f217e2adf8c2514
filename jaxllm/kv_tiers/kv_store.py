"""The interface of user-defined stores behind host memory, e.g. an object store: a class that kv_transfer_config names."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxllm.vllm_compat.kv_connectors import KVTransferConfig


@dataclass(frozen=True)
class StoreContext:
    """Facts about the engine that makes a store."""

    config: KVTransferConfig
    """The kv_transfer_config; what is meant for the store is its kv_connector_extra_config."""
    content_bytes: int
    """Length of every content of this engine, and of every other with the same model."""


class KVStore(ABC):
    """Keeps contents by key: the keys and values of a block of tokens, and of all tokens before it. Derive from it.

    A key is a text of a-z, 0-9 and -, of at most 128 characters, that stands for the tokens, the model, its weights and the layout of the
    cache. Engines that use the same key have the same content, and may share a store. A content may be lost at any time; one that was
    changed is noticed, and computed again.

    `find` is called by the thread that plans steps, so it answers from memory, at once. All other methods are called by threads,
    several at a time. An exception is a failure of that call alone; after several in a row the store is left alone for a minute.
    """

    num_threads = 4
    """Threads that call `read`, and as many for the other methods than `find`; more where calls do not return in 10 seconds."""

    def __init__(self, context: StoreContext):
        self.context = context

    @abstractmethod
    def find(self, keys: Sequence[str]) -> Collection[str]:
        """The keys among these whose content can probably be read."""

    @abstractmethod
    def read(self, key: str, content: memoryview) -> bool:
        """Write a content to this memory, which the store may use until it returns. False: it is not there."""

    @abstractmethod
    def write(self, key: str, content: memoryview) -> None:
        """Keep a content. The store may use this memory until it returns."""

    @abstractmethod
    def discard(self, keys: Sequence[str]) -> None:
        """Drop contents that are wrong."""

    def clear(self) -> None:  # noqa: B027
        """Drop everything, also of other engines: an operator asked for it."""

    def close(self) -> None:  # noqa: B027
        """The engine ends."""
