"""The parts of `check_gpu.py` by name."""

import argparse
import traceback
from collections.abc import Collection, Iterator

from scripts.gpu_checks import Outcome
from scripts.gpu_checks.jobs import Hello

PARTS = (
    "tokens",
    "logits",
    "kernels",
    "collectives",
    "failures",
    "engine",
    "adapters",
    "images",
    "speech",
    "tiers",
    "tensor_parallel",
    "parallel_models",
    "topologies",
    "hosts",
)


def outcomes(part: str, args: argparse.Namespace, until: float, done: Collection[str] = ()) -> Iterator[Outcome]:
    """The outcomes of a part, or of this job's share of it; a part that ends in an exception has failed.

    done: names of outcomes that a part that can go on leaves out.
    """
    try:
        yield from _outcomes(part, args, until, done)
    except Exception as problem:
        from scripts.kernels.compiling import first_line

        traceback.print_exc()
        yield Outcome(part, False, first_line(problem, limit=1000))


def _outcomes(part: str, args: argparse.Namespace, until: float, done: Collection[str]) -> Iterator[Outcome]:
    if args.sanitize and part == "tiers":
        from scripts.gpu_checks import block_writer

        yield from block_writer.check()
    elif args.sanitize:
        from scripts.gpu_checks import sanitizing

        yield from sanitizing.check(ops=args.ops.split(","))
    elif part == "kernels":
        from scripts.gpu_checks import kernels

        options = {"deadline": until, "repeats": args.repeats, "share": args.share, "done": done}
        yield from kernels.check(ops=args.ops.split(","), tiny=args.tiny, **options)
    elif part == "collectives":
        from scripts.gpu_checks import collectives

        sizes = (2,) if args.tiny else collectives.SIZES
        yield from collectives.check(tiny=args.tiny, deadline=until, sizes=sizes)
    elif part == "logits":
        from scripts.gpu_checks import logits

        yield from logits.check(tiny=args.tiny)
    elif part == "failures":
        from scripts.gpu_checks import failures

        yield from failures.check(tiny=args.tiny)
    elif part == "adapters":
        from scripts.gpu_checks import adapters

        yield from adapters.check(tiny=args.tiny)
    elif part == "images":
        from scripts.gpu_checks import images

        yield from images.check(tiny=args.tiny, deadline=until, share=args.share)
    elif part == "speech":
        from scripts.gpu_checks import speech

        yield from speech.check(tiny=args.tiny, deadline=until, share=args.share)
    elif part == "tiers":
        from scripts.gpu_checks import tiers

        yield from tiers.check(tiny=args.tiny)
    elif part == "engine":
        from scripts.gpu_checks import engine

        yield from engine.check(tiny=args.tiny, share=args.share, deadline=until)
    elif part == "tensor_parallel":
        from scripts.gpu_checks import tensor_parallel

        sizes = (2,) if args.tiny else tensor_parallel.SIZES
        yield from tensor_parallel.check(tiny=args.tiny, deadline=until, share=args.share, sizes=sizes)
    elif part == "parallel_models":
        from scripts.gpu_checks import parallel_models

        sizes = (2,) if args.tiny else parallel_models.SIZES
        yield from parallel_models.check(tiny=args.tiny, deadline=until, share=args.share, sizes=sizes)
    elif part == "topologies":
        from scripts.gpu_checks import topologies

        yield from topologies.check(tiny=args.tiny, deadline=until)
    elif part == "hosts":
        from scripts.gpu_checks import hosts

        yield from hosts.check(tiny=args.tiny, deadline=until, done=done)
    else:
        from scripts.gpu_checks import tokens

        yield from tokens.check(tiny=args.tiny)


def hello() -> Hello:
    """What JAX finds here."""
    import jax

    devices = jax.devices()
    return Hello(devices[0].device_kind, len(devices), jax.default_backend())
