"""The kernel check at an engine's start: what is wrong is found, replaced and remembered. Implementations are NumPy behind JAX."""

import dataclasses
import itertools
import json
import logging
import sys
import threading
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.engine import early_programs, kernel_check, kernel_choice, kernel_shapes
from jaxllm.engine.core import EngineCore
from jaxllm.engine.kernel_check import Choice, choose_kernels
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import ConfigError, KernelCheckError
from jaxllm.kernel_policy import platform_policy
from jaxllm.kernel_verdicts import OpReport, VerdictStore
from jaxllm.model_parts import MLP, Audio, Vision
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.runner.runner import ModelRunner
from jaxllm.runner.step_programs import StepPrograms
from jaxllm.start_times import StartTimes
from pallas_kernels import paged_attention, rope_cache_write
from pallas_kernels.checking import (
    attention_at_start,
    delta_decode,
    expert_choice,
    gated_delta,
    quantize,
    segment_attention,
    state_space,
)
from pallas_kernels.checking.attention import Batch
from pallas_kernels.expert_choice import Rule
from tests.helpers import engines, goldens
from tests.helpers.slow import slow_except

DIRECTORY = goldens.golden("llama_gqa").directory
GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA Test", client=types.SimpleNamespace(platform_version="cuda 13"))
VISION = Vision("qwen3_vl", 9, 16, 2, hidden_size=144, num_layers=2, num_heads=2, intermediate_size=32, output_size=64)
PLAIN_REST = {"rope_cache_write": ("xla",), "sampling": ("xla",)}


def numpy_attention(change=lambda out, query_start: out):
    """An implementation that computes in NumPy what `change` makes of it."""

    def attend(q, k, v, table, query_start, kv_length, *, scale, window=None, soft_cap=None, interpret=False):
        def on_host(*arrays):
            q, k, v, table, query_start, kv_length = map(np.asarray, arrays)
            shape = {"num_kv_heads": q.shape[1], "num_groups": q.shape[2], "head_dim": q.shape[3], "page_size": k.shape[2]}
            dtype = str(q.dtype)
            batch = Batch("", prompts=((1, 0),), **shape, dtype=dtype, scale=scale, window=window, soft_cap=soft_cap)
            found = attention_at_start.attend(batch, q, (k, v, table, query_start, kv_length))
            out = np.zeros(q.shape, q.dtype)
            out[: len(found)] = found
            return change(out, query_start).astype(q.dtype)

        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, table, query_start, kv_length)

    def decode(q, k, v, table, kv_length, **options):
        return attend(q, k, v, table, jnp.arange(len(q) + 1, dtype=jnp.int32), kv_length, **options)

    return types.SimpleNamespace(paged_attention=attend, paged_decode=decode, supports=lambda **_: True)


def zeros_off_eight(out, query_start):
    """Rows of several tokens that begin off a multiple of 8 are never written."""
    for begin, end in itertools.pairwise(query_start):
        if end - begin > 1 and begin % 8:
            out[begin:end] = 0
    return out


def forgets_padding(out, query_start):
    out[query_start[-1] :] = np.nan
    return out


def refuses(*_, **__):
    raise ValueError("shared memory too small")


def drifting():
    counter = itertools.count()
    return lambda out, _: out * np.float32(1 + 1e-6 * next(counter))


BROKEN = {
    "off eight": (lambda: numpy_attention(zeros_off_eight), "ragged batch: error 1, allowed 2e-05"),
    "nan": (lambda: numpy_attention(forgets_padding), "ragged batch: error nan, allowed 2e-05"),
    "differs": (lambda: numpy_attention(drifting()), "ragged batch: two runs give different bits"),
    "raises": (
        lambda: types.SimpleNamespace(paged_attention=refuses, paged_decode=refuses),
        "ragged batch: ValueError: shared memory too small",
    ),
}


@pytest.fixture(scope="module")
def model():
    """(config, model config, plan) of a small model."""
    config = EngineConfig.from_options(model=str(DIRECTORY), **engines.SMALL)
    prepared = Prepared.of(config, DIRECTORY, (), StartTimes())
    return prepared.config, prepared.model_config, prepared.plan


@pytest.fixture
def implementations(monkeypatch):
    """Registers implementations of attention by name."""

    def register(**found) -> tuple[str, ...]:
        for name, module in found.items():
            monkeypatch.setitem(sys.modules, f"attention_{name}", module)
            monkeypatch.setitem(paged_attention.IMPLEMENTATIONS, name, f"attention_{name}")
        return tuple(found)

    return register


@pytest.fixture
def choose(model, tmp_path, caplog):
    """Chooses as an engine on a GPU does, with verdicts in tmp_path."""
    caplog.set_level(logging.INFO, logger="jaxllm")
    config, model_config, plan = model

    def choose(
        attention: tuple[str, ...], *, mode="auto", named=False, device=GPU, model_config=model_config, rest=PLAIN_REST
    ) -> Choice:
        return choose_kernels(
            {"paged_attention": attention, **rest},
            config.replace(kernel_check=mode),
            model_config,
            plan,
            device=device,
            store=VerdictStore(tmp_path / "kernel_checks"),
            is_named=named,
        )

    return choose


@pytest.fixture
def no_check(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a kernel was checked")

    return lambda: monkeypatch.setattr(kernel_check, "check", refuse)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_preferred_kernels_stay_if_all_are_right(choose, implementations, caplog):
    chosen = choose(implementations(good=numpy_attention(), other=numpy_attention()))
    assert (
        chosen.kernels.by_op().items()
        >= {
            "paged_attention": "good",
            "rope_cache_write": "xla",
            "sampling": "xla",
            "collectives": "xla",
        }.items()
    )
    assert chosen.report["paged_attention"] == OpReport("good", "passed")
    assert chosen.report["sampling"] == OpReport("xla", "not run"), "plain JAX needs no proof where no kernel failed"
    assert not warnings(caplog)
    assert "kernel check on NVIDIA Test: paged_attention good: right (3 programs," in caplog.text


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.slow
def test_what_is_broken_is_replaced_and_warned_of(choose, implementations, caplog, kind):
    make, fault = BROKEN[kind]
    names = implementations(broken=make(), good=numpy_attention())
    for how in ("passed", "passed before"):  # the warning is repeated at each start
        caplog.clear()
        chosen = choose(names)
        assert chosen.kernels.paged_attention == "good"
        assert chosen.report["paged_attention"] == OpReport("good", how, {"broken": fault})
        (warning,) = warnings(caplog)
        for part in ("paged_attention", "broken", "NVIDIA Test", fault, "good takes its place"):
            assert part in warning


def test_no_engine_starts_when_nothing_is_right(choose, implementations):
    names = implementations(one=BROKEN["nan"][0](), two=BROKEN["raises"][0]())
    with pytest.raises(KernelCheckError, match="no implementation of paged_attention .* NVIDIA Test") as caught:
        choose(names)
    for part in ("one: ragged batch: error nan", "two: ragged batch: ValueError", "--kernel-check off"):
        assert part in str(caught.value)


def test_plain_attention_that_stands_in_for_a_kernel_is_checked_too(choose, implementations):
    names = implementations(broken=BROKEN["nan"][0](), xla=BROKEN["off eight"][0]())
    with pytest.raises(KernelCheckError, match="xla: ragged batch: error 1"):
        choose(names)


def test_a_verdict_is_kept_for_the_next_start(choose, implementations, no_check):
    names = implementations(good=numpy_attention())
    choose(names)
    no_check()
    assert choose(names).report["paged_attention"].check == "passed before"
    with pytest.raises(AssertionError, match="was checked"):
        choose(names, mode="always")


def test_a_verdict_counts_only_for_what_it_was_made_for(choose, implementations, model, no_check, monkeypatch):
    names = implementations(good=numpy_attention())
    choose(names)
    no_check()
    layer = model[1].layers[0]
    layer = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, num_kv_heads=1, num_heads=4))
    other_model = dataclasses.replace(model[1], layers=(layer,))
    device = types.SimpleNamespace(**{**vars(GPU), "device_kind": "NVIDIA Other"})
    driver = types.SimpleNamespace(**{**vars(GPU), "client": types.SimpleNamespace(platform_version="cuda 12")})
    for options in ({"model_config": other_model}, {"device": device}, {"device": driver}):
        with pytest.raises(AssertionError, match="was checked"):
            choose(names, **options)
    monkeypatch.setattr(kernel_check, "source_digest", lambda folder: "changed")
    with pytest.raises(AssertionError, match="was checked"):
        choose(names)


@pytest.mark.parametrize(
    "text", slow_except(["{", '{"format": 1}'], ["", "{", "[]", '{"format": 1}', '{"format": 7, "subject": {}, "fault": null}'])
)
def test_a_corrupt_verdict_is_ignored(choose, implementations, tmp_path, text):
    names = implementations(good=numpy_attention())
    choose(names)
    (path,) = (tmp_path / "kernel_checks").glob("paged_attention-good-*.json")
    path.write_text(text)
    assert choose(names).report["paged_attention"].check == "passed"
    assert json.loads(path.read_text())["fault"] is None, "it is written anew"


def test_a_cache_directory_that_cannot_be_written_stops_nothing(choose, implementations, tmp_path, caplog):
    (tmp_path / "kernel_checks").write_text("a file")
    names = implementations(good=numpy_attention())
    for _ in range(2):
        assert choose(names).report["paged_attention"].check == "passed"
    assert "is not kept" in caplog.text and not warnings(caplog)


def test_without_a_check_only_verified_kernels_are_chosen(choose, implementations, no_check, monkeypatch, caplog):
    no_check()
    names = (*implementations(good=numpy_attention()), "xla")
    rest = {"rope_cache_write": ("triton", "xla"), "sampling": ("triton", "xla")}
    monkeypatch.setattr(
        kernel_check, "is_verified", lambda kind, op, *, carried: (kind, op, carried) == ("NVIDIA Test", "sampling", True)
    )
    chosen = choose(names, mode="off", rest=rest)
    assert (
        chosen.kernels.by_op().items()
        >= {
            "paged_attention": "xla",
            "rope_cache_write": "xla",
            "sampling": "triton",
            "collectives": "xla",
        }.items()
    )
    assert chosen.report["sampling"].check == "verified"
    assert len(warnings(caplog)) == 2
    for warning, op in zip(warnings(caplog), ("paged_attention (good)", "rope_cache_write (triton)"), strict=True):
        assert op in warning and "NVIDIA Test" in warning and "--kernel-check auto" in warning


def test_the_users_own_choice_is_taken_or_refused_and_never_replaced(choose, implementations, no_check):
    names = implementations(broken=BROKEN["off eight"][0]())
    with pytest.raises(
        KernelCheckError, match="attention_implementation is 'broken'.*NVIDIA Test.*ragged batch: error 1.*use auto"
    ):
        choose(names, named=True)
    no_check()
    assert choose(names, named=True, mode="off").kernels.paged_attention == "broken"
    with pytest.raises(KernelCheckError, match="attention_implementation is 'broken'"):
        choose(names, named=True)  # by the verdict that was kept


def test_another_op_is_replaced_by_itself(choose, implementations, monkeypatch, caplog):
    """A rope that writes a slot too many: found although every written value is right."""
    real = rope_cache_write.xla.rope_and_write

    def rope_and_write(qkv, cos, sin, k, v, slot, **options):
        q, k, v = real(qkv, cos, sin, k, v, slot, **options)
        return q, k, v.at[0, 0, jnp.argmin(jnp.isnan(v[0, 0, :, 0])) - 1].set(0)

    broken = types.SimpleNamespace(rope_and_write=rope_and_write, supports=lambda **_: True)
    monkeypatch.setitem(sys.modules, "rope_broken", broken)
    monkeypatch.setitem(rope_cache_write.IMPLEMENTATIONS, "broken", "rope_broken")
    names = implementations(good=numpy_attention())
    chosen = choose(names, rest={"rope_cache_write": ("broken", "xla"), "sampling": ("xla",)})
    assert (
        chosen.kernels.by_op().items()
        >= {
            "paged_attention": "good",
            "rope_cache_write": "xla",
            "sampling": "xla",
            "collectives": "xla",
        }.items()
    )
    assert chosen.report["rope_cache_write"] == OpReport("xla", "passed", {"broken": "13 tokens: error inf, allowed 1e-05"})
    (warning,) = warnings(caplog)
    assert "rope_cache_write by broken" in warning and "xla takes its place" in warning


def lost(*_, **__):
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


def test_an_error_of_the_driver_after_which_the_device_answers_is_that_of_one_program(choose, implementations):
    names = implementations(broken=types.SimpleNamespace(paged_attention=lost, paged_decode=lost), good=numpy_attention())
    assert choose(names).kernels.paged_attention == "good"


def test_an_error_that_loses_the_device_ends_the_start_and_blames_one_implementation(
    choose, implementations, tmp_path, monkeypatch
):
    monkeypatch.setattr(kernel_check, "_device_answers", lambda: False)
    names = implementations(broken=types.SimpleNamespace(paged_attention=lost, paged_decode=lost), good=numpy_attention())
    rest = {"rope_cache_write": ("triton", "xla"), "sampling": ("xla",)}
    with pytest.raises(KernelCheckError, match="broken made NVIDIA Test unusable.*ILLEGAL_ADDRESS.*start again"):
        choose(names, rest=rest)
    assert [path.name.split("-")[1] for path in (tmp_path / "kernel_checks").iterdir()] == ["broken"]
    assert choose(names).kernels.paged_attention == "good", "the next start does without it"


def test_a_program_that_hangs_is_given_up(choose, implementations, monkeypatch):
    from pallas_kernels.checking import check

    monkeypatch.setattr(check, "RUN_SECONDS", 0.5)
    released = threading.Event()

    def wait(out, _):
        released.wait(20)
        return out

    names = implementations(hangs=numpy_attention(wait), good=numpy_attention())
    with pytest.raises(KernelCheckError, match="hangs made NVIDIA Test unusable.*does not end within 0.5 s"):
        choose(names)
    released.set()
    monkeypatch.setattr(check, "RUN_SECONDS", 60)
    assert choose(names).kernels.paged_attention == "good"


class Start:
    """A start whose programs are not traced, and compiled as long as `gate` is closed."""

    def __init__(self, monkeypatch, tmp_path, names):
        self.made: list[str] = []
        """The attention of each program, in the order in which they were begun."""
        self.begun, self.gate, self.runners = threading.Event(), threading.Event(), []
        start = ModelRunner.start_programs

        def start_programs(runner, *, rare_later):
            self.runners.append(runner)
            start(runner, rare_later=rare_later)

        def lower(shapes, key):
            self.made.append(shapes.functions.kernels.paged_attention)
            self.begun.set()
            return types.SimpleNamespace(compile=lambda compiler_options: self.gate.wait(30))

        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
        monkeypatch.setattr(ModelRunner, "start_programs", start_programs)
        monkeypatch.setattr(StepPrograms, "lower", lower)
        monkeypatch.setattr(kernel_check.KernelCheck, "_wants_check", lambda self, op: op == "paged_attention")
        monkeypatch.setattr(early_programs, "candidates", lambda *_, **__: {"paged_attention": names, **PLAIN_REST})

    def prepare(self, **options):
        config = EngineConfig.from_options(model=str(DIRECTORY), **{**engines.SMALL, "warmup": "background", **options})
        return Prepared.of(config, DIRECTORY, (), StartTimes(), starts=True)


def test_programs_are_made_while_their_kernels_are_checked(implementations, monkeypatch, tmp_path):
    def seen(out, _):
        assert start.begun.wait(20), "no program was begun"
        return out

    start = Start(monkeypatch, tmp_path, implementations(mosaic=numpy_attention(seen)))
    prepared = start.prepare()
    assert start.runners == [prepared.runner]
    start.gate.set()
    prepared.runner.close()


def test_programs_of_a_kernel_that_fails_the_check_are_dropped(implementations, monkeypatch, tmp_path):
    def wrong(out, _):
        assert start.begun.wait(20)
        start.gate.set()  # what is being compiled is waited for
        return out * 0

    start = Start(monkeypatch, tmp_path, implementations(mosaic=numpy_attention(wrong), triton=numpy_attention()))
    prepared = start.prepare()
    (dropped,) = start.runners
    runner = prepared.runner
    assert (
        runner is not dropped
        and prepared.kernels.paged_attention == "triton" == prepared.config.compile.attention_implementation
    )
    num_made = len(start.made)
    assert set(start.made) == {"mosaic"}
    runner.start_programs(rare_later=True)
    runner.programs.wait(runner.shapes.start_keys())
    assert set(start.made[num_made:]) == {"triton"}
    runner.close()


def test_a_start_that_is_given_up_waits_for_no_program(implementations, monkeypatch, tmp_path):
    """A device that hangs may hold them for ever."""
    monkeypatch.setattr(kernel_check, "_device_answers", lambda: False)
    loses = types.SimpleNamespace(paged_attention=lost, paged_decode=lost, supports=lambda **_: True)
    start = Start(monkeypatch, tmp_path, implementations(mosaic=loses))
    with pytest.raises(KernelCheckError, match="mosaic made .* unusable"):
        start.prepare()
    (runner,) = start.runners
    runner.programs.shutdown()  # as at the exit
    assert not start.gate.is_set()
    start.gate.set()


@pytest.mark.parametrize("options", [{"warmup": "lazy"}, {"tensor_parallel_size": 2}])
def test_programs_wait_for_the_verdict_where_they_must(implementations, monkeypatch, tmp_path, options):
    start = Start(monkeypatch, tmp_path, implementations(mosaic=numpy_attention()))
    start.prepare(**options).runner.close()
    assert not start.runners


def test_on_a_cpu_nothing_is_checked_unless_asked(choose, no_check, tmp_path):
    no_check()
    cpu = jax.devices("cpu")[0]
    chosen = choose(("xla",), device=cpu)
    assert {report.check for report in chosen.report.values()} == {"not run"} and not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="was checked"):
        choose(("xla",), device=cpu, mode="always")


def test_kernels_are_checked_in_the_shapes_of_a_device(model):
    config, model_config, plan = model
    split = model_config.for_tensor_parallel(2)
    shapes = kernel_shapes.shapes_of(config.replace(tensor_parallel_size=2), split, plan)
    [attention] = shapes["paged_attention"]
    whole = model_config.layers[0].attention
    assert attention.num_kv_heads == whole.num_kv_heads // 2
    assert attention.num_groups == whole.group_size
    assert attention.table_width == -(-plan.max_model_len // plan.block_size)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_window", "mistral_window"])
def test_every_kind_of_layer_is_checked(name):
    config = EngineConfig.from_options(model=str(goldens.golden(name).directory), **engines.SMALL)
    prepared = Prepared.of(config, goldens.golden(name).directory, (), StartTimes())
    shapes = kernel_shapes.shapes_of(prepared.config, prepared.model_config, prepared.plan)
    windows = [layer.window for shape in shapes["paged_attention"] for layer in shape.layers]
    assert sorted(windows, key=str) == sorted({layer.attention.window for layer in prepared.model_config.layers}, key=str)


def test_a_model_that_no_kernel_takes_on_a_gpu_is_told(caplog):
    """The kernels for attention take 16 bits alone."""
    directory = goldens.golden("llama_gqa").directory
    prepared = Prepared.of(EngineConfig.from_options(model=str(directory), **engines.SMALL), directory, (), StartTimes())
    for on_gpu in (False, True):
        found = kernel_choice.candidates("auto", prepared.model_config, prepared.plan, prepared.mesh, on_gpu=on_gpu)
        assert found["sampling"] == ("xla",)
        assert ("with heads of width 8 in float32: plain JAX computes all operations" in caplog.text) == on_gpu


def test_wide_heads_have_kernels_of_their_own(monkeypatch, caplog):
    """Layers with other heads keep theirs, and the default for wide ones is a kernel only where it was verified."""
    directory = goldens.golden("gemma4").directory
    prepared = Prepared.of(EngineConfig.from_options(model=str(directory), **engines.SMALL), directory, (), StartTimes())
    layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, head_dim=256 if layer.attention.window else 512)
        )
        for layer in prepared.model_config.layers
    ]
    model = dataclasses.replace(prepared.model_config, layers=tuple(layers), dtype="bfloat16", kv_cache_dtype="bfloat16")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(device_kind="H100", platform="cpu")])

    def found(wanted, is_verified):
        monkeypatch.setattr(kernel_choice, "is_verified", lambda kind, op, **_: is_verified or op != "wide_attention")
        return kernel_choice.candidates(wanted, model, prepared.plan, prepared.mesh, on_gpu=True)

    for wanted, is_verified in (("auto", True), ("auto", False), ("triton", False), ("xla", True)):
        caplog.clear()
        names = found(wanted, is_verified)
        has_kernel = wanted != "xla"
        assert ("triton" in names["paged_attention"]) == ("triton" in names["rope_cache_write"]) == has_kernel
        assert ("triton" in names["wide_attention"]) == (has_kernel and (is_verified or wanted != "auto"))
        assert ("heads of width 512: plain JAX computes their attention" in caplog.text) == (
            not is_verified and wanted == "auto"
        )
    shapes = kernel_shapes.shapes_of(prepared.config, model, prepared.plan)
    assert {each.head_dim for each in shapes["paged_attention"]} == {256}
    assert {each.head_dim for each in shapes["wide_attention"]} == {512}


def test_a_mixture_has_kernels_that_are_checked_in_its_shapes(tmp_path):
    directory = goldens.golden("qwen3_moe").directory
    config = EngineConfig.from_options(model=str(directory), **engines.SMALL)
    prepared = Prepared.of(config, directory, (), StartTimes())
    model = prepared.model_config
    found = kernel_choice.candidates("triton", model, prepared.plan, prepared.mesh, on_gpu=False)
    assert found["expert_choice"] == found["grouped_matmul"] == ("triton", "xla")
    shapes = kernel_shapes.shapes_of(prepared.config, model, prepared.plan)
    assert shapes["expert_choice"] == (expert_choice.Shapes(8, Rule(3, renormalize=True)),)
    check = kernel_check.KernelCheck(
        found,
        shapes,
        mode="always",
        mesh=None,
        device=jax.devices("cpu")[0],
        store=VerdictStore(tmp_path),
        named=frozenset(),
        ops=("expert_choice",),
    )
    assert check.run().report == {"expert_choice": OpReport("triton", "passed")}


@pytest.mark.parametrize(
    ("golden", "op", "wanted"),
    [
        ("qwen3_next", "gated_delta", gated_delta.Shapes("float32", 2, 2, 16, 8)),
        ("qwen3_next", "delta_decode", delta_decode.Shapes("float32", 2, 2, 16, 8)),
        ("granite_hybrid", "state_space", state_space.Shapes("float32", 1, 4, 12, 16)),
    ],
)
def test_states_by_row_have_kernels_that_are_checked_in_their_shapes(golden, op, wanted):
    directory = goldens.golden(golden).directory
    config = EngineConfig.from_options(model=str(directory), **engines.SMALL, tensor_parallel_size=2)
    prepared = Prepared.of(config, directory, (), StartTimes())
    model = prepared.model_config
    found = kernel_choice.candidates("triton", model, prepared.plan, prepared.mesh, on_gpu=False)
    assert found[op] == ("triton", "xla")
    shapes = kernel_shapes.shapes_of(prepared.config, model, prepared.plan)
    assert shapes[op] == (wanted,)


@pytest.mark.slow
def test_fp8_weights_have_kernels_that_are_checked_in_their_shapes(tmp_path, monkeypatch):
    options = {**engines.SMALL, "dtype": "bfloat16"}

    def found(name="qwen3", wanted="triton", **more):
        config = EngineConfig.from_options(model=str(goldens.golden(name).directory), **options | more)
        prepared = Prepared.of(config, goldens.golden(name).directory, (), StartTimes())
        model = prepared.model_config
        shapes = kernel_shapes.shapes_of(prepared.config, model, prepared.plan)["quantize"]
        return kernel_choice.candidates(wanted, model, prepared.plan, prepared.mesh, on_gpu=wanted == "auto"), shapes

    candidates, shapes = found(quantization="fp8")
    assert candidates["quantize"] == ("triton", "xla")
    assert shapes == (quantize.Shapes("bfloat16", width=64, of_heads=128, of_mlp=96, eps=1e-6),)
    plain, no_shapes = found()
    assert "quantize" not in plain and no_shapes == ()
    of_two, (shapes_of_one_of_two,) = found(quantization="fp8", tensor_parallel_size=2)
    assert of_two["quantize"] == ("triton", "xla") and (shapes_of_one_of_two.of_heads, shapes_of_one_of_two.of_mlp) == (64, 48)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(kernel_choice, "is_verified", lambda *_, **__: True)
        assert found(wanted="auto", quantization="fp8")[0]["quantize"] == ("triton", "xla")
        assert found(wanted="auto", quantization="fp8", tensor_parallel_size=2)[0]["quantize"] == ("xla",)
    assert "quantize" not in found("deepseek_v2", quantization="fp8")[0]
    assert found(quantization="fp8", dtype="float16")[0]["quantize"] == ("xla",)
    check = kernel_check.KernelCheck(
        candidates,
        {"quantize": shapes},
        mode="always",
        mesh=None,
        device=jax.devices("cpu")[0],
        store=VerdictStore(tmp_path),
        named=frozenset(),
        ops=("quantize",),
    )
    assert check.run().report == {"quantize": OpReport("triton", "passed")}


@pytest.mark.parametrize("encoder", [{"vision": VISION}, {"audio": Audio(80, 50, 144, 2, 2, MLP(32))}])
@pytest.mark.slow
def test_an_encoder_has_a_kernel_that_is_checked_in_its_shapes(tmp_path, monkeypatch, encoder):
    config = EngineConfig.from_options(model=str(DIRECTORY), **engines.SMALL)
    prepared = Prepared.of(config, DIRECTORY, (), StartTimes())
    text, plan, mesh = prepared.model_config, prepared.plan, prepared.mesh
    assert "segment_attention" not in prepared.kernels.by_op()
    assert "segment_attention" not in kernel_choice.candidates("triton", text, plan, mesh, on_gpu=False)
    assert kernel_shapes.shapes_of(config, text, plan)["segment_attention"] == ()
    model = dataclasses.replace(text, **encoder)
    assert kernel_choice.candidates("xla", model, plan, mesh, on_gpu=False)["segment_attention"] == ("xla",)
    found = kernel_choice.candidates("triton", model, plan, mesh, on_gpu=False)
    assert found["segment_attention"] == ("triton", "xla")
    monkeypatch.setattr(kernel_choice, "attention_candidates", lambda *_, **__: {"paged_attention": ("triton", "xla")})
    by_default = kernel_choice.candidates("auto", model, plan, mesh, on_gpu=True)["segment_attention"]
    assert by_default == ("triton", "xla")
    shapes = kernel_shapes.shapes_of(config, model, plan)
    assert shapes["segment_attention"] == (segment_attention.Shapes("float32", 2, 72),)
    device, store = jax.devices("cpu")[0], VerdictStore(tmp_path)
    check = kernel_check.KernelCheck(
        found, shapes, mode="always", mesh=None, device=device, store=store, named=frozenset(), ops=("segment_attention",)
    )
    chosen = check.run()
    assert chosen.report == {"segment_attention": OpReport("triton", "passed")}
    assert chosen.kernels.segment_attention == "triton"


def test_attention_within_images_is_checked_in_parts(monkeypatch):
    config = EngineConfig.from_options(model=str(DIRECTORY), **engines.SMALL)
    prepared = Prepared.of(config, DIRECTORY, (), StartTimes())
    vision = Vision("gemma3", 9, 14, 2, 32, 2, 2, 32, output_size=64, position_grid=6, attends_within=True)
    model = dataclasses.replace(prepared.model_config, vision=vision)
    plan = dataclasses.replace(prepared.plan, num_queries=3)
    found = kernel_shapes.shapes_of(config, model, plan)["paged_attention"]
    assert [(shapes.num_parts, shapes.num_queries) for shapes in found] == [(1, 3), (2, 1)]
    monkeypatch.setattr(paged_attention, "missing", lambda name: None)
    check = partial(kernel_choice.attention_implementation, "jax_triton", model, 16, on_gpu=True)
    with pytest.raises(ConfigError, match=r"'jax_triton', which does not take .* and keys in parts; use auto"):
        check(has_part=model.attends_within_images)


def test_adapters_have_a_kernel_that_is_checked_in_the_shapes_of_their_products():
    directory = goldens.golden("llama_gqa").directory
    adapters = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    config = EngineConfig.from_options(model=str(directory), **engines.SMALL, **adapters, tensor_parallel_size=2)
    prepared = Prepared.of(config, directory, (), StartTimes())
    model, adaptation = prepared.model_config, prepared.features.adaptation
    assert prepared.kernels.lora == "xla"
    found = kernel_choice.candidates("triton", model, prepared.plan, prepared.mesh, on_gpu=False, has_adapters=True)
    assert found["lora"] == ("triton", "xla")
    shapes = kernel_shapes.shapes_of(prepared.config, model, prepared.plan, adaptation)["lora"]
    layer, width = model.layers[0], model.hidden_size
    part, F = layer.attention, layer.mlp.width
    K, G, H = part.num_kv_heads // 2, part.group_size, part.head_dim
    products = {(K * G * H, (width,)), (width, (G * H * K, H * K, H * K)), (width, (F // 2, F // 2)), (F // 2, (width,))}
    assert {(s.width, tuple(s.parts.before * size * s.parts.after for size in s.parts.sizes)) for s in shapes} == products
    assert {(s.dtype, s.adapter_dtype, s.num_slots, s.rank) for s in shapes} == {(model.dtype, model.dtype, 2, 16)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_an_engine_of_interpreted_kernels_is_checked_and_says_so(monkeypatch, tmp_path, capsys):
    from jaxllm.cli import env as env_command
    from pallas_kernels.checking.compiling import Compiler

    def submit(self, function, *shapes, donate=()):
        options = {"xla_backend_optimization_level": 0}  # quick to compile, not quick to run
        return self.pool.submit(jax.jit(function).lower(*shapes).compile, options)

    monkeypatch.setattr(Compiler, "submit", submit)
    monkeypatch.setattr(attention_at_start, "_MANY_ITEMS", 1)  # an interpreter has no cores to keep busy
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    options = {**engines.SMALL, "attention_implementation": "triton", "kernel_check": "always"}
    core = EngineCore(EngineConfig.from_options(model=str(goldens.golden("llama_head_dim").directory), **options))
    assert core.kernels == {op: OpReport("triton", "passed") for op in ("paged_attention", "rope_cache_write", "sampling")}
    assert "kernel check" in core.start_times.seconds
    core.shutdown()
    found = env_command.gather()["kernel checks"]
    assert len(found) == 3 and all(text.startswith("passed") for text in found.values())
    assert {name.rpartition(" (")[0] for name in found} == {f"{op} triton" for op in core.kernels}
    assert Path(tmp_path / env.KERNEL_VERDICTS).is_dir()


@pytest.mark.parametrize(
    ("size", "takes", "reach", "expected"),
    [
        (1, True, True, ("xla",)),
        (2, True, True, ("peer", "xla")),
        (2, True, False, ("xla",)),
        (2, False, True, ("xla",)),  # an older JAX, another GPU, a type that has no kernel
    ],
)
def test_devices_exchange_through_memory_where_kernels_take_the_model_and_reach_it(
    model, monkeypatch, size, takes, reach, expected
):
    monkeypatch.setattr(kernel_choice.collectives, "supports", lambda implementation, op, **case: takes)
    monkeypatch.setattr(kernel_choice.collectives, "peers_can_access", lambda devices: reach)
    assert kernel_choice._collectives(model[1], make_mesh(size), on_gpu=True) == expected


@pytest.mark.parametrize("is_verified", [False, True])
def test_fp8_products_are_computed_in_the_new_way_where_that_was_verified_or_is_named(monkeypatch, is_verified):
    monkeypatch.setattr(kernel_choice, "is_verified", lambda _, op: is_verified and op == "quantize")
    assert kernel_choice.may_quantize_by_kernels("auto", on_gpu=True) is is_verified
    assert not kernel_choice.may_quantize_by_kernels("auto", on_gpu=False)
    assert kernel_choice.may_quantize_by_kernels("mosaic", on_gpu=True)
    assert not kernel_choice.may_quantize_by_kernels("xla", on_gpu=True)
    assert platform_policy(on_gpu=True).max_weight_only_rows > 0
    assert platform_policy(on_gpu=True, has_weight_only=False).max_weight_only_rows == 0


def test_products_in_fp8_are_quantised_by_kernels_in_the_widths_of_a_device():
    model = load_model_config(goldens.FOLDER / "llama_gqa", dtype="bfloat16", quantization="fp8")
    assert kernel_choice.quantized_widths(model, 1) == (64, 96)
    assert kernel_choice.quantized_widths(model.for_tensor_parallel(2), 2) == (64, 32, 48)
    assert kernel_choice.quantized_widths(load_model_config(goldens.FOLDER / "llama_gqa"), 1) == ()
