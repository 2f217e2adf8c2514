"""In place of jaxllm.scaling.child: what a tensor-parallel size does follows from the plan's option `revision`, e.g. "2:crash"."""

import json
import os
import signal
import sys
import time
from typing import Any

from jaxllm.scaling.plan import Plan
from jaxllm.scaling.rows import to_json
from tests.scaling.samples import ENGINE, LIMITS, breakdown, decode


def tell(kind: str, value: Any) -> None:
    print(json.dumps({"kind": kind, "value": value}), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if asked.get("find_devices"):
        tell("devices", {"platform": "gpu", "kind": "NVIDIA H200", "count": 4})
        return
    plan, size = Plan.from_json(asked["plan"]), asked["tensor_parallel_size"]
    faults = dict(part.split(":") for part in plan.options.get("revision", "").split(",") if part)
    tell("doing", f"pid {os.getpid()}")
    tell("limits", LIMITS)
    tell("engine", ENGINE)
    for batch in plan.decode_batches(size):
        tell("Row", to_json(decode(size, batch, 8.0 / size)))
        tell("Breakdown", to_json(breakdown(size, batch)))
        match faults.get(str(size)):
            case "crash":
                print("the driver says no\n  and no more", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "heads":
                tell("failed", "tensor_parallel_size is 4, which does not divide 6 query heads")
                sys.exit(1)
            case "skip":
                tell("Skipped", {"tensor_parallel_size": size, "work": "decode", "num_requests": 64, "reason": "no room"})
    tell("done", None)
    if faults.get(str(size)) == "linger":
        time.sleep(600)


if __name__ == "__main__":
    main()
