"""LoRA adapters that requests may name: those of --lora-modules, of --lora-dir, and those that routes load."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxllm.adapters import AdapterInfo, check_name
from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.errors import AdapterError, ConfigError, EngineError, InvalidRequestError
from jaxllm.log import logger, safe
from server.errors import bad_request
from server.options import AdapterOptions

REFRESH_SECONDS = 1.0
"""Age at which the known names are fetched again: another API server may have dropped one."""
_MODULE_KEYS = {"name", "path", "base_model_name", "is_3d_lora_weight"}


@dataclass(frozen=True)
class LoraModule:
    """An entry of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


def read_module(text: str) -> LoraModule:
    """Parse NAME=PATH or a JSON object with name and path. Raises ConfigError."""
    name, equals, path = text.partition("=")
    base = None
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {text!r} is not JSON: {error}") from None
        if unknown := sorted(fields.keys() - _MODULE_KEYS):
            raise ConfigError(f"lora_modules: {text!r} has the key {unknown[0]!r}; name, path and base_model_name are known")
        name, path, base = fields.get("name"), fields.get("path"), fields.get("base_model_name")
        if not isinstance(path, str) or not path or not isinstance(base, str | None):
            raise ConfigError(f"lora_modules: {text!r} must have texts as name and path, and as base_model_name if it is given")
    elif not equals or not path:
        raise ConfigError(f"lora_modules: {text!r} must be NAME=PATH or a JSON object with name and path")
    try:
        check_name(name, "name")
    except InvalidRequestError as error:
        raise ConfigError(f"lora_modules: {text!r}: {error}") from None
    return LoraModule(name, path, base)


def check_adapter_options(options: AdapterOptions, config: EngineConfig, model_names: Sequence[str]) -> list[LoraModule]:
    """The modules to load at the start. Raises ConfigError for options that contradict each other or the engine's."""
    if not config.lora.enable_lora:
        for name in ("lora_modules", "lora_dir", "allow_runtime_lora_updating"):
            if getattr(options, name):
                raise ConfigError(f"{name} needs --enable-lora beside it")
    modules = [read_module(text) for text in options.lora_modules or ()]
    names = [module.name for module in modules]
    for name in names:
        if name in model_names:
            raise ConfigError(f"lora_modules: {name!r} is the name of the model; give the adapter another one")
        if names.count(name) > 1:
            raise ConfigError(f"lora_modules: two adapters have the name {name!r}")
    if options.lora_dir is not None and not os.path.isdir(options.lora_dir):
        raise ConfigError(f"lora_dir is {options.lora_dir!r}, must be a directory")
    return modules


class ServedAdapters:
    """The adapters of one application. Raises ConfigError as `check_adapter_options` does."""

    def __init__(self, engine: AsyncLLM, options: AdapterOptions, model_names: Sequence[str]):
        self._engine, self._model_names = engine, model_names
        self._modules = check_adapter_options(options, engine.config, model_names)
        self._parents = {module.name: module.base_model_name for module in self._modules}
        self._root = None if options.lora_dir is None else os.path.realpath(options.lora_dir)
        self._is_enabled = engine.config.lora.enable_lora
        self._names: set[str] = set()
        """Names of loaded adapters, as of `_listed_at`, on the monotonic clock."""
        self._listed_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        """Adapters of the directory that requests wait for."""

    async def load_modules(self) -> None:
        """Load the adapters of the options that are not loaded yet. Raises AdapterError."""
        for module in self._modules:
            await self._load_unless_loaded(module.name, module.path)

    async def has(self, name: str) -> bool:
        """Whether requests may name an adapter. If this process does not know it, asks the engine, then the directory.

        Raises AdapterError if the directory has it and it cannot be loaded.
        """
        if not self._is_enabled:
            return False
        if name in self._names:
            self._refresh_if_old()
            return True
        await self.infos()
        if name in self._names:
            return True
        directory = None if self._root is None else await asyncio.to_thread(self._in_root, name)
        if directory is None:
            return False
        try:
            await self._load_once(name, directory)
        except AdapterError as error:
            raise AdapterError(str(error).replace(directory, name)) from error  # clients need not know where it is
        return True

    async def infos(self) -> list[AdapterInfo]:
        """The loaded adapters, by name."""
        if not self._is_enabled:
            return []
        infos = await self._engine.list_adapters()
        self._names, self._listed_at = {info.name for info in infos}, time.monotonic()
        return sorted(infos, key=lambda info: info.name)

    def parent_of(self, name: str) -> str:
        """The name of the model that an adapter changes."""
        return self._parents.get(name) or self._model_names[0]

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter for an operator. Raises ApiError, InvalidRequestError or AdapterError."""
        check_name(name, "lora_name")
        if name in self._model_names:
            raise bad_request(f"lora_name is {name!r}, the name of the model; choose another", "lora_name")
        if not replace and name in {info.name for info in await self.infos()}:
            raise bad_request(
                f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
                "to True.",
                "lora_name",
            )
        if self._root is not None:
            directory = await asyncio.to_thread(self._below_root, path)
            if directory is None:
                raise bad_request(f"lora_path {path[:200]!r} is not a directory below --lora-dir", "lora_path")
            path = directory
        await self._engine.load_adapter(name, path, replace=replace)
        self._names.add(name)

    async def unload(self, name: str) -> bool:
        """Drop an adapter. Returns False if there is none of this name."""
        self._names.discard(name)
        return bool(await self._engine.remove_adapter(name))

    def _refresh_if_old(self) -> None:
        if time.monotonic() - self._listed_at < REFRESH_SECONDS or self._refreshing is not None:
            return

        async def refresh() -> None:
            with contextlib.suppress(EngineError):
                await self.infos()
            self._refreshing = None

        self._refreshing = asyncio.create_task(refresh())

    async def _load_once(self, name: str, directory: str) -> None:
        """Load an adapter that several requests may want at once; it is loaded even if all of them are cancelled."""
        if name not in self._loading:
            task = self._loading[name] = asyncio.create_task(self._load_unless_loaded(name, directory))
            task.add_done_callback(lambda task: self._loaded(name, task))
        await asyncio.shield(self._loading[name])

    def _loaded(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._loading[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("adapter %s cannot be loaded: %s", safe(name, 100), safe(str(error), 500))

    async def _load_unless_loaded(self, name: str, path: str) -> None:
        if name in {info.name for info in await self.infos()}:
            return
        try:
            await self._engine.load_adapter(name, path)
        except InvalidRequestError:
            if name not in {info.name for info in await self.infos()}:  # another API server was not faster either
                raise
        self._names.add(name)

    def _in_root(self, name: str) -> str | None:
        """The directory of an adapter in --lora-dir; None if there is none of this name."""
        if not name.isprintable() or name.startswith(".") or {"/", "\\"} & set(name):
            return None
        directory = self._below_root(name)
        return directory if directory and os.path.isfile(os.path.join(directory, "adapter_config.json")) else None

    def _below_root(self, path: str) -> str | None:
        """The real path of a directory below --lora-dir; None for another, also one that a link or .. leads out to."""
        assert self._root is not None
        if "\0" in path:
            return None
        real = os.path.realpath(os.path.join(self._root, path))
        return real if real.startswith(self._root + os.sep) and os.path.isdir(real) else None


def some_of(names: Iterable[str], count: int = 20) -> str:
    """The first names, quoted, for messages."""
    all_names = list(names)
    more = f" and {len(all_names) - count} more" if len(all_names) > count else ""
    return ", ".join(map(repr, all_names[:count])) + more
