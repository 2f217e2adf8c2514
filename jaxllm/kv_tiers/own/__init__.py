"""A user-defined store behind host memory: the class that kv_transfer_config names."""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.kv_store import KVStore
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig

if TYPE_CHECKING:
    from jaxllm.kv_tiers.own.own_store import OwnStore


def load_class(config: KVTransferConfig) -> type[KVStore]:
    """The class, whose module this imports. Raises ConfigError if there is none, or it is no store."""
    module, name = config.kv_connector_module_path, config.kv_connector
    assert module is not None and name is not None
    what = f"kv_connector {name!r} of the module {module!r}"
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module raises
        raise ConfigError(
            f"{what} cannot be imported: {type(error).__name__}: {error}; install the module, or put its directory into PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, KVStore)):
        raise ConfigError(
            f"{what} is no class derived from jaxllm.kv_tiers.kv_store.KVStore; docs/KV_OFFLOADING.md has an example"
        )
    if inspect.isabstract(found):
        raise ConfigError(f"{what} lacks {', '.join(sorted(found.__abstractmethods__))}; define what KVStore asks for")
    if not isinstance(found.num_threads, int) or not 1 <= found.num_threads <= 256:
        raise ConfigError(f"{what} has {found.num_threads!r} as num_threads, must be 1 to 256")
    return found


def make(config: KVTransferConfig, copies: Any, describe: Callable[[], dict[str, Any]]) -> "OwnStore":
    """The store of an engine. copies: a `BlockCopier`. describe: see OwnStore. Raises ConfigError."""
    from jaxllm.kv_tiers.own.own_store import OwnStore

    return OwnStore(load_class(config), config, copies.arena, describe, copies.wake)
