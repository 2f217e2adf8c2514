"""Measures the additional cost of a step over two hosts, on this machine's CPU: python scripts/bench_hosts.py

Both engines split the same model over the same number of CPU devices. Over two hosts a step's plan is sent through a connection, and the
sums between devices, or what a stage leaves for the next one, go through Gloo's: both through this machine's loopback. A step of GPUs has
the first part of it, and NCCL's. With stages a step decodes a share of the rows.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

from jaxllm.config import EngineConfig

OPTIONS: dict[str, Any] = {"model": "demo", "use_progress_bar": False, "max_model_len": 512, "compilation_cache": False}

MOST_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="CPU devices in all")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="stages, each of as many of the devices")
    parser.add_argument("--rows", type=int, default=8, help="requests at a time")
    parser.add_argument("--steps", type=int, default=200, help="steps that are measured")
    arguments = parser.parse_args()
    found = {}
    for num_hosts in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        results: multiprocessing.Queue[dict[str, float]] = spawned.Queue()
        hosts = [spawned.Process(target=host, args=(rank, num_hosts, port, arguments, results)) for rank in range(num_hosts)]
        for process in hosts:
            process.start()
        found[num_hosts] = results.get(timeout=MOST_SECONDS)
        for process in hosts:
            process.join()
    stages = f" in {arguments.pipeline_parallel_size} stages" if arguments.pipeline_parallel_size > 1 else ""
    print(f"{arguments.devices} CPU devices{stages}, {arguments.rows} rows, ms per decode step (median of {arguments.steps})")
    for name in found[1]:
        one, two = found[1][name], found[2][name]
        print(f"  {name:<32} one process {one:7.3f}   two hosts {two:7.3f}   more {two - one:7.3f}")


def host(rank: int, num_hosts: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    """One host, as a process."""
    os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"] = "cpu", str(arguments.devices // num_hosts)
    config = EngineConfig.from_options(
        **OPTIONS,
        tensor_parallel_size=arguments.devices // arguments.pipeline_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        max_num_seqs=arguments.rows,
        decode_buckets=(arguments.rows,),
        nnodes=num_hosts,
        node_rank=rank,
        master_port=port,
    )
    if rank:
        from jaxllm.hosts.follower import follow

        follow(config)
        return
    from jaxllm.engine.core import EngineCore
    from jaxllm.request import EngineCoreRequest
    from jaxllm.sampling_params import SamplingParams

    core = EngineCore(config)
    sent, dispatched = [], []
    if core.hosts is not None:
        core.hosts.send = timed(core.hosts.send, sent)  # type: ignore[method-assign, union-attr]
    core.executor.dispatch = timed(core.executor.dispatch, dispatched)  # type: ignore[method-assign]
    seconds = []
    for run in range(2):  # the first one compiles
        params = SamplingParams(temperature=0, max_tokens=arguments.steps + 8, ignore_eos=True, seed=0)
        for row in range(arguments.rows):
            core.add_request(
                EngineCoreRequest(request_id=f"{run}-{row}", prompt_token_ids=[5 + row, 6, 7], sampling_params=params)
            )
        sent.clear(), dispatched.clear(), seconds.clear()
        while core.has_unfinished_requests():
            began = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - began)
    middle = slice(4, -4)
    results.put({
        "step": 1000 * statistics.median(seconds[middle]),
        "dispatch (in it)": 1000 * statistics.median(dispatched[middle]),
        "sending the plan (in dispatch)": 1000 * statistics.median(sent[middle]) if sent else 0.0,
    })  # fmt: skip
    core.shutdown()


def timed(call: Any, seconds: list[float]) -> Any:
    """Call the function and record its time."""

    def run(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    return run


spawned = multiprocessing.get_context("spawn")

if __name__ == "__main__":
    main()
