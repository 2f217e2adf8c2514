"""Runs real clients, unchanged, against a running server, each in a virtual environment of its own (their requirements disagree).

jaxllm serve demo --port 8000 &
python scripts/check_clients.py --url http://127.0.0.1:8000 [--only openai anthropic] [--environments DIR]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
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
HERE = Path(__file__).parent


def main() -> int:
    """Run the clients. Returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="demo", help="name of the model there")
    parser.add_argument("--api-key", default="unused", help="key of the server")
    parser.add_argument("--only", nargs="+", choices=sorted(CLIENTS), help="these clients only")
    parser.add_argument("--environments", type=Path, help="directory of the virtual environments; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = arguments.environments or Path(temporary)
        failed = [name for name in arguments.only or CLIENTS if not _run(name, home, arguments)]
    print(f"{len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return len(failed)


def _run(name: str, home: Path, arguments: argparse.Namespace) -> bool:
    python = home / name / "bin" / "python"
    if not python.exists():
        venv.create(home / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *CLIENTS[name]], check=True)
    environment = {
        **os.environ,
        "URL": arguments.url.rstrip("/"),
        "MODEL": arguments.model,
        "KEY": arguments.api_key,
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a price list
    }
    start = time.perf_counter()
    program = HERE / "clients" / f"{name.removesuffix('-1').replace('-', '_')}_client.py"
    done = subprocess.run([python, program], env=environment, capture_output=True, text=True, timeout=600)
    print(
        f"{name:<12}{'ok' if done.returncode == 0 else 'FAILED'} in {time.perf_counter() - start:.1f} s  {done.stdout.strip()}"
    )
    if done.returncode:
        print(done.stderr[-4000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
