"""Engines over several hosts, each of one device: the tokens of one device. Hosts are processes of this machine.

Each has its own GPU, or where there are too few, a share of one. NCCL then believes that they are different machines
(NCCL_HOSTID), without which it refuses them, and what they exchange goes through sockets. So this shows that programs, plans and
collectives over processes are right on GPUs, and nothing of their speed.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax

from scripts.gpu_checks import Outcome
from scripts.gpu_checks.tensor_parallel_traffic import guarded
from scripts.gpu_checks.topologies import (
    DRAFTING_RANKS,
    MOVING_RANKS,
    PRECISION,
    Layout,
    Tokens,
    engine_options,
    same,
    tokens_of,
    write_models,
)
from scripts.rehearsing.other_host import host_environment

LAYOUTS = (
    Layout("2 hosts, each layer on both", 2, {"tensor_parallel_size": 2}),
    Layout("2 hosts, a stage on each", 2, {"pipeline_parallel_size": 2}),
    Layout("2 hosts, whole experts", 2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, needs_experts=True),
    Layout("2 hosts, a rank on each", 2, {"data_parallel_size": 2, "enable_expert_parallel": True}, needs_experts=True),
    Layout("2 hosts, a rank on each, whose experts move", 2, MOVING_RANKS, needs_experts=True),
    Layout("2 hosts, a rank on each, with drafts", 2, DRAFTING_RANKS, needs_experts=True),
    Layout("2 hosts, tokens split", 2, {"prefill_context_parallel_size": 2}),
    Layout("4 hosts, 2 stages on two each", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    Layout("4 hosts, each layer on all", 4, {"tensor_parallel_size": 4}),
    Layout("4 hosts, tokens split", 4, {"prefill_context_parallel_size": 4}),
    Layout("4 hosts, layers and tokens split", 4, {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}),
    Layout("4 hosts, whole experts", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}, needs_experts=True),
    Layout("4 hosts, a rank on each", 4, {"data_parallel_size": 4, "enable_expert_parallel": True}, needs_experts=True),
)
MARK = "tokens: "
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
LINE_SECONDS = 150.0
"""A layout that takes longer has failed. Up to four processes on one GPU compile their programs at each start."""
ROOT = Path(__file__).parents[2]


def check(
    *, tiny: bool, deadline: float, layouts: tuple[Layout, ...] = LAYOUTS, done: Collection[str] = ()
) -> Iterator[Outcome]:
    """Every layout but those named in `done`; nothing begins after the deadline (`time.perf_counter`)."""
    num_gpus = len(jax.devices()) if jax.default_backend() == "gpu" else 0
    expected: dict[bool, Tokens] = {}

    def find(name: str, layout: Layout) -> Outcome:
        model = models[layout.needs_experts]
        return guarded(name, deadline, _compare, model, layout, expected, num_gpus, tiny=tiny, most_seconds=LINE_SECONDS)

    with tempfile.TemporaryDirectory() as directory:
        models = write_models(Path(directory), tiny=tiny)
        for layout in layouts:
            if layout.name in done:
                continue
            if layout.needs_experts not in expected:
                alone = find("one host", Layout("", 1, needs_experts=layout.needs_experts))
                if alone.failed:
                    yield alone
                    return
            yield find(layout.name, layout)


def _compare(model: str, layout: Layout, expected: dict[bool, Tokens], num_gpus: int, *, tiny: bool) -> tuple[bool, str]:
    """Tokens equal those expected of the model, which its first call fills."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hosts = [
        _start(
            model, {**layout.options, "nnodes": layout.num_devices, "node_rank": rank, "master_port": port}, num_gpus, tiny=tiny
        )
        for rank in range(layout.num_devices)
    ]
    try:
        output, _ = hosts[0].communicate(timeout=LINE_SECONDS)
        for host in hosts[1:]:
            host.wait(timeout=LINE_SECONDS)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines or any(host.returncode for host in hosts):
        return False, f"the hosts ended with {[host.returncode for host in hosts]}"
    found = json.loads(lines[0].removeprefix(MARK))
    shared = f", which share {num_gpus} GPU{'s' * (num_gpus > 1)}" if 0 < num_gpus < layout.num_devices else ""
    passed, detail = same(found, expected.setdefault(layout.needs_experts, found))
    return passed, detail + shared


def _start(model: str, options: dict[str, Any], num_gpus: int, *, tiny: bool) -> "subprocess.Popen[str]":
    """A host as a process. Host 0 writes its tokens to its standard output, all others to this process's standard error."""
    rank, num_hosts = options["node_rank"], options["nnodes"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        PRECISION: "highest",
        "JAX_NUM_CPU_DEVICES": "1",
        **host_environment(rank),
    }
    if num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[rank % num_gpus]
        most_on_one = -(-num_hosts // num_gpus)
        environment[MEMORY] = f"{float(os.environ.get(MEMORY, '0.75')) / most_on_one:.4f}"
    return subprocess.Popen(
        [sys.executable, "-m", __name__, model, json.dumps(options), *(["tiny"] if tiny else [])],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE if rank == 0 else sys.stderr,
        text=True,
    )


def main() -> None:
    """A host: MODEL OPTIONS ["tiny"]."""
    model, options, tiny = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:] == ["tiny"]
    if options["node_rank"] == 0:
        print(MARK + json.dumps(tokens_of(model, options, tiny=tiny)), flush=True)
        return
    from jaxllm.config import EngineConfig
    from jaxllm.hosts.follower import follow

    follow(EngineConfig.from_options(**engine_options(model, options, tiny=tiny)))


if __name__ == "__main__":
    main()
