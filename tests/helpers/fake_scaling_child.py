"""In place of `processes.run_child`: what a tensor-parallel size does follows from the plan's option `revision`, e.g. "2:crash"."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from jaxllm.scaling.plan import Plan
from jaxllm.scaling.results import SizeResult, Skipped
from tests.scaling.samples import ENGINE, LIMITS, breakdown, decode

DEVICES = {"platform": "gpu", "kind": "NVIDIA H200", "count": 4}


def run_child(sender: Connection, variables: Mapping[str, str], log_path: Path, plan: Plan, size: int, log_level: str) -> None:
    faults = dict(part.split(":") for part in plan.options.get("revision", "").split(",") if part)
    sender.send(f"pid {os.getpid()}")
    sender.send(SizeResult(size, limits=LIMITS))
    sender.send(SizeResult(size, engine=ENGINE))
    for batch in plan.decode_batches(size):
        sender.send(SizeResult(size, rows=[decode(size, batch, 8.0 / size)]))
        sender.send(SizeResult(size, breakdowns=[breakdown(size, batch)]))
        match faults.get(str(size)):
            case "crash":
                log_path.write_text("the driver says no\n  and no more\n")
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "heads":
                sender.send(SizeResult(size, failure="tensor_parallel_size is 4, which does not divide 6 query heads"))
                sys.exit(1)
            case "skip":
                sender.send(SizeResult(size, skipped=[Skipped(size, "decode", 64, "no room")]))
    sender.send(None)
    if faults.get(str(size)) == "linger":
        time.sleep(600)
