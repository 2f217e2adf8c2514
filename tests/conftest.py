"""Tests run on eight virtual CPU devices. JAX reads its variables when it is first imported, which is after this file."""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from jaxllm import log

# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Many processes start from the same files: each would compile a thousand modules where an environment keeps none of them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # where each operation was traced, which no test reads
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests compile much more than they compute, so LLVM optimises little, and gets fused operations straight from XLA, in one module
    # for a program: a third of the time. What XLA makes of a program before stays as it is, and so does what the real clients of
    # `.ci/run` meet. `XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0` compiles the tests' programs as for a user.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    flags_of = {  # a version aborts at a flag that it does not know
        "0.10": "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
        "0.11": "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    }
    os.environ.setdefault("XLA_FLAGS", flags_of.get(".".join(version("jaxlib").split(".")[:2]), ""))

COMPILED = "JAXLLM_TESTS_COMPILED"
"""The variable with the folder in which a run of the tests keeps what XLA compiles."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With `-n`, a process runs the tests of a file one after another, as they share fixtures, unless `--dist` says otherwise."""
    if config.getoption("numprocesses", None) and config.getoption("dist") == "no":
        config.option.dist = "loadfile"


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests side by side share the folder, and so do runs for which the variable is set before."""
    if os.environ["JAX_PLATFORMS"] == "cpu" and COMPILED not in os.environ:
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="jaxllm-tests-")
        config.add_cleanup(partial(shutil.rmtree, os.environ[COMPILED], ignore_errors=True))


# Modules and collected tests stay, so garbage collection need not walk them: a quarter of the time of collecting tests.
# Afterwards it runs seldom, as tracing makes many objects that stay: 4 % of the time of tests with engines.
gc.disable()


def use_cache_of_compiled_programs(jax: ModuleType) -> None:
    """Many tests need the same programs. Processes that tests start compile for themselves, as they do for a user."""
    if COMPILED not in os.environ:
        return
    from jax._src import compilation_cache as files
    from jax.experimental.compilation_cache import compilation_cache

    if hasattr(files, "zlib"):  # three times as fast, and files a quarter larger
        files.zlib = SimpleNamespace(compress=partial(zlib.compress, level=1), decompress=zlib.decompress)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", os.environ[COMPILED])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    compilation_cache.reset_cache()  # which remembers them


def reuse_contexts_of_modules() -> None:
    """A thread makes ten MLIR modules in one context, as JAX 0.11 does: making one takes 3 ms, a sixth of what a small program takes."""
    from jax._src.interpreters import mlir

    if hasattr(mlir, "_create_ir_context"):
        return
    make, used = mlir.make_ir_context, threading.local()

    def make_seldom():
        used.count = getattr(used, "count", -1) + 1
        if used.count % 10 == 0:
            used.context = make()
        return used.context

    mlir.make_ir_context = make_seldom


def check_attributes_of_modules_once() -> None:
    """Flax searches each attribute of each module twice for what may not be there, half the time of building a model. Here it does so
    once for each type of value that an attribute of a class gets."""
    from flax.nnx import Pytree

    check, seen = getattr(Pytree, "_check_value", None), set()
    if check is None:
        return

    def check_once(self, key, value, new_status):
        kind = type(self), key, type(value), new_status
        if kind not in seen:
            check(self, key, value, new_status)
            seen.add(kind)

    Pytree._check_value = check_once


def pytest_collection(session: pytest.Session) -> None:
    """Import the files from the last on in every second process that collects them. On a clean checkout each then compiles half of
    them and reads what the other has written: 4 s of CPU time less for either."""
    if not int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2:
        return
    given = [session.config.invocation_params.dir / argument.partition("::")[0] for argument in session.config.args]
    files = [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    for file in reversed(files):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    if jax := sys.modules.get("jax"):
        use_cache_of_compiled_programs(jax)
        reuse_contexts_of_modules()
    if "flax.nnx" in sys.modules:
        check_attributes_of_modules_once()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


# Searched inputs are the same in each run, however slow the machine is; `--hypothesis-profile default --hypothesis-seed 1` searches others.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
# Nor do they depend on constants in the source of what happens to be imported, which takes each process 2 to 4 s to read.
providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="module", autouse=True)
def _cache_of_compiled_programs() -> Iterator[None]:
    """A store of programs turns the cache off (see `ProgramStore`), and tests of it set another folder: until the end of their file."""
    yield
    if jax := sys.modules.get("jax"):
        use_cache_of_compiled_programs(jax)


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """Exclude objects that tests of other files left from collections, each of which would take a second or two late in a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _untouched_log() -> Iterator[None]:
    """Commands that run in the tests' process set up the log, which would hide its messages from `caplog` in later tests."""
    logger = log.logger
    before = logger.level, logger.propagate, list(logger.handlers)
    log.warn_once.cache_clear()
    log.info_once.cache_clear()
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]
