"""Compiles the step's programs: traces one after another, compiles several at once, and counts what is compiled too late."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Generic, TypeVar

import jax

from jaxllm.log import logger
from jaxllm.progress import SILENT, Progress

Key = TypeVar("Key")

_SLOW_SECONDS = 1.0


class Programs(Generic[Key]):
    """Compiled programs by key. `lower(key)` traces one; calling a compiled program can never compile another."""

    def __init__(self, lower: Callable[[Key], jax.stages.Lowered], *, threads: int):
        self._lower = lower
        self._threads = threads
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self.is_warm = False
        """Whether warm-up is over: from then on each compilation holds up requests, and is counted."""
        self.num_compiled_after_warmup = 0
        self.compile_seconds = 0.0
        self._told = False

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, key: Key) -> jax.stages.Compiled:
        """The program, compiled now if it is not yet."""
        program = self._compiled.get(key)
        if program is None:
            start = time.perf_counter()
            with self._told_if_slow():
                program = self._compiled[key] = self._lower(key).compile()
            seconds = time.perf_counter() - start
            self.compile_seconds += seconds
            if self.is_warm:
                self.num_compiled_after_warmup += 1
                logger.warning("compiled %s after warm-up (%.1f s): requests had to wait", key, seconds)
            else:
                logger.debug("compiled %s in %.1f s", key, seconds)
        return program

    @contextlib.contextmanager
    def _told_if_slow(self) -> Iterator[None]:
        """Say once why nothing happens, if a compilation takes its time. With a program from the cache it does not."""
        timer = threading.Timer(_SLOW_SECONDS, self._tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.info("compiling programs as they are needed for the first time; the next run starts sooner")

    def compile_all(self, keys: Sequence[Key], progress: Progress) -> None:
        """Compile what is missing of `keys`: tracing here, compiling in threads (XLA releases the interpreter)."""
        missing = [key for key in keys if key not in self._compiled]
        start = time.perf_counter()
        progress.start("compiling programs", total=len(missing), unit="program")
        with ThreadPoolExecutor(self._threads, thread_name_prefix="compile") as pool:
            futures = {pool.submit(self._lower(key).compile): key for key in missing}
            for future in as_completed(futures):
                self._compiled[futures[future]] = future.result()
                progress.advance(1)
        progress.finish()
        seconds = time.perf_counter() - start
        self.compile_seconds += seconds
        logger.debug("compiled %s together in %.1f s", ", ".join(map(str, missing)), seconds)

    def expect(self, keys: Sequence[Key]) -> None:
        """Before warm-up is over: compile these now, together, if the first of them has to be compiled anyway."""
        if keys[0] not in self._compiled and not self.is_warm:
            self.compile_all(keys, SILENT)


def use_persistent_cache(directory: Path) -> None:
    """Keep every compiled program in `directory`, however small and quick to compile."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
