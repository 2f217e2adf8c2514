import os
from dataclasses import dataclass, replace

import pytest

from jaxllm.cache_spec import FullCache, cache_layout, row_bytes
from jaxllm.config import EngineConfig
from jaxllm.engine_plan import plan_engine
from jaxllm.errors import OutOfMemoryError
from jaxllm.kernel_policy import GPU
from jaxllm.layers.build import Widened, build_model
from jaxllm.model_config import FP8
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.topology import Topology
from jaxllm.runner import memory
from jaxllm.runner.memory import _size, check_pool, countable_blocks, device_limit, estimate_work_bytes, memory_plan
from tests.helpers import engines, goldens


@dataclass
class Device:
    """A GPU whose pool has these bytes."""

    id: int
    bytes_limit: int
    bytes_in_use: int = 0
    platform = "gpu"
    device_kind = "Toy"

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}


def test_the_device_with_the_least_memory_decides():
    devices = [Device(0, 90), Device(1, 70), Device(2, 80), Device(3, 10)]
    assert device_limit(3, devices) == ("Toy 1, the smallest of 3 devices", 70)
    assert device_limit(1, devices) == ("Toy", 90)
    assert device_limit(2, [Device(0, 90), Device(1, 90)]) == ("Toy", 90)


def test_the_cache_is_planned_for_that_device(monkeypatch):
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device(0, 1 << 30), Device(1, 300 << 20), Device(2, 1 << 20)])
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    config = EngineConfig.from_options(**engines.SMALL, tensor_parallel_size=2)
    model = load_model_config(goldens.FOLDER / "llama_gqa").for_tensor_parallel(2)
    plan = memory_plan(config, model, weight_bytes=100 << 20, work_bytes=200 << 20)
    assert plan.limit_bytes == 300 << 20 and plan.num_blocks == 0 and plan.collective_bytes == memory.COLLECTIVE_BYTES
    assert memory_plan(config, model, weight_bytes=100 << 20, work_bytes=100 << 20).num_blocks > 0


def test_a_gpu_whose_programs_may_be_compiled_later_keeps_room_to_time_the_largest_product(monkeypatch):
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    model = load_model_config(goldens.FOLDER / "llama_gqa")
    room = memory.tuning_bytes(EngineConfig.from_options(**engines.SMALL), model)
    assert room >= model.padded_vocab_size * model.hidden_size * 4
    blocks = {}
    for warmup in ("all", "lazy"):
        config = EngineConfig.from_options(**engines.SMALL, warmup=warmup)
        device = Device(0, (11 << 20) + memory._other_bytes(Topology()) + 12 * 4096)  # room for twelve blocks
        monkeypatch.setattr(memory.jax, "local_devices", lambda device=device: [device])
        blocks[warmup] = memory_plan(config, model, weight_bytes=1 << 20, work_bytes=10 << 20).num_blocks
    assert blocks == {"all": 12, "lazy": 12 - -(-room // 4096)}


def test_no_room_is_kept_to_time_the_product_of_a_head_in_tiles(monkeypatch):
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    config = EngineConfig.from_options(**engines.SMALL, warmup="lazy")
    model = load_model_config(goldens.FOLDER / "llama_gqa", quantize_lm_head="int8").for_tensor_parallel(1)
    model = replace(model, vocab_size=4096, padded_vocab_size=4096)
    head, layer = (memory.tuning_bytes(config, model, has_head=has_head) for has_head in (True, False))
    assert head > 4096 * 64 * 4 > 4 * layer > 0
    device = Device(0, memory._other_bytes(Topology()) + head + 4 * 4096)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])
    most = 4 * 7 + 1  # all that requests can use
    for each, num_blocks in ((model, 4), (model.in_tiles(), min(most, (head - layer) // 4096 + 4))):
        plan = memory_plan(config, model, weight_bytes=0, work_bytes=0, widened=Widened.of(build_model(each)))
        assert plan.num_blocks == num_blocks


def test_on_a_cpu_the_cache_takes_a_quarter_of_the_memory_and_no_more_than_weights_leave(monkeypatch):
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2 << 20)
    config = EngineConfig.from_options(**{**engines.SMALL, "max_num_seqs": 64}, tensor_parallel_size=2)
    model = load_model_config(goldens.FOLDER / "llama_gqa").for_tensor_parallel(2)
    for weight_kib, cache_kib in ((100, 256), (800, 124), (1100, 0)):
        plan = memory_plan(config, model, weight_bytes=weight_kib << 10, work_bytes=100 << 10)
        assert plan.limit_bytes == 1 << 20, "two devices share the memory of the machine"
        assert plan.num_blocks == (cache_kib << 10) // plan.block_bytes


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "most_bytes", "cache_bytes", "is_cut"),
    [
        (4, 112, 1 << 20, 29 * 4096, False),  # all that the requests can use
        (64, 112, 1 << 20, 1 << 20, True),  # the usual most
        (64, 112, 16 << 10, 8 * 4096, True),  # a request of the longest length, and the null block
        (64, 112, 1 << 30, 64 * 7 * 4096 + 4096, False),
    ],
)
def test_a_cpu_keeps_what_requests_can_use_up_to_a_limit(
    monkeypatch, max_num_seqs, max_model_len, most_bytes, cache_bytes, is_cut
):
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 64 << 20)
    monkeypatch.setattr(memory, "_CPU_CACHE_BYTES", most_bytes)
    config = EngineConfig.from_options(**{**engines.SMALL, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len})
    plan = memory_plan(config, load_model_config(goldens.FOLDER / "llama_gqa"), weight_bytes=1 << 20, work_bytes=1 << 20)
    assert plan.block_bytes == 4096
    assert (plan.cache_bytes, plan.is_cut) == (cache_bytes, is_cut)
    assert ("--kv-cache-memory-bytes makes it larger" in plan.describe()) == is_cut


def test_states_by_row_are_counted_for_each_row_and_leave_less_for_blocks():
    model = load_model_config(goldens.FOLDER / "qwen3_next")
    plans = {}
    for max_num_seqs in (4, 8):
        config = EngineConfig.from_options(**{**engines.SMALL, "max_num_seqs": max_num_seqs, "kv_cache_memory_bytes": 1 << 20})
        plans[max_num_seqs] = memory_plan(config, model, weight_bytes=1 << 20, work_bytes=0, device_bytes=20 << 20)
        assert plans[max_num_seqs].state_bytes == (max_num_seqs + 1) * row_bytes(model)
    assert f"  states    {_size(plans[4].state_bytes)} (5 rows)" in plans[4].describe()
    free = {
        n: memory_plan(
            EngineConfig.from_options(**{**engines.SMALL, "max_num_seqs": n, "max_model_len": 256}),
            model,
            weight_bytes=8 << 20,
            work_bytes=0,
            device_bytes=20 << 20,
        ).num_blocks
        for n in (50, 60)
    }
    assert 0 < free[60] < free[50]
    with pytest.raises(OutOfMemoryError, match=r"the states of 1501 rows .* lower --max-num-seqs"):
        memory_plan(
            EngineConfig.from_options(**{**engines.SMALL, "max_num_seqs": 1500}),
            model,
            weight_bytes=1 << 20,
            work_bytes=0,
            device_bytes=20 << 20,
        ).check()


@pytest.mark.parametrize(("golden", "num_values"), [("llama_gqa", 2 * 3 * 96 * 64), ("qwen3_moe", 3 * 8 * 32 * 64)])
def test_a_step_has_room_for_the_weights_that_products_widen(golden, num_values):
    """The weights of a layer: two linear layers, or those of all experts."""
    config = EngineConfig.from_options(**engines.SMALL)
    models = [load_model_config(goldens.FOLDER / golden, quantization=name) for name in (None, "int4")]
    plain, packed = (estimate_work_bytes(config, model, GPU) for model in models)
    assert packed - plain >= num_values * 4
    in_tiles = build_model(models[1].for_tensor_parallel(1).in_tiles())
    assert estimate_work_bytes(config, models[1], GPU, widened=Widened.of(in_tiles)) == plain
    assert Widened.of(build_model(models[1])) == (True, golden == "qwen3_moe", False, False)


def test_a_plan_has_no_room_for_weights_in_tiles_and_lanes():
    """A CPU has tiles if it is asked for kernels, else lanes."""

    def work_bytes(quantization, wanted):
        options = {**engines.SMALL, "quantization": quantization, "attention_implementation": wanted}
        return plan_engine(EngineConfig.from_options(model=str(goldens.FOLDER / "qwen3"), **options)).memory.work_bytes

    assert work_bytes("int8", "triton") == work_bytes(None, "xla") == work_bytes("int8", "xla")


def test_a_gpu_that_the_largest_step_fills_is_told_that_fewer_rows_make_room():
    model = load_model_config(goldens.FOLDER / "llama_gqa")
    config = EngineConfig.from_options(**engines.SMALL)
    for work_bytes, said in (
        (27 << 20, "no memory is left .* lower --max-num-seqs or"),
        (5 << 20, r"too small .* \(a lower --max-num-seqs"),
    ):
        plan = memory_plan(config, model, weight_bytes=9 << 20, work_bytes=work_bytes, device_bytes=40 << 20)
        plan = replace(plan, num_blocks=min(plan.num_blocks, 2))
        with pytest.raises(OutOfMemoryError, match=said):
            plan.check()


def test_arrays_of_another_engine_in_the_pool_are_named():
    plan = memory.MemoryPlan(
        "Toy",
        100,
        weight_bytes=50,
        work_bytes=10,
        cache=cache_layout([FullCache(1, 1, FP8)], block_size=4, max_step_tokens=8),
        num_blocks=5,
        max_model_len=8,
    )
    check_pool(plan, [Device(0, 100), Device(1, 100, 10)])
    with pytest.raises(OutOfMemoryError, match=r"hold 0.0 MiB .* of device 1, .* end the engine .* before \(LLM.shutdown\)"):
        check_pool(plan, [Device(0, 100), Device(1, 100, 11)])


@pytest.mark.parametrize(
    ("gibibytes", "itemsize", "left"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 2), (5, 1, 5), (4, 2, 4), (5, 2, 5), (40, 2, 40)],
)
def test_a_layer_of_single_bytes_is_never_of_a_size_that_kernels_cannot_count(gibibytes, itemsize, left):
    values_per_block = 8 * 16 * 64
    blocks = (gibibytes << 30) // (values_per_block * itemsize)
    assert countable_blocks(blocks, values_per_block, itemsize) * values_per_block * itemsize == left << 30


@pytest.mark.parametrize(
    ("size", "total_gibibytes", "fraction"),
    [(1, 140, "0.920"), (2, 140, "0.909"), (4, 20, "0.845"), (2, None, "0.920"), (2, 1, "0.010")],
    ids=["one device takes all", "two", "a small device", "unknown memory", "too small"],
)
def test_the_pool_leaves_room_for_collectives(monkeypatch, size, total_gibibytes, fraction):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(memory.gpus, "smallest_total_bytes", lambda count: total_gibibytes and total_gibibytes << 30)
    memory.reserve_device_memory(0.92, Topology(size))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == fraction
