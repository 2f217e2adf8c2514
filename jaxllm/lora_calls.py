"""Adapters of an API server: loads them into the engine core, and knows those that LoRARequests have named."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.batches import one_each
from jaxllm.config import EngineConfig
from jaxllm.errors import AdapterError, ConfigError, InvalidRequestError, ModelLoadError
from jaxllm.files import read_json
from jaxllm.hub import is_hub_id, resolve_model
from jaxllm.lora_request import LoRARequest
from jaxllm.options.lora import RANKS

T = TypeVar("T")

POLL_SECONDS = 0.005
"""Interval between questions whether an adapter is loaded."""
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter that are downloaded from the hub."""


class Loras:
    """The adapters of one API server."""

    def __init__(
        self,
        config: EngineConfig,
        call: Callable[..., Awaitable[Any]],
        run: Callable[..., Awaitable[Any]],
        sleep: Callable[[float], Awaitable[None]],
    ):
        """call: runs a control call of the core; run: runs a function that reads files; sleep: waits."""
        self._config, self._call, self._run, self._sleep = config, call, run, sleep
        self._used: dict[str, LoRARequest] = {}
        """By name."""

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter from a local directory or the hub. Raises InvalidRequestError or AdapterError."""
        self._check_enabled()
        directory = await self._run(adapter_directory, path, self._config.model.download_dir)
        await self._load(name, directory, replace)

    async def _load(self, name: str, directory: str, replace: bool) -> None:
        number = await self._call("add_adapter", name, directory, replace)
        while True:
            found: AdapterState = await self._call("adapter_state", number)
            if found.state == "failed":
                raise AdapterError(found.error)
            if found.state == "ready":
                return
            await self._sleep(POLL_SECONDS)

    async def use(self, request: Any) -> str | None:
        """Load the adapter of a LoRARequest unless it is loaded. Returns its name; None for None."""
        if request is None:
            return None
        if request != self._used.get(getattr(request, "lora_name", "")) or request.load_inplace:
            await self.add(request)
        return str(request.lora_name)

    async def use_each(self, requests: Any, count: int) -> list[str | None]:
        """The names of one LoRARequest for `count` prompts, or of one each."""
        given = one_each(requests, count, "lora_request")
        names = {id(each): await self.use(each) for each in {id(each): each for each in given}.values()}
        return [names[id(each)] for each in given]

    async def add(self, request: Any) -> bool:
        """Load an adapter. Returns False if it was loaded already. Raises InvalidRequestError or AdapterError."""
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError(f"lora_request is a {type(request).__name__}, must be a LoRARequest", "lora_request")
        self._check_enabled()
        name, number = request.lora_name, request.lora_int_id
        owner = self._name_of(number)
        if owner not in (None, name):
            raise InvalidRequestError(f"lora_int_id {number} is of adapter {owner!r}; give {name!r} another", "lora_request")
        directory = await self._run(adapter_directory, request.lora_path, self._config.model.download_dir)
        before = await self._directory_of(name)
        is_new = before is None or request.load_inplace
        if is_new:
            try:
                await self._load(name, directory, request.load_inplace)
            except InvalidRequestError:
                before = await self._directory_of(name)  # another task or API server may have been faster
                if before is None:
                    raise
                is_new = False
        if not is_new and before != directory:
            raise InvalidRequestError(
                f"adapter {name!r} is loaded from {before}, not from {directory}; remove it first, or set load_inplace",
                "lora_request",
            )
        self._used[name] = request
        return is_new

    async def remove(self, which: int | str) -> bool:
        """Refuse new requests for an adapter, by id or name. Returns False if there is none."""
        self._check_enabled()
        name = which if isinstance(which, str) else self._name_of(which)
        if name is None:
            return False
        self._used.pop(name, None)
        return bool(await self._call("remove_adapter", name))

    async def pin(self, which: int | str) -> bool:
        """Keep an adapter on the device, by id or name. Returns True. Raises InvalidRequestError."""
        self._check_enabled()
        name = which if isinstance(which, str) else self._name_of(which)
        if name is None:
            raise InvalidRequestError(f"no adapter has lora_int_id {which}; add it first", "lora_id")
        await self._call("pin_adapter", name)
        return True

    async def ids(self) -> set[int]:
        """The ids of the LoRARequests whose adapters are loaded."""
        loaded = {info.name for info in await self._infos()}
        return {request.lora_int_id for name, request in self._used.items() if name in loaded}

    def _name_of(self, number: int) -> str | None:
        return next((name for name, request in self._used.items() if request.lora_int_id == number), None)

    async def _directory_of(self, name: str) -> str | None:
        return next((info.path for info in await self._infos() if info.name == name), None)

    async def _infos(self) -> Sequence[AdapterInfo]:
        return await self._call("list_adapters")  # type: ignore[no-any-return]

    def _check_enabled(self) -> None:
        if not self._config.lora.enable_lora:
            raise InvalidRequestError(
                "the engine serves no adapters; start it with enable_lora=True (--enable-lora)", "lora_request"
            )


class LoraCalls:
    """Methods for adapters, by the names of vLLM; AsyncLLM's are awaited.

    All that change something raise InvalidRequestError without enable_lora.
    """

    loras: Loras

    def _lora_call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return run_now(work)

    def add_lora(self, lora_request: LoRARequest) -> Any:
        """Load an adapter before requests need it. Returns False if it was loaded already. Raises AdapterError."""
        return self._lora_call(self.loras.add(lora_request))

    def remove_lora(self, lora_id: int | str) -> Any:
        """Drop an adapter, by id or name, when the requests that run have ended. Returns False if there is none."""
        return self._lora_call(self.loras.remove(lora_id))

    def pin_lora(self, lora_id: int | str) -> Any:
        """Keep an adapter on the device, by id or name. Returns True."""
        return self._lora_call(self.loras.pin(lora_id))

    def list_loras(self) -> Any:
        """The ids of the loaded adapters that this engine's LoRARequests have named; `list_adapters` has all."""
        return self._lora_call(self.loras.ids())

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> Any:
        """Load an adapter by its name alone, from a local directory or the hub. Raises AdapterError, or InvalidRequestError if
        there is one of this name and it is not to be replaced."""
        return self._lora_call(self.loras.load(name, path, replace=replace))


class AsyncLoraCalls(LoraCalls):
    """`LoraCalls` whose results are awaited."""

    def _lora_call(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return work


def loras_in_this_thread(config: EngineConfig, call: Callable[..., Any]) -> Loras:
    """Make `Loras` whose coroutines never wait for an event loop: for `run_now`."""

    async def call_now(name: str, *arguments: Any) -> Any:
        return call(name, *arguments)

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def sleep(seconds: float) -> None:
        time.sleep(seconds)

    return Loras(config, call_now, run, sleep)


def loras_in_a_loop(config: EngineConfig, call: Callable[..., Awaitable[Any]]) -> Loras:
    """For coroutines in an event loop."""
    return Loras(config, call, asyncio.to_thread, asyncio.sleep)


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for no event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("a coroutine waits for an event loop")


def adapter_directory(path: str, download_dir: str | None = None) -> str:
    """The real path of an adapter's directory; one of the hub is downloaded, or found in the hub's cache. Raises AdapterError."""
    local = Path(path).expanduser()
    if local.is_dir():
        return os.path.realpath(local)
    if local.is_file():
        raise AdapterError(f"{path} is a file; give the directory that holds adapter_config.json")
    if not is_hub_id(path):
        raise AdapterError(f"{path!r} is neither a directory nor a hub id (owner/name); check its spelling")
    try:
        return os.path.realpath(resolve_model(path, None, download_dir, files=FILES))
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error


def largest_rank(directory: str) -> int:
    """The largest rank in an adapter's config; 1 if it is not to be had, of which the engine tells more."""
    try:
        config: Any = read_json(str(Path(directory) / "adapter_config.json"))
    except ConfigError:
        return 1
    config = config if isinstance(config, dict) else {}
    of_modules: Any = config.get("rank_pattern")
    ranks: Iterable[Any] = [config.get("r"), *(of_modules.values() if isinstance(of_modules, dict) else ())]
    return max((rank for rank in ranks if type(rank) is int and 1 <= rank <= RANKS[-1]), default=1)
