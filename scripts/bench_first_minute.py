"""Times `jaxllm generate` from the start of the process to its first text, with cold and warm caches: python scripts/bench_first_minute.py

Cold: an empty cache of compiled programs. Warm: the one that the run before left. Python's own bytecode is compiled in both.
Parts are read off the engine's log. `--help` is timed too. The start of an engine alone, part by part: bench_start.py.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

COMMAND = "import sys; from jaxllm.cli.main import main; sys.exit(main(sys.argv[1:]))"


def time_run(cache: str, arguments: list[str]) -> dict[str, float]:
    """Seconds of one run, in all and by part."""
    environment = {**os.environ, "JAXLLM_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        command = [sys.executable, "-c", COMMAND, "generate", "--max-tokens", "32", "-v", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
        code = process.wait()
        total = time.perf_counter() - start
        log.seek(0)
        text = log.read()
    if code != 0:
        raise SystemExit(f"generate failed with {code}:\n{text}")
    times = {"first text": first, "whole process": total}
    if match := re.search(r"engine ready in ([\d.]+) s", text):
        times["engine"] = float(match[1])
    times["waiting for programs"] = sum(map(float, re.findall(r"waited ([\d.]+) s for ProgramKey", text)))
    times["imports and the rest"] = first - times.get("engine", 0.0) - times["waiting for programs"]
    return times


def time_help() -> float:
    """Seconds of `jaxllm generate --help`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", COMMAND, "generate", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="further arguments of generate")
    args = parser.parse_intermixed_args()
    for _ in range(args.repeats):
        print(f"--help: {time_help():.2f} s", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                times = time_run(cache, args.arguments)
                print(f"{state}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()), flush=True)


if __name__ == "__main__":
    main()
