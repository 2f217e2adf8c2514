"""Loads or compiles the step's programs: those needed at once in several threads, the others in the background."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import jax

from jaxllm import trusted_files
from jaxllm.at_exit import shut_down_at_exit
from jaxllm.cache_folders import keep_recent, tell_not_kept
from jaxllm.collector import no_collections
from jaxllm.env import cache_bytes
from jaxllm.errors import ConfigError
from jaxllm.log import logger
from jaxllm.progress import SILENT, Progress
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.start_times import StartTimes

Key = TypeVar("Key")
StoreKey = TypeVar("StoreKey", contravariant=True)

_SLOW_SECONDS = 1.0
_MOST_LATER = 2
"""Most programs made at the same time that no step waits for, and one more for requests that wait: XLA times products with arrays of
their size, in memory that the largest step and `tuning_bytes` have next to the cache."""
_QUIET_SECONDS = 1.0
"""Background compilation waits until no program was called for this many seconds, because tracing holds the interpreter."""


class Store(Protocol[StoreKey]):
    """Persistent storage for compiled programs."""

    def load(self, key: StoreKey) -> CompiledProgram | None: ...
    def save(self, key: StoreKey, program: CompiledProgram) -> None: ...


class ProgramPool(Generic[Key]):
    """Compiled programs by key. `lower(key)` traces one; calling a compiled program never compiles another.

    Threads make the programs passed to `start`: each is loaded, or traced (one at a time, because tracing holds the
    interpreter) and compiled (in parallel, because XLA releases it). After those that are needed at once come few at a time
    those that requests wait for and those for later, and then, while no program is called, one by one the rare ones. A caller that
    needs a program that is not started yet makes it itself instead of waiting for the queue.
    """

    def __init__(
        self,
        lower: Callable[[Key], Lowered],
        *,
        threads: int,
        compiler_options: Callable[[Key], dict[str, str | bool]] = lambda key: {},
        store: Store[Key] | None = None,
        is_storable: Callable[[Key], bool] = lambda key: True,
        times: StartTimes | None = None,
    ):
        self._lower = lower
        self._compiler_options = compiler_options
        self._threads = threads
        self._store = store
        self._is_storable = is_storable
        self._times = times or StartTimes()
        self._compiled: dict[Key, CompiledProgram] = {}
        self._lock = threading.Lock()
        self._queue: dict[Key, None] = {}
        """Programs that no thread has started, in order; as the next three."""
        self._wanted: dict[Key, None] = {}
        self._later: dict[Key, None] = {}
        self._rare: dict[Key, None] = {}
        self._begins_later = False
        """Whether programs for later may be begun: concurrently with those that a start waits for, they would only delay it."""
        self._num_later = 0
        """Number of programs that are being made, wanted ones or for later."""
        self._jobs: dict[Key, Future[CompiledProgram]] = {}
        """Programs that are queued or being made."""
        self._awaited: set[Key] = set()
        """Programs that were missing when the callers that wait now started to wait."""
        self._workers: list[threading.Thread] = []
        self._rare_worker: threading.Thread | None = None
        self._tracing = threading.Lock()
        self._stop = threading.Event()
        self._is_left = False
        self._last_use = 0.0
        self.is_warm = False
        """Whether warm-up is over. From then on, compilations that a request waits for are counted."""
        self.num_compiled_after_warmup = 0
        self.num_compiled = 0
        self.num_loaded = 0
        self._num_waiting = 0
        """Number of callers that wait for a program now."""
        self._num_compiling = 0
        self._told: set[bool] = set()
        self.on_made: Callable[[Key], None] = lambda key: None
        """Called by the thread that made a program."""
        shut_down_at_exit(self)

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: Key) -> bool:
        """Whether the program is ready."""
        return key in self._compiled

    def get(self, key: Key) -> CompiledProgram:
        """Return the program; make it now if it is missing."""
        self._last_use = time.monotonic()
        program = self._compiled.get(key)
        return self._wait_for(key) if program is None else program

    @property
    def num_queued(self) -> int:
        """Number of programs that are queued or being made."""
        return len(self._jobs)

    def start(self, keys: Sequence[Key], rare: Sequence[Key] = (), *, later: Sequence[Key] = ()) -> None:
        """Start threads that make `keys`, which are needed at once, then `later`, then `rare`, each in this order. Returns at once.

        Those for later, and rare ones behind them, are not begun before `begin_later` is called or somebody waits for one of them.
        """
        with self._lock:
            for queue, wanted in ((self._queue, keys), (self._later, later), (self._rare, rare)):
                for key in wanted:
                    if self._claim(key):
                        queue[key] = None
            self._start_workers()

    def begin_later(self) -> None:
        """Begin the programs for later. Returns at once."""
        with self._lock:
            self._begins_later = True
            self._start_workers()

    def hurry(self, keys: Sequence[Key]) -> None:
        """Start threads that make these before all that are for later or rare. Returns at once."""
        with self._lock:
            wanted = [key for key in keys if self._claim(key)]
            self._later = {**dict.fromkeys(wanted), **self._later}
            self._start_workers()

    def want(self, key: Key) -> "Future[CompiledProgram]":
        """Have a thread make this next, for a request that waits until the future is done. Returns at once."""
        with self._lock:
            if key in self._compiled:
                done: Future[CompiledProgram] = Future()
                done.set_result(self._compiled[key])
                return done
            if self._claim(key):
                self._wanted[key] = None
                self._start_workers()
            return self._jobs[key]

    def _claim(self, key: Key) -> bool:
        """Whether a program may be queued, with a job and in no other queue: it is not made, being made, needed at once or wanted."""
        if key in self._compiled:
            return False
        if key not in self._jobs:
            self._jobs[key] = Future()
            return True
        return self._take_back(key, (self._later, self._rare))

    @staticmethod
    def _take_back(key: Key, queues: Sequence[dict[Key, None]]) -> bool:
        """Remove a program from the queues. Whether it was in one."""
        return any(queue.pop(key, key) is None for queue in queues)

    def _start_workers(self) -> None:
        # One more thread than compiles in parallel: it traces meanwhile. Those that find nothing to do end.
        num_wanted = len(self._queue)
        if self._begins_later or not self._later:
            num_wanted += len(self._wanted) + min(len(self._later), _MOST_LATER) + bool(self._rare)
        for _ in range(min(num_wanted, self._threads + 1 - len(self._workers))):
            worker = threading.Thread(target=self._work, name="programs", daemon=True)
            self._workers.append(worker)
            worker.start()

    def wait(self, keys: Sequence[Key], progress: Progress = SILENT) -> None:
        """Wait until these programs, which were passed to `start`, are ready. Raises the first error."""
        with self._lock:
            jobs = [self._jobs[key] for key in keys if key in self._jobs]
            begins_later = any(key in self._later for key in keys)
        if begins_later:
            self.begin_later()
        progress.start("preparing programs", len(jobs), "program")
        for _ in as_completed(jobs):
            progress.advance(1)
        progress.finish()
        for key in keys:
            if key not in self._compiled:
                self._wait_for(key)  # retries a failed program, and raises its error

    def finish(self) -> None:
        """Wait until all programs that were passed to `start` or `hurry` are ready. Raises the first error."""
        with self._lock:
            keys = list(self._jobs)
        self.wait(keys)

    def listen(self, on_made: Callable[[], None]) -> None:
        """Call this from now on whenever a program was made, in the thread that made it."""
        self.on_made = lambda key: on_made()

    def compile_all(self, keys: Sequence[Key], progress: Progress) -> None:
        """Make the missing programs of `keys` in parallel, and wait for them."""
        missing = [key for key in keys if key not in self._compiled]
        self.start(missing)
        self.wait(missing, progress)

    def expect(self, needed: Sequence[Key], likely: Sequence[Key] = ()) -> None:
        """Before warm-up is over, make what is missing of `needed` in parallel, and if the first is missing, of `likely` too."""
        if self.is_warm or all(key in self._compiled for key in needed):
            return
        keys = [*needed, *(() if needed[0] in self._compiled else likely)]
        with self._told_if_slow(keys):
            self.compile_all(keys, SILENT)

    def shutdown(self) -> None:
        """Start no more programs and wait for those being made. May be called again."""
        self._stop.set()
        with self._lock:
            for key in (*self._queue, *self._wanted, *self._later, *self._rare):
                self._jobs.pop(key).cancel()
            self._queue.clear()
            self._wanted.clear()
            self._later.clear()
            self._rare.clear()
            workers = [] if self._is_left else list(self._workers)
        for worker in workers:
            worker.join()

    def leave(self) -> None:
        """Start no more programs. Neither this nor a later `shutdown` waits for those being made."""
        self._is_left = True
        self.shutdown()

    @property
    def awaited(self) -> tuple[int, int]:
        """Programs that callers wait for now: how many are ready, and the total. Safe to read from any thread."""
        with self._lock:
            return sum(key in self._compiled for key in self._awaited), len(self._awaited)

    # Making a program

    def _wait_for(self, key: Key) -> CompiledProgram:
        start = time.perf_counter()
        with self._told_if_slow([key]):
            with self._lock:
                if key in self._compiled:  # finished in the meantime
                    return self._compiled[key]
                job = self._jobs.get(key)
                mine = self._take_back(key, (self._queue, self._wanted, self._later, self._rare)) or job is None
                if job is None:
                    job = self._jobs[key] = Future()
            waited_for_compiler = self._make(key, job) if mine else True
            program = job.result()
        if self.is_warm and waited_for_compiler:
            self.num_compiled_after_warmup += 1
            logger.warning("compiled %s after warm-up: requests had to wait for %.1f s", key, time.perf_counter() - start)
        return program

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            key, job, is_later = taken
            self._make(key, job)
            with self._lock:
                self._num_later -= is_later
            if self.is_warm and (error := job.exception()) is not None:
                logger.warning(
                    "%s could not be compiled ahead of its use (%s): it is tried again when a request needs it", key, error
                )

    def _take(self) -> "tuple[Key, Future[CompiledProgram], bool] | None":
        """The next program for this thread to make, and whether it is for later; None if the thread is no longer needed."""
        me = threading.current_thread()
        while True:
            with self._lock:
                queue = self._queue
                if not queue and self._begins_later and self._num_later <= _MOST_LATER:  # one more, for a request that waits
                    queue = self._wanted
                if not queue and self._begins_later and self._num_later < _MOST_LATER:
                    queue = self._later
                if not queue and not self._wanted and not self._later and self._rare_worker in (None, me):
                    queue = self._rare
                if not queue or self._stop.is_set():
                    self._workers.remove(me)
                    if self._rare_worker is me:
                        self._rare_worker = None
                    return None
                if queue is self._rare:
                    self._rare_worker = me
                pause = self._pause() if queue is self._rare else 0.0
                if pause <= 0:
                    key = next(iter(queue))
                    del queue[key]
                    is_later = queue is self._wanted or queue is self._later
                    self._num_later += is_later
                    return key, self._jobs[key], is_later
            self._stop.wait(pause)

    def _pause(self) -> float:
        """Seconds until the engine may have been idle for long enough to compile in the background."""
        return _QUIET_SECONDS if self._num_waiting else self._last_use + _QUIET_SECONDS - time.monotonic()

    def _make(self, key: Key, job: "Future[CompiledProgram]") -> bool:
        """Make the program of a job taken from the queue. Returns whether it had to be compiled."""
        start = time.perf_counter()
        try:
            program = None
            if self._store is not None and self._is_storable(key):
                with self._times.part("loading programs"):
                    program = self._store.load(key)
            is_compiled = program is None
            if program is None:
                program = self._compile(key)
        except BaseException as error:
            with self._lock:
                self._jobs.pop(key, None)  # the next request for it retries
            job.set_exception(error)
            return True
        with self._lock:
            self._compiled[key] = program
            self._jobs.pop(key, None)
            self.num_compiled += is_compiled
            self.num_loaded += not is_compiled
        job.set_result(program)
        self.on_made(key)
        logger.debug("%s %s in %.1f s", "compiled" if is_compiled else "loaded", key, time.perf_counter() - start)
        if is_compiled and self._store is not None and self._is_storable(key):
            with self._times.part("storing programs"):
                self._store.save(key, program)
        return is_compiled

    def _compile(self, key: Key) -> CompiledProgram:
        with self._lock:
            self._num_compiling += 1
        try:
            with self._tracing, self._times.part("tracing"), no_collections():
                lowered = self._lower(key)
            with self._times.part("compiling"):
                program = lowered.compile(compiler_options=self._compiler_options(key))
        finally:
            with self._lock:
                self._num_compiling -= 1
        return program

    # Logging

    @contextlib.contextmanager
    def _told_if_slow(self, keys: Sequence[Key]) -> Iterator[None]:
        """Log once that programs are being loaded or compiled, if that takes long."""
        start = time.perf_counter()
        timer = threading.Timer(_SLOW_SECONDS, self._tell)
        timer.daemon = True
        timer.start()
        with self._lock:
            self._num_waiting += 1
            self._awaited.update(key for key in keys if key not in self._compiled)
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._awaited.clear()
            logger.debug("waited %.2f s for %s", time.perf_counter() - start, ", ".join(map(str, keys)))

    def _tell(self) -> None:
        is_compiling = self._num_compiling > 0
        if is_compiling not in self._told:
            self._told.add(is_compiling)
            sooner = "; the next run starts sooner" if is_compiling and self._store is not None else ""
            done = "compiling" if is_compiling else "loading"
            logger.info("%s programs as they are needed for the first time%s", done, sooner)


def use_persistent_cache(directory: Path) -> None:
    """Keep everything that XLA compiles in `directory`, however small or quick to compile, with its autotuning results.

    What was not used for longest is removed now, so that a process may exceed `cache_bytes` by what it compiles itself. Nothing is kept
    if another user could have written there: XLA runs what it reads.
    """
    max_bytes = cache_bytes()
    try:
        with trusted_files.open_directory(directory, make=True) as opened:
            directory = opened.path  # without links, which JAX would follow again
            if os.fstat(opened.descriptor).st_uid == os.geteuid():
                directory.chmod(0o700)  # XLA's files have the modes that the umask leaves
        for file in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may remove it
                trusted_files.check_owner(file, file.lstat())
        keep_recent(directory, max_bytes)
    except (OSError, ConfigError) as error:
        tell_not_kept(str(error))
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
