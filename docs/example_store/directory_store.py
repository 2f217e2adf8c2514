"""An example of a store: keeps contents in a directory, which engines with the same directory share.

PYTHONPATH=docs/example_store jaxllm serve MODEL --config store.yaml, with this in store.yaml:

kv-offloading-size: 16
kv-transfer-config:
  kv_connector: DirectoryStore
  kv_connector_module_path: directory_store
  kv_role: kv_both
  kv_connector_extra_config: {directory: /mnt/contents}

It deletes nothing but contents that are wrong. Whoever can write to the directory decides what models answer.
"""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxllm.kv_tiers.kv_store import KVStore, StoreContext


class DirectoryStore(KVStore):
    """A file for each content, with the key as its name."""

    num_threads = 8

    def __init__(self, context: StoreContext):
        """Raises KeyError or OSError, with which the engine does not start."""
        super().__init__(context)
        self.directory = Path(context.config.kv_connector_extra_config["directory"])
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keys: set[str] = set()
        self._refresh()
        threading.Thread(target=self._refresh_for_ever, daemon=True).start()

    def _refresh(self) -> None:
        """Find what other engines have written."""
        self._keys = set(os.listdir(self.directory))

    def _refresh_for_ever(self) -> None:
        while True:
            time.sleep(self.context.config.kv_connector_extra_config.get("refresh_seconds", 5))
            with contextlib.suppress(OSError):
                self._refresh()

    def find(self, keys: Sequence[str]) -> Collection[str]:
        return self._keys.intersection(keys)

    def read(self, key: str, content: memoryview) -> bool:
        try:
            with open(self.directory / key, "rb") as file:
                return file.readinto(content) == len(content)
        except FileNotFoundError:
            return False

    def write(self, key: str, content: memoryview) -> None:
        if key in self._keys:
            return
        new = self.directory / f"{key}.{os.getpid()}-{threading.get_ident()}.new"
        new.write_bytes(content)
        new.replace(self.directory / key)  # readers see the whole file, or none
        self._keys.add(key)

    def discard(self, keys: Sequence[str]) -> None:
        self._keys = self._keys.difference(keys)
        for key in keys:
            (self.directory / key).unlink(missing_ok=True)

    def clear(self) -> None:
        self.discard(os.listdir(self.directory))
