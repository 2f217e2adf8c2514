"""Prints where a decode step's time goes: by kernel, the gaps between kernels, and the host's share.

usage: profile_step.py MODEL_DIR [--batch 1,64] [--context 1024] [--top 20] [engine options as name=value …]
"""

import argparse
import collections
import gzip
import json
import os
import tempfile
import time
from pathlib import Path

# Without this a profile runs kernel by kernel and shows gaps that are not there in service.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_enable_command_buffers_during_profiling=true"

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams

NUM_TIMED, NUM_TRACED = 100, 10


def main() -> None:
    """Profile each batch size in one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("options", nargs="*", help="engine options, name=value")
    args = parser.parse_intermixed_args()
    batches = [int(batch) for batch in args.batch.split(",")]
    options = {
        "load_format": "dummy",
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "max_num_seqs": max(batches),
        "decode_buckets": batches,
        "token_buckets": [1024],
        "warmup": "lazy",
    }
    options |= {name: json.loads(value) for name, value in (option.split("=", 1) for option in args.options)}
    core = EngineCore(EngineConfig.from_options(model=str(args.model), **options))
    core.finish_compiling()
    print(jax.devices()[0].device_kind, os.environ["XLA_FLAGS"], options)
    for batch in batches:
        profile(core, batch, args.context, args.top)


def profile(core: EngineCore, batch: int, context: int, top: int) -> None:
    """Fill the batch, time steps without a trace, then trace some."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1000)
    rng = np.random.default_rng(0)
    ids = [f"{batch}-{i}" for i in range(batch)]
    for request_id in ids:
        prompt = rng.integers(0, core.model_config.vocab_size - 256, context).tolist()
        core.add_request(EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params))
    waiting = set(ids)
    while waiting:
        waiting -= {output.request_id for output in core.step()}
    run(core, 20)
    dispatch, wait = core.runner.dispatch_seconds, core.loop.wait_seconds
    seconds = run(core, NUM_TIMED)
    print(
        f"\nbatch {batch}, context {context}: {seconds / NUM_TIMED * 1e3:.3f} ms a step; host: dispatch "
        f"{(core.runner.dispatch_seconds - dispatch) / NUM_TIMED * 1e3:.3f} ms, waiting for the device "
        f"{(core.loop.wait_seconds - wait) / NUM_TIMED * 1e3:.3f} ms"
    )
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run(core, NUM_TRACED)
        show_kernels(Path(directory), top)
    core.abort_requests(ids)
    while core.has_unfinished_requests():
        core.step()


def run(core: EngineCore, num_steps: int) -> float:
    """Seconds for some steps."""
    start = time.perf_counter()
    for _ in range(num_steps):
        core.step()
    return time.perf_counter() - start


def show_kernels(directory: Path, top: int) -> None:
    """Time by kernel name of a trace."""
    [path] = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    kernels = [
        e
        for e in events
        if e.get("ph") == "X" and "GPU" in processes.get(e["pid"], "") and "Stream" in threads.get((e["pid"], e["tid"]), "")
    ]
    if not kernels:
        print("  the trace holds no GPU kernels")
        return
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in kernels:
        total[event["name"]] += event["dur"]
        count[event["name"]] += 1
    span = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    busy = sum(total.values())
    print(
        f"  traced: span {span / NUM_TRACED:.0f} us, kernels {busy / NUM_TRACED:.0f} us in {len(kernels) / NUM_TRACED:.0f} launches a step"
    )
    for name, microseconds in total.most_common(top):
        print(f"  {microseconds / NUM_TRACED:9.1f} us x{count[name] / NUM_TRACED:6.1f}  {name[:100]}")


if __name__ == "__main__":
    main()
