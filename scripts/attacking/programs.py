"""Stored programs under a directory that another user may write."""

from scripts.attacking.attack import Seen, attack
from scripts.attacking.target import Target, directory

_LOADS = 20_000
_SCRIPT = """
import logging, os, pickle, subprocess, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.errors import JaxLLMError

work, loads, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ran = work / "ran"

class Code:
    def __reduce__(self):
        return os.system, (f"echo >> {ran}",)

parent = work / "parent"
(parent / "store").mkdir(parents=True, mode=0o700)
key = ProgramKey("decode", 8)
store = ProgramStore(parent / "store", jax.devices()[:1], writable=True, strict=False)
store.save(key, jax.jit(lambda x: x + 1).lower(jnp.zeros(2)).compile())
[good] = (parent / "store").glob("*.program")
if kind == "link":  # a file that others may write, behind a link of one's own
    (work / "theirs").write_bytes(pickle.dumps(Code()))
    os.chmod(work / "theirs", 0o666)
    good.unlink()
    good.symlink_to(work / "theirs")
else:  # what another user would put there: a directory with a file of theirs, here one that everyone may write
    evil = parent / "evil"
    evil.mkdir(mode=0o700)
    (evil / good.name).write_bytes(pickle.dumps(Code()))
    os.chmod(evil / good.name, 0o666)
os.chmod(parent, 0o777)
swap = '''
import os, sys
os.chdir(sys.argv[1])
while True:
    os.rename("store", "aside")
    os.rename("evil", "store")
    os.rename("store", "evil")
    os.rename("aside", "store")
'''
swapper = subprocess.Popen([sys.executable, "-c", swap, str(parent)]) if kind == "swap" else None
logging.disable(logging.CRITICAL)
num_loaded = 0
try:
    for _ in range(loads):
        try:
            num_loaded += store.load(key) is not None
        except (JaxLLMError, OSError, ValueError):
            pass
finally:
    if swapper is not None:
        swapper.kill()
        swapper.wait()
print("loaded", num_loaded)
print("ran", len(ran.read_text().splitlines()) if ran.exists() else 0)
"""


def _judge(target: Target, seen: Seen, kind: str, loads: int) -> None:
    with directory() as work:
        output = target.python(_SCRIPT, str(work), str(loads), kind, timeout_seconds=300)
    last = (output.strip().splitlines() or [""])[-1]
    found = int(last.removeprefix("ran ")) if last.startswith("ran ") else None
    told = f"{found} of {loads}" if found is not None else last[:160]
    seen.that("code of another user ran", told, "0", found == 0)


@attack("medium", "the directory of stored programs is swapped while they are loaded")
def swapped_programs(target: Target, seen: Seen) -> None:
    _judge(target, seen, "swap", _LOADS)


@attack("medium", "a stored program is a link to a file that others may write")
def linked_program(target: Target, seen: Seen) -> None:
    _judge(target, seen, "link", 20)
