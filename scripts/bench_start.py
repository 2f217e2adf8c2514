"""Times an engine from the start of its process to its first token and to its last program, with the parts that the time goes into.

    python scripts/bench_start.py [MODEL] [--cases cold,warm,…] [--json FILE] [--directory DIR] [engine options as name=value …]

Each case is a fresh process: it makes an `LLM`, asks it for one token, twice, and waits for the programs that follow in the background.
"ms a token" is of one request, while programs follow (if any do for that long) and when all are ready. The cases:

cold      an empty cache directory
warm      the cache that `cold` left: stored programs
compile   `jaxllm compile` with that cache
artifact  from what `compile` wrote, with an empty cache, as on another machine
xla       stored programs removed, XLA's own cache and autotuning results kept: what a changed option or a new version costs (GPU)
restored  the stored programs that `xla` left, which XLA had read from its cache before they were stored
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.measuring.command_line import engine_option

CASES = ("cold", "warm", "compile", "artifact", "xla", "restored")
TIMED_TOKENS = 64
COMMAND = "import sys; from jaxllm.cli.main import main; sys.exit(main(sys.argv[1:]))"


def measure(options: dict[str, Any], warm_up_runs: int | None) -> None:
    """In the measured process: print the times of one start, as JSON."""
    from jaxllm import LLM, SamplingParams
    from jaxllm.start_times import process_age_seconds

    if warm_up_runs is not None:
        from jaxllm.runner import warm_up

        warm_up.WARM_UP_RUNS = warm_up_runs
    llm = LLM(**options)
    ready = process_age_seconds()
    engine, core = llm.llm_engine, llm.llm_engine.core
    programs, shapes = core.runner.programs, core.runner.shapes

    def ask(num_tokens: int) -> tuple[float, int]:
        """Seconds of a request for so many tokens, and the first of them."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": list(range(1, 33))}], params, use_tqdm=False)
        return time.perf_counter() - start, outputs[0].outputs[0].token_ids[0]

    def token_milliseconds() -> float:
        return 1e3 * (ask(1 + TIMED_TOKENS)[0] - ask(1)[0]) / TIMED_TOKENS

    num_ready = len(programs)
    seconds, tokens = zip(ask(1), ask(1), strict=True)
    slow = token_milliseconds() if programs.num_queued else None
    found = {
        "ready": ready,
        "first token": None if ready is None else ready + seconds[0],
        "first request": seconds[0],
        "second request": seconds[1],
        "parts": dict(core.start_times.seconds),
        "programs when ready": num_ready,
        "work bytes": core.runner.work_bytes(),
        "blocks": core.memory_plan.num_blocks,
        "token": tokens[0],
    }
    print(json.dumps(found), flush=True)
    if core.config.compile.warmup == "background":
        while programs.num_queued and not all(key in programs for key in shapes.start_keys()):
            time.sleep(0.05)
        print(json.dumps({"common programs": process_age_seconds()}), flush=True)
    engine.finish_compiling()  # so that the next case finds all stored
    found = {
        "all programs": process_age_seconds(),
        "compiled": programs.num_compiled,
        "loaded": programs.num_loaded,
        "late": core.num_compiled_after_warmup,
    }
    print(json.dumps(found), flush=True)
    milliseconds = {"ms a token while programs follow": slow, "ms a token": token_milliseconds()}
    print(json.dumps({name: value for name, value in milliseconds.items() if value is not None}), flush=True)
    engine.shutdown()


def run_case(case: str, options: dict[str, Any], directory: Path, seconds: float, warm_up_runs: int | None) -> dict[str, Any]:
    """Run one case in a separate process."""
    caches = {"artifact": directory / "other machine"}
    cache, artifact = caches.get(case, directory / "cache"), directory / "artifact"
    environment = {**os.environ, "JAXLLM_CACHE_DIR": str(cache)}
    if case == "xla":
        shutil.rmtree(cache / "engines", ignore_errors=True)
    if case == "compile":
        flags = [
            f"--{name.replace('_', '-')}={_as_flag(value)}" for name, value in options.items() if not isinstance(value, bool)
        ]
        flags += [
            f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in options.items() if isinstance(value, bool)
        ]
        command = [sys.executable, "-c", COMMAND, "compile", "-q", "--output", str(artifact), *flags]
    else:
        if case == "artifact":
            options = {**options, "compiled_artifact": str(artifact)}
        command = [sys.executable, __file__, "--measure", json.dumps(options)]
        command += [] if warm_up_runs is None or case != "cold" else ["--warm-up-runs", str(warm_up_runs)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done after {seconds:.0f} s: {_end(error.stderr)}", **_numbers(error.stdout)}
    whole = {"whole process": time.perf_counter() - start}
    if done.returncode != 0:
        return {"error": _end(done.stderr), **whole, **_numbers(done.stdout)}
    if case == "compile":
        return {**whole, "said": done.stdout.strip()}
    return {**whole, **_numbers(done.stdout)}


def _as_flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _numbers(text: str | bytes | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in _text(text).splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def _end(text: str | bytes | None) -> str:
    return _text(text)[-2000:]


def _text(text: str | bytes | None) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text or ""


def describe(case: str, found: dict[str, Any]) -> str:
    """A line with the sums, and one with the parts."""
    sums = [
        f"{name} {value:.2f}{'' if name.startswith('ms') else ' s'}"
        for name, value in found.items()
        if isinstance(value, float)
    ]
    sums += [f"{name} {value}" for name, value in found.items() if isinstance(value, int)]
    lines = [f"{case:<9} {', '.join(sums)}"]
    if "parts" in found:
        lines.append("          " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["parts"].items()))
    lines += [f"          {name}: {found[name]}" for name in ("said", "error") if name in found]
    return "\n".join(lines)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: the figures to compare, in seconds of the process and milliseconds."""
    columns = {
        "first token, s": "first token",
        "programs then": "programs when ready",
        "common programs, s": "common programs",
        "all programs, s": "all programs",
        "compiled": "compiled",
        "loaded": "loaded",
        "waited for": "late",
        "ms a token meanwhile": "ms a token while programs follow",
        "ms a token": "ms a token",
    }

    def cell(value: Any) -> str:
        return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    rows = [
        [case, *(cell(found.get(name)) for name in columns.values())] for case, found in results.items() if "token" in found
    ]
    lines = [["case", *columns], ["---"] * (1 + len(columns)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run the asked cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--cases", default="cold,warm,compile,artifact", help=f"of {', '.join(CASES)}, in this order")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="what is not done by then is left out")
    parser.add_argument(
        "--warm-up-runs", type=int, help="runs of each program in the case cold, instead of the engine's own number"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keep what the cases store there, in its folder cache")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", type=engine_option, help="engine options, name=value")
    args = parser.parse_intermixed_args()
    if args.measure:
        measure(json.loads(args.measure), args.warm_up_runs)
        return
    options = {"model": args.model, "use_progress_bar": False, **dict(args.options)}
    end, results = time.monotonic() + args.limit, {}
    print("times since the process began; parts overlap, and those of threads add up", flush=True)
    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for case in args.cases.split(","):
            left = end - time.monotonic()
            if left < 5:
                print(f"{case:<9} left out: the time is over", flush=True)
                continue
            results[case] = run_case(case, options, directory, left, args.warm_up_runs)
            print(describe(case, results[case]), flush=True)
    print(
        f"\n{args.model} {' '.join(f'{name}={value}' for name, value in args.options)}, {os.cpu_count()} cores\n\n{table(results)}"
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if len({found["token"] for found in results.values() if "token" in found}) > 1:
        sys.exit("the cases gave different tokens")


if __name__ == "__main__":
    main()
