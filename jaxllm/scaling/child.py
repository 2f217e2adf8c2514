"""The process that measures one tensor-parallel size: `python -m jaxllm.scaling.child`.

The first line of its input is JSON: `{"plan": …, "tensor_parallel_size": n, "log_level": …}`, or `{"find_devices": true}`.
It writes a JSON object per line, `{"kind": …, "value": …}`: kinds are doing, engine, limits, Row, Breakdown, AllReduce,
Skipped, failed and done; or devices. It ends at the end of its input.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from jaxllm.scaling.plan import Plan
from jaxllm.scaling.rows import to_json


def main() -> int:
    """Do what the first line asks. Returns the exit code."""
    # Output of libraries must not mix with the lines.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(kind: str, value: Any) -> None:
        lines.write(json.dumps({"kind": kind, "value": value}) + "\n")
        lines.flush()

    asked = json.loads(sys.stdin.readline())
    if asked.get("find_devices"):
        send("devices", find_devices())
        return 0
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        measure_size(Plan.from_json(asked["plan"]), asked["tensor_parallel_size"], asked["log_level"], send)
    except BaseException as error:
        from jaxllm.scaling.measure import one_line

        traceback.print_exc()
        send("failed", one_line(error))
        return 1
    send("done", None)
    return 0


def find_devices() -> dict[str, Any]:
    """The devices that JAX finds."""
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def measure_size(plan: Plan, size: int, log_level: str, send: Callable[[str, Any], None]) -> None:
    """Start an engine and measure the plan's work. Raises errors that prevent measuring."""
    import jax

    from jaxllm import log
    from jaxllm.config import EngineConfig
    from jaxllm.llm import LLM
    from jaxllm.models.load_config import load_model_config
    from jaxllm.parallel.topology import Topology
    from jaxllm.runner.memory import device_limit, reserve_device_memory
    from jaxllm.scaling.engine_options import engine_options
    from jaxllm.scaling.limits import measure_ceilings
    from jaxllm.scaling.measure import Measurer
    from jaxllm.text.model_files import text_files

    def tell(value: Any) -> None:
        send("doing", value) if isinstance(value, str) else send(type(value).__name__, to_json(value))

    log.set_up(log_level)
    asked = EngineConfig.from_options(**{"model": plan.model, **plan.options, "tensor_parallel_size": size})
    send("doing", "starting the device")
    reserve_device_memory(asked.cache.gpu_memory_utilization, Topology.of(asked.parallel))
    on_gpu = jax.default_backend() != "cpu"
    directory = text_files(asked.model.model, revision=asked.model.revision, download_dir=asked.model.download_dir)
    described = load_model_config(
        directory,
        overrides=asked.model.hf_overrides,
        dtype=asked.model.dtype,
        on_gpu=on_gpu,
        runner=asked.model.runner,
        model_class=asked.model.model_class,
    )
    options = engine_options(
        plan,
        size,
        on_gpu=on_gpu,
        device_bytes=device_limit()[1],
        max_position=described.max_position,
        is_mixture=bool(described.mixtures),
    )
    # Report an impossible engine before anything is measured.
    described.for_tensor_parallel(size)
    send("doing", "measuring the device's limits")
    ceilings = measure_ceilings(tiny=not on_gpu, dtype="bfloat16" if on_gpu else "float32")
    send("limits", to_json(ceilings))
    send("doing", "starting the engine")
    start = time.perf_counter()
    llm = LLM.from_config(EngineConfig.from_options(**options))
    core: Any = llm.llm_engine.core
    if core.config.compile.warmup == "background":
        # Rare programs are not needed here; compiling and tuning them would disturb the measurements.
        core.runner.programs.shutdown()
    measurer = Measurer(plan, llm, ceilings, tell)
    devices = jax.devices()
    send(
        "engine",
        {
            "device": devices[0].device_kind,
            "platform": devices[0].platform,
            "num_devices": len(devices),
            "jax": jax.__version__,
            "start_seconds": time.perf_counter() - start,
            "start_times": core.start_times.describe(),
            "num_programs": len(core.runner.programs),
            "weight_bytes": sum(x.nbytes for x in core.runner.params),
            "read_bytes_per_step": measurer.cost.weight_bytes,
            "cache_bytes_per_token": measurer.cost.cache_bytes_per_token,
            "num_cache_tokens": core.memory_plan.num_cache_tokens,
            "num_layers": core.model_config.num_layers,
            "hidden_size": core.model_config.hidden_size,
            "kernels": {op: f"{report.implementation} ({report.check})" for op, report in core.kernels.items()},
            "options": {name: value for name, value in core.config.flat().items() if value is not None},
        },
    )
    measurer.measure_all()
    send("doing", "ending the engine")
    llm.shutdown()


def _end_with_input() -> None:
    """End the process when its parent has ended; else it would keep the GPUs."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
