"""Contents of blocks in files: they outlive the engine, and engines with equal fingerprints that have one directory share them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.disk.folder import open_root
from jaxllm.kv_tiers.disk.store import DiskStore
from jaxllm.log import logger

__all__ = ["make", "open_root"]


def make(config: EngineConfig, root: Path, copies: Any, describe: Callable[[], dict[str, Any]]) -> DiskStore:
    """The store that an engine's options ask for. copies: a `BlockCopier`. root, describe: see DiskStore. Raises ConfigError."""
    size = config.cache.kv_offloading_disk_size
    assert size is not None
    max_bytes = int(size * 2**30)
    store = DiskStore(root, max_bytes, copies.arena, describe, copies.wake)
    if max_bytes < (least := 2 * copies.max_blocks * store.content_bytes):
        store.close()
        raise ConfigError(
            f"kv_offloading_disk_size is {max_bytes / 2**30:.3g} GiB, too little for what is written at a time; give {least / 2**30:.3g} "
            "or more"
        )
    logger.info("disk: up to %.1f GiB in %s", max_bytes / 2**30, root)
    return store
