"""Checks on this machine's accelerator what the tests on a CPU cannot: the compiled kernels, alone and inside the engine.

python scripts/check_gpu.py                        everything, in about ten minutes on one H200; exit status 0 if all of it holds
python scripts/check_gpu.py --record               the same, and docs/verified/DEVICE.md says so (--record-to DIR: written there)
python scripts/check_gpu.py --state FILE --seconds 520   as much as fits; the same command again goes on with what is left
python scripts/check_gpu.py --parts kernels --ops attention
compute-sanitizer --tool memcheck python scripts/check_gpu.py --sanitize     small cases of each kernel, of those that write
                              blocks too (--parts tiers: these alone); racecheck and synccheck likewise
python scripts/check_gpu.py --tiny                 toy sizes with interpreted kernels, for a machine without a GPU

tokens           the demo model in float32: greedy and seeded tokens, those with penalties, logprobs and masks of decodes that are
                 sampled apart or not, and vectors, equal those with the reference attention
logits           Llama-3.1-8B's shapes in bfloat16, one layer and all, and one with weights in 4 and 8 bits: no further from float32 than
                 plain XLA (a stated factor)
kernels          edge cases of every op by every implementation, and the same bits in repeated runs
collectives      sums, norms and exchanges between 2 and 4 GPUs to the last bit, alone and in a long chain; skipped on one GPU
failures         the demo model: the same tokens after the device ran out of memory in a step, and after sleep
engine           four models with random weights through LLM: 64 prompts together, alone, preempted, with and without cached
                 prefixes; logprobs no further from float32, and top-1 agreement no lower, than the plain path's (stated factors)
adapters         the demo model in float32 with LoRA adapters, more than slots: tokens equal those of plain JAX, on 1, 2 and 4 GPUs
images           encoders and Gemma 3's attention of public widths in bfloat16, no further from float32 than plain XLA (a stated factor);
                 tiny models in float32 say plain JAX's tokens of prompts with images and videos: packed, in chunks, preempted, from
                 cached prefixes, on 1, 2 and 4 GPUs
speech           the same of Whisper: encoder and decoder of public widths, tokens of a tiny model for clips of several lengths
tiers            blocks to host memory and back while requests decode, to the bit, of full, window, latent and fp8 caches, on 1 and 2 GPUs;
                 damage is noticed; the demo model in float32 says the same tokens with little room on the device
tensor_parallel  on 2 and 4 GPUs: starts with the default memory, twice in one process; one GPU's tokens with requests of every kind,
                 mixed, preempted, from cached prefixes, after failed steps and sleep, with fp8 weights and cache; skipped on one GPU
parallel_models  on 2 and 4 GPUs: one GPU's float32 tokens of weights in 4 and 8 bits, of experts in int4 and of linear attention, and
                 bfloat16 logprobs no further from float32 than plain XLA's on one GPU (a stated factor); skipped on one GPU
topologies       on 2 and 4 GPUs: one GPU's tokens with replicas, stages of a pipeline, whole experts and split tokens, also of
                 several GPUs each
hosts            one GPU's tokens with an engine over 2 and 4 processes of `jax.distributed`, which may share a GPU

The parts run as processes that share a GPU (--in-turn: one after the other in this process). "skip" is not "ok": the record says
so too. Whatever is left out for lack of time has failed. With --state what passed is kept, for this device, these versions and
sources, and a record is written by the run that completes it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import env
from scripts.gpu_checks import Outcome, jobs, record
from scripts.gpu_checks.jobs import Job
from scripts.gpu_checks.parts import PARTS, outcomes
from scripts.gpu_checks.state import RESUMABLE, Identity, State
from scripts.kernels import OPS

SANITIZED = ("kernels", "tiers")
"""Parts with small cases for a run under compute-sanitizer."""


def main() -> None:
    """Run the parts, print what they find, and record it if asked."""
    args = _arguments()
    if args.sanitize:
        # In one big pool a read past an array's end reads another array; and autotuning would run for hours.
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        args.seconds, args.in_turn = 3600.0, True
    if args.tiny and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # For tensor parallelism; and the interpreter of Mosaic kernels blocks forever if a CPU has few threads.
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    until = time.perf_counter() + args.seconds
    if args.as_job:
        from scripts.gpu_checks.parts import hello

        jobs.write(hello())
        for outcome in outcomes(args.parts[0], args, until, frozenset(json.load(sys.stdin))):
            jobs.write(outcome)
        return
    # Compile from these sources, and do not evict other stored programs.
    with tempfile.TemporaryDirectory(prefix="check_gpu-") as directory:
        os.environ[env.CACHE_DIR] = directory
        print_and_record(args, until)


def print_and_record(args: argparse.Namespace, until: float) -> None:
    """The whole run. Ends the process with a message if anything failed."""
    run = record.Run(commit=args.commit, ops=tuple(args.ops.split(",")))
    execution: _InTurn | _BesideEachOther = (_InTurn if args.in_turn else _BesideEachOther)(args, until)
    state, wanted = State(args.state, execution.identity, run.ops), execution.wanted
    for job in wanted:
        for outcome in state.kept(job):
            run.add(job.part, outcome)
    if run.outcomes:
        print("kept: " + ", ".join(f"{part} {len(found)}" for part, found in run.outcomes.items()))
        run.earlier_seconds = {part: state.seconds(job for job in wanted if job.part == part) for part in run.outcomes}
    if state.hello is not None:
        run.meet(state.hello)
    has_begun = False
    for job, event in execution.events([job for job in wanted if not state.is_finished(job)], state):
        if isinstance(event, jobs.Hello):
            if not has_begun:
                state.meet(event)
                run.meet(event)
                print(run.device, flush=True)
            has_begun = True
            state.begin(job)
            run.begin(job.part)
        elif isinstance(event, jobs.Ended):
            state.end(job)
            run.end(job.part)
        else:
            print(event.line(), flush=True)
            state.add(job, event)
            run.add(job.part, event)
    for part in args.parts:
        if not run.outcomes.get(part):
            print((outcome := Outcome(part, False, "nothing was checked")).line())
            run.add(part, outcome)
    print(f"\n{run.summary()}", flush=True)
    if args.state and (left := state.left(wanted, execution.total_gib)):
        print(left)
    if (args.record or args.record_to) and not (args.state and run.failed):
        for path in record.write(run, args.record_to):
            print(f"wrote {path}")
    if run.failed:
        sys.exit("FAILED: " + "; ".join(run.failed))


def _arguments() -> argparse.Namespace:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}; with --sanitize, of {', '.join(SANITIZED)}")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)}, for the part kernels")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing after this; what is left out fails")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each kernel whose bits are compared")
    parser.add_argument("--sanitize", action="store_true", help="small cases of every kernel, each array allocated apart")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--in-turn", action="store_true", help="one part after the other, in this process")
    parser.add_argument("--record", action="store_true", help="write pallas_kernels/verified.json and docs/verified/DEVICE.md")
    parser.add_argument("--record-to", metavar="DIR", help="write both files there, for scripts/verified_pages.py --merge")
    parser.add_argument("--state", metavar="FILE", type=Path, help="keep what passes there, and go on with what is left")
    parser.add_argument("--commit", help="what is recorded as the commit; default: what git says")
    parser.add_argument("--as-job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = SANITIZED if args.sanitize else PARTS
    args.parts = list(parts) if args.parts is None else args.parts.split(",")
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}{' to sanitize' * args.sanitize}; there are {', '.join(parts)}")
    if unknown := set(args.ops.split(",")) - set(OPS):
        parser.error(f"no op {', '.join(sorted(unknown))}; there are {', '.join(OPS)}")
    if args.sanitize and args.state:
        parser.error("--state keeps what --record can record: it does not go with --sanitize")
    if (args.record or args.record_to) and (args.tiny or args.sanitize):
        parser.error("a run with toy sizes verifies nothing: --record goes with neither --tiny nor --sanitize")
    args.in_turn |= args.tiny
    args.share = tuple(int(number) for number in args.share.split("/"))
    return args


class _InTurn:
    """One part after the other, in this process."""

    total_gib = None

    def __init__(self, args: argparse.Namespace, until: float):
        from scripts.gpu_checks.parts import hello

        self.args, self.until, self.hello = args, until, hello()
        self.wanted = [Job(part) for part in args.parts]
        kind, num_devices = self.hello.device_kind, self.hello.num_devices
        self.identity = Identity(kind, num_devices, record.versions(), args.repeats, args.tiny)

    def events(self, left: Sequence[Job], state: State) -> Iterator[tuple[Job, jobs.Event]]:
        """Events of all remaining jobs."""
        for job in left:
            yield job, self.hello
            for outcome in outcomes(job.part, self.args, self.until, frozenset(kept.name for kept in state.kept(job))):
                yield job, outcome
            yield job, jobs.Ended(job)


class _BesideEachOther:
    """As processes that share a GPU."""

    def __init__(self, args: argparse.Namespace, until: float):
        gpu = record.gpu()
        if gpu is None:
            sys.exit("nvidia-smi finds no GPU; run with --in-turn, or with --tiny on a machine without one")
        self.args, self.until = args, until
        name, self.total_gib = gpu
        self.wanted = [job for job in jobs.JOBS if job.part in args.parts]
        self.identity = Identity(name, record.num_gpus(), record.versions(), args.repeats, args.tiny)

    def events(self, left: Sequence[Job], state: State) -> Iterator[tuple[Job, jobs.Event]]:
        """Events of all remaining jobs."""
        return jobs.run(
            left,
            ["--ops", self.args.ops, "--repeats", str(self.args.repeats)],
            total_gib=self.total_gib,
            until=self.until,
            done=lambda job: [outcome.name for outcome in state.kept(job)],
            needed_seconds=lambda job: 0.0 if job.part in RESUMABLE else state.needed_seconds(job),
        )


if __name__ == "__main__":
    main()
