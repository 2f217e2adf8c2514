"""Checks on this machine's accelerator what the tests on a CPU cannot: the compiled kernels, alone and inside the engine.

python scripts/check_gpu.py                        everything, in about ten minutes on one H200; exit status 0 if all of it holds
python scripts/check_gpu.py --record               the same, and docs/verified/DEVICE.md says so (--record-to DIR: written there)
python scripts/check_gpu.py --parts kernels --ops attention
compute-sanitizer --tool memcheck python scripts/check_gpu.py --sanitize     small cases of each kernel (racecheck, synccheck too)
python scripts/check_gpu.py --tiny                 toy sizes with interpreted kernels, for a machine without a GPU

tokens           the demo model in float32: greedy and seeded tokens, those with penalties, logprobs and masks of decodes that are
                 sampled apart or not, and vectors, equal those with the reference attention
logits           Llama-3.1-8B's shapes in bfloat16, one layer and all, no further from float32 than plain XLA (a stated factor)
kernels          edge cases of every op by every implementation, and the same bits in repeated runs
collectives      sums, norms and exchanges between 2 and 4 GPUs to the last bit, alone and in a long chain; skipped on one GPU
failures         the demo model: the same tokens after the device ran out of memory in a step, and after sleep
engine           four models with random weights through LLM: 64 prompts together, alone, preempted, with and without cached
                 prefixes; logprobs no further from float32, and top-1 agreement no lower, than the plain path's (stated factors)
adapters         the demo model in float32 with LoRA adapters, more than slots: tokens equal those of plain JAX, on 1, 2 and 4 GPUs
tensor_parallel  on 2 and 4 GPUs: starts with the default memory, twice in one process; one GPU's tokens with requests of every kind,
                 mixed, preempted, from cached prefixes, after failed steps and sleep, with fp8 weights and cache; skipped on one GPU
topologies       on 2 and 4 GPUs: one GPU's tokens with replicas, stages of a pipeline, whole experts and split tokens, also of
                 several GPUs each
hosts            one GPU's tokens with an engine over 2 and 4 processes of `jax.distributed`, which may share a GPU

The parts run as processes that share a GPU (--in-turn: one after the other in this process). "skip" is not "ok": the record says
so too. Whatever is left out for lack of time has failed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import env
from scripts.gpu_checks import Outcome, jobs, record
from scripts.gpu_checks.parts import PARTS, outcomes
from scripts.kernels import OPS


def main() -> None:
    """Run the parts, print what they find, and record it if asked."""
    args = _arguments()
    if args.sanitize:
        # In one big pool a read past an array's end reads another array; and autotuning would run for hours.
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        args.parts, args.seconds, args.in_turn = ["kernels"], 3600.0, True
    if args.tiny and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # For tensor parallelism; and the interpreter of Mosaic kernels blocks forever if a CPU has few threads.
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    until = time.perf_counter() + args.seconds
    if args.as_job:
        from scripts.gpu_checks.parts import hello

        jobs.write(hello())
        for outcome in outcomes(args.parts[0], args, until):
            jobs.write(outcome)
        return
    # Compile from these sources, and do not evict other stored programs.
    with tempfile.TemporaryDirectory(prefix="check_gpu-") as directory:
        os.environ[env.CACHE_DIR] = directory
        print_and_record(args, until)


def print_and_record(args: argparse.Namespace, until: float) -> None:
    """The whole run. Ends the process with a message if anything failed."""
    run = record.Run(commit=args.commit, ops=tuple(args.ops.split(",")))
    for part, outcome in _in_turn(args, until, run) if args.in_turn else _beside_each_other(args, until, run):
        print(outcome.line(), flush=True)
        run.add(part, outcome)
    for part in args.parts:
        if not run.outcomes.get(part):
            print((outcome := Outcome(part, False, "nothing was checked")).line())
            run.add(part, outcome)
    print(f"\n{run.summary()}", flush=True)
    if args.record or args.record_to:
        for path in record.write(run, args.record_to):
            print(f"wrote {path}")
    if run.failed:
        sys.exit("FAILED: " + "; ".join(run.failed))


def _arguments() -> argparse.Namespace:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}, for the part kernels")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing after this; what is left out fails")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each kernel whose bits are compared")
    parser.add_argument("--sanitize", action="store_true", help="small cases of every kernel, each array allocated apart")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--in-turn", action="store_true", help="one part after the other, in this process")
    parser.add_argument("--record", action="store_true", help="write pallas_kernels/verified.json and docs/verified/DEVICE.md")
    parser.add_argument("--record-to", metavar="DIR", help="write both files there, for scripts/verified_pages.py --merge")
    parser.add_argument("--commit", help="what is recorded as the commit; default: what git says")
    parser.add_argument("--as-job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if unknown := set(args.ops.split(",")) - set(OPS):
        parser.error(f"no op {', '.join(sorted(unknown))}; there are {', '.join(OPS)}")
    if (args.record or args.record_to) and (args.tiny or args.sanitize):
        parser.error("a run with toy sizes verifies nothing: --record goes with neither --tiny nor --sanitize")
    args.in_turn |= args.tiny
    args.share = tuple(int(number) for number in args.share.split("/"))
    return args


def _in_turn(args: argparse.Namespace, until: float, run: record.Run) -> Iterator[tuple[str, Outcome]]:
    from scripts.gpu_checks.parts import hello

    run.meet(hello())
    print(run.device, flush=True)
    for part in args.parts:
        run.begin(part)
        for outcome in outcomes(part, args, until):
            yield part, outcome
        run.end(part)


def _beside_each_other(args: argparse.Namespace, until: float, run: record.Run) -> Iterator[tuple[str, Outcome]]:
    total_gib = record.gpu_gib()
    if total_gib is None:
        sys.exit("nvidia-smi finds no GPU; run with --in-turn, or with --tiny on a machine without one")
    arguments = ["--ops", args.ops, "--repeats", str(args.repeats)]
    wanted = [job for job in jobs.JOBS if job.part in args.parts]
    for job, event in jobs.run(wanted, arguments, total_gib=total_gib, until=until):
        if isinstance(event, jobs.Hello):
            if run.device is None:
                run.meet(event)
                print(run.device, flush=True)
            run.begin(job.part)
        elif isinstance(event, jobs.Ended):
            run.end(job.part)
        else:
            yield job.part, event


if __name__ == "__main__":
    main()
