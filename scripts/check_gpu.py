"""Checks on this machine's accelerator what the tests on a CPU cannot: the compiled kernels, alone and inside the engine.

python scripts/check_gpu.py                        everything, about two minutes; exit status 0 if all of it holds
python scripts/check_gpu.py --parts kernels --ops attention
compute-sanitizer --tool memcheck python scripts/check_gpu.py --sanitize     tiny cases of each kernel, once (racecheck too)
python scripts/check_gpu.py --tiny                 toy sizes with interpreted kernels, for a machine without a GPU

tokens    the demo model in float32: greedy and seeded tokens, and vectors, equal those with the reference attention
logits    Llama-3.1-8B's shapes in bfloat16, one layer and all, no further from float32 than plain XLA (a stated factor)
kernels   edge cases of every op by every implementation, and the same bits in repeated runs
failures  the demo model: the same tokens after the device ran out of memory in a step, and after sleep
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_checks import Outcome
from scripts.kernels import OPS

PARTS = ("tokens", "logits", "kernels", "failures")


def main() -> None:
    """Run the parts and tell what failed."""
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}, for the part kernels")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="start no case of a kernel after this; what is left out fails"
    )
    parser.add_argument("--repeats", type=int, default=10, help="runs of each kernel whose bits are compared")
    parser.add_argument("--sanitize", action="store_true", help="tiny cases of the kernels once, each array allocated apart")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.sanitize:
        # In one big pool a read past an array's end is a read of another's; and autotuning would run for hours.
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        args.parts, args.tiny, args.repeats, args.seconds = "kernels", True, 0, 3600.0
    import jax

    started = time.perf_counter()
    print(f"jax {jax.__version__} {jax.devices()[0].device_kind}", flush=True)
    failed, counts = [], {}
    for part in args.parts.split(","):
        begun = time.perf_counter()
        outcomes = []
        for outcome in _guarded(part, args, started):
            print(f"{'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.detail}", flush=True)
            outcomes.append(outcome)
        failed += [outcome.name for outcome in outcomes if not outcome.passed]
        counts[part] = (
            f"{part} {sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} in {time.perf_counter() - begun:.0f} s"
        )
    print(f"\n{'; '.join(counts.values())}; {time.perf_counter() - started:.0f} s in all", flush=True)
    if failed:
        sys.exit("FAILED: " + "; ".join(failed))


def _guarded(part: str, args: argparse.Namespace, started: float) -> Iterator[Outcome]:
    """The outcomes of a part; one that ends in an exception has failed."""
    try:
        if part == "kernels":
            from scripts.gpu_checks import kernels

            ops = args.ops.split(",")
            yield from kernels.check(ops=ops, tiny=args.tiny, deadline=started + args.seconds, repeats=args.repeats)
        elif part == "logits":
            from scripts.gpu_checks import logits

            yield from logits.check(tiny=args.tiny)
        elif part == "failures":
            from scripts.gpu_checks import failures

            yield from failures.check(tiny=args.tiny)
        else:
            from scripts.gpu_checks import tokens

            yield from tokens.check(tiny=args.tiny)
    except Exception as problem:
        from scripts.kernels.compiling import first_line

        yield Outcome(part, False, first_line(problem, limit=1000))


if __name__ == "__main__":
    main()
