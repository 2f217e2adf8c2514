"""Runs real clients, unchanged, against a server, each in a separate virtual environment (their requirements disagree).

python scripts/check_clients.py [--only openai anthropic] [--environments DIR]    # starts `jaxllm serve demo` and ends it
python scripts/check_clients.py --url http://127.0.0.1:8000 --model NAME          # of a server that runs
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CLIENTS = {
    "openai": ["openai>=3"],
    "openai-1": ["openai>=1.100,<2"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
    "lm-eval": ["lm-eval[api]", "transformers"],
    "vllm-bench": ["aiohttp"],
}
"""Name to requirements; the program is clients/<name>.py (`openai-1` runs that of openai)."""
HERE = Path(__file__).resolve().parent
MAX_START_SECONDS, MAX_INSTALL_SECONDS, MAX_CLIENT_SECONDS = 120, 300, 300
SERVE = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
FEW_PROGRAMS = [
    "--max-num-seqs=8",
    "--decode-buckets=8",
    "--max-num-batched-tokens=256",
    "--token-buckets=256",
    "--warmup=lazy",
]
"""Most of the time would be spent compiling."""


def main() -> int:
    """Run the clients. Returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, without /v1; default: start one of the demo model")
    parser.add_argument("--model", default="demo", help="name of the model there")
    parser.add_argument("--api-key", default="unused", help="key of the server")
    parser.add_argument("--only", nargs="+", choices=sorted(CLIENTS), help="these clients only")
    parser.add_argument("--environments", type=Path, help="directory of the virtual environments; default: a temporary one")
    arguments = parser.parse_args()
    names = arguments.only or list(CLIENTS)
    with contextlib.ExitStack() as stack:
        home = arguments.environments or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with ThreadPoolExecutor(2) as pool:
            faults = dict(zip(names, pool.map(lambda name: _install(name, home), names), strict=True))
        for name, fault in faults.items():
            if fault:
                print(f"{name:<12}FAILED: {' '.join(CLIENTS[name])} cannot be installed: {fault}")
        runnable = [name for name in names if not faults[name]]
        failed = [name for name in names if faults[name]]
        if runnable:
            url = (arguments.url or stack.enter_context(_served())).rstrip("/")
            failed += [name for name in runnable if not _run(name, home, url, arguments.model, arguments.api_key)]
    print(f"{len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return len(failed)


@contextlib.contextmanager
def _served() -> Iterator[str]:
    """The URL of a server of the demo model, until the block ends."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", "demo", "--host", "127.0.0.1", "--port", "0", *FEW_PROGRAMS],
            cwd=HERE.parent,
            stdout=log,
            stderr=log,
        )
        try:
            latest = time.monotonic() + MAX_START_SECONDS
            while True:
                is_over = process.poll() is not None or time.monotonic() > latest
                log.seek(0)
                said = log.read()
                if found := re.search(r"served at (http://\S+)/v1", said):
                    break
                if is_over:
                    raise SystemExit(f"the server did not start:\n{said[-4000:]}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _install(name: str, home: Path) -> str | None:
    """Create a client's environment if it is missing. Returns the error."""
    python = home / name / "bin" / "python"
    if python.exists():
        return None
    venv.create(home / name, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile", *CLIENTS[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        fault = f"it took more than {MAX_INSTALL_SECONDS} s"
    else:
        fault = done.stderr.strip()[-1000:] if done.returncode else ""
    if fault:
        python.unlink()  # so that the next run tries again
    return fault or None


def _run(name: str, home: Path, url: str, model: str, api_key: str) -> bool:
    environment = {
        **os.environ,
        "URL": url,
        "MODEL": model,
        "KEY": api_key,
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would download a price list
    }
    start = time.perf_counter()
    program = HERE / "clients" / f"{name.removesuffix('-1').replace('-', '_')}_client.py"
    command = [home / name / "bin" / "python", program]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{name:<12}FAILED: it took more than {MAX_CLIENT_SECONDS} s")
        return False
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"{name:<12}{verdict} in {time.perf_counter() - start:.1f} s  {done.stdout.strip()}", flush=True)
    if done.returncode:
        print(done.stderr[-4000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
