"""Compiler options of a step's program, and its memory."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.foreseen import Needs
from jaxllm.kernel_policy import GPU
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import TENSOR
from jaxllm.parallel.shards import ONE_DEVICE
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner import step_programs
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.features.adapters import Adapters
from jaxllm.runner.features.drafts.step import Drafts
from jaxllm.runner.features.pooling import PoolingFeature
from jaxllm.runner.features.prompt_logprobs import PromptLogprobsFeature
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.programs.decode import Decode
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.rows import LogprobsKind
from jaxllm.runner.step import StepFunctions
from jaxllm.runner.step_programs import StepPrograms
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams
from tests.helpers import goldens
from tests.helpers.engines import make_core

NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}
APART = {"xla_gpu_dot_merger_threshold_mb": "0"}
BESIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no collective kernels to leave out")
@pytest.mark.parametrize(
    ("platform", "num_devices", "rows", "adapted", "options"),
    [
        ("gpu", 1, 8, False, APART),
        ("gpu", 1, 64, False, APART | CUBLAS),
        ("gpu", 2, 8, False, APART | NCCL),
        ("cuda", 4, 64, True, APART | NCCL | CUBLAS),
        ("gpu", 1, 8, True, APART | BESIDE),
        ("cpu", 2, 64, True, {}),
    ],
)
def test_what_the_compiler_is_told_of_products_all_reduces_and_adapters(platform, num_devices, rows, adapted, options) -> None:
    devices = np.array([SimpleNamespace(platform=platform)] * num_devices)
    mesh = SimpleNamespace(devices=devices, local_devices=devices, size=num_devices, shape={TENSOR: num_devices})
    adapters = Adapters(SimpleNamespace(changes_logits=True), None, slice(0), Kernels())
    functions = SimpleNamespace(features=(adapters, PromptLogprobsFeature()))
    programs = SimpleNamespace(
        mesh=mesh,
        buckets=SimpleNamespace(policy=GPU),
        functions=functions,
        kind_of=lambda key: ProgramKind(),
        model=SimpleNamespace(widens_in_products=False),
    )
    assert StepPrograms.compiler_options(programs, ProgramKey("decode", rows, features=("adapters",) * adapted)) == options


@pytest.mark.parametrize(
    ("family", "router", "num_devices", "rows", "is_told"),
    [
        ("qwen3_next", "xla", 1, 8, True),  # shared experts and linear attention
        ("qwen3_5", "xla", 1, 8, True),  # linear attention alone
        ("deepseek_v2_lite", "xla", 1, 16, True),
        ("qwen3_next", "xla", 1, 64, False),
        ("qwen3_next", "xla", 2, 8, False),
        ("qwen3_moe", "triton", 1, 8, True),  # a router and the norm of experts
        ("qwen3_moe", "xla", 1, 8, False),  # the router takes what leaves the norm
        ("qwen3_moe", "triton", 2, 8, False),
        ("llama_gqa", "xla", 1, 8, False),
    ],
)
def test_branches_of_layers_run_concurrently_in_decodes_of_few_rows_on_one_gpu(
    family, router, num_devices, rows, is_told
) -> None:
    programs = SimpleNamespace(
        functions=SimpleNamespace(kernels=Kernels(router_scores=router)),
        mesh=SimpleNamespace(size=num_devices),
        buckets=SimpleNamespace(policy=GPU),
        model=load_model_config(goldens.FOLDER / family),
    )
    assert Decode().compiler_options(programs, ProgramKey("decode", rows)) == (BESIDE if is_told else {})


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_programs_that_widen_weights_on_a_cpu_use_its_widest_vectors(quantization, monkeypatch) -> None:
    programs = SimpleNamespace(
        mesh=SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")])),
        model=load_model_config(goldens.FOLDER / "llama_gqa", quantization=quantization),
    )
    wanted = {} if quantization is None else {"xla_cpu_prefer_vector_width": "512"}
    assert StepPrograms.compiler_options(programs, ProgramKey("decode", 8)) == wanted
    monkeypatch.setattr(step_programs, "_CPU_OPTIONS", {"xla_cpu_unknown": "512"})
    assert StepPrograms.compiler_options(programs, ProgramKey("decode", 8)) == {}, "XLA would refuse the program"


def engine_programs(
    *, num_drafts: int = 0, num_lookahead: int = 0, num_groups: int = 1, max_rows: int = 200, has_adapters: bool = False
) -> StepPrograms:
    """Without a model: their keys and layouts."""
    config = resolve_platform_defaults(
        EngineConfig.from_options(max_num_seqs=max_rows, max_num_batched_tokens=512), on_gpu=True
    )
    drafter = SimpleNamespace(num_drafts=num_drafts, num_lookahead=num_lookahead, proposes=True, needs_history=True)
    drafts = (Drafts(drafter, GPU, None, 1, 0, 0),) if num_drafts else ()
    adapters = Adapters(SimpleNamespace(changes_logits=True), None, slice(0), Kernels())
    model = SimpleNamespace(generates=True, pooling=SimpleNamespace(pooling_type="mean"), classifier=None, num_layers=1)
    programs = object.__new__(StepPrograms)
    functions = StepFunctions(
        merge=None,
        shards=ONE_DEVICE,
        cache=SimpleNamespace(groups=[None] * num_groups, block_size=4),
        max_rows=max_rows,
        kernels=Kernels(),
        features=(
            *drafts,
            *((adapters,) if has_adapters else ()),
            PromptLogprobsFeature(),
            PoolingFeature(model, lambda params: None),
        ),
        num_logprobs=1,
        logprobs_mode="raw_logprobs",
    )
    values = {"functions": functions, "model": model, "layers": range(1), "full_logprobs": False}
    for name, value in {**values, "buckets": Buckets.choose(config, GPU, num_drafts=num_drafts)}.items():
        object.__setattr__(programs, name, value)
    return programs


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_start_waits_for_few_programs_that_can_run_every_common_step(has_adapters) -> None:
    programs = engine_programs(has_adapters=has_adapters)
    first, buckets = set(programs.first_keys()), programs.buckets
    sizes = {kind: {key.size for key in first if key.kind == kind} for kind in ("forward", "decode", "sample")}
    assert sizes == {"forward": {128, 512}, "decode": {8, 64, 200}, "sample": {8, 200}}
    assert {key.variant for key in first if key.kind in ("decode", "sample")} == {Variant.RANDOM}
    later = programs.keys_after_first()
    assert first | set(later) == set(programs.start_keys()) and len(first) + len(later) == len(programs.start_keys())
    is_greedy_draw = [key.kind != "forward" and key.variant == Variant.GREEDY for key in later]
    assert is_greedy_draw == sorted(is_greedy_draw), "those that random ones do as well come last"
    choice = ProgramChoice(buckets, is_there=first.__contains__, reach=None)
    for features in programs.inputs.sets:
        for size in buckets.tokens:
            assert ProgramKey("forward", choice.tokens(size, features), features=features) in first
        for size in buckets.decode_rows:
            found = choice.decode(size, Variant.GREEDY, 1, features)
            assert ProgramKey("decode", *found, features=features) in first


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        ({}, set()),
        ({"temperature": 0.0}, set()),
        ({"logprobs": 1}, {("sample", Variant.RANDOM, LogprobsKind.TOP)}),
        ({"logprob_token_ids": [3]}, {("sample", Variant.RANDOM, LogprobsKind.NAMED)}),
        (
            {"presence_penalty": 1.0},
            {
                ("sample", Variant.FULL, LogprobsKind.NONE),
                *((kind, Variant.GREEDY, LogprobsKind.NONE) for kind in ("new_state", "admit")),
            },
        ),
        ({"prompt_logprobs": 1}, {("prompt_logprobs", Variant.GREEDY, LogprobsKind.NONE)}),
        ({"is_masked": True}, {("sample", Variant.MASKED, LogprobsKind.NONE)}),
        ({"pooling": True}, {(kind, Variant.GREEDY, LogprobsKind.NONE) for kind in ("pool", "add_up")}),
    ],
)
def test_which_rare_programs_a_request_needs_follows_from_its_parameters(params, kinds) -> None:
    params = dict(params)
    pooling, is_masked = PoolingParams() if params.pop("pooling", False) else None, params.pop("is_masked", False)
    programs = engine_programs()
    wanted = programs.wanted_by(Needs(SamplingParams(**params), pooling, is_masked))
    found = programs.keys_of(wanted)
    is_sampled_apart = any(kind == "sample" for kind, _, _ in kinds)
    if is_sampled_apart:
        kinds = {*kinds, ("forward_rows", Variant.GREEDY, LogprobsKind.NONE)}
    assert {(key.kind, key.variant, key.logprobs) for key in found} == kinds
    assert set(found) <= set(programs.rare_keys()) and [key.size for key in found] == sorted(key.size for key in found)
    largest = {"sample": programs.buckets.sample_rows[-1], "new_state": 0, "admit": 0}
    awaited = [key for key in found if key.size == largest.get(key.kind)]
    assert sorted(programs.awaited_keys(wanted)) == sorted((key,) for key in awaited), "others have sizes that follow steps"


@pytest.mark.parametrize(("num_drafts", "has_adapters"), [(0, False), (3, False), (3, True)])
def test_each_program_of_an_engine_has_a_file_of_its_own(tmp_path, num_drafts, has_adapters) -> None:
    programs = engine_programs(num_drafts=num_drafts, has_adapters=has_adapters)
    keys, store = programs.all_keys(), ProgramStore(tmp_path, jax.devices(), writable=False, strict=False)
    assert len({store._path(key) for key in keys}) == len(set(keys)) == len(keys)
    assert any(key.width > 1 for key in keys) == (num_drafts > 0)
    assert any(key.features for key in keys) == has_adapters


@pytest.mark.parametrize(
    ("num_drafts", "num_lookahead", "most_new_blocks"), [(0, 0, 1), (1, 0, 1), (3, 0, 1), (3, 2, 2), (5, 5, 3)]
)
def test_a_decode_has_room_for_the_new_blocks_of_its_rows(num_drafts, num_lookahead, most_new_blocks) -> None:
    """In blocks of four tokens: those of the step and those that the drafter writes behind them."""
    programs = engine_programs(num_drafts=num_drafts, num_lookahead=num_lookahead, num_groups=2)
    assert programs.num_updates == 2 * most_new_blocks
    assert Decode().layout(programs, ProgramKey("decode", 8)).num_updates == 8 * 2 * most_new_blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen2", {"dtype": "float32", "kv_cache_dtype": "fp8"}),
        ("qwen2_window", {"dtype": "float32"}),  # two layers that share their arrays
    ],
)
def test_no_step_copies_the_cache_on_a_cpu(model: str, options: dict[str, str]) -> None:
    core = make_core(model, num_gpu_blocks_override=8192, **options)
    try:
        pool_bytes = core.runner.caches[0].nbytes
        for key in (ProgramKey("forward", 112), ProgramKey("decode", 4)):
            used = core.runner.programs.get(key).memory_analysis()
            assert used.alias_size_in_bytes >= len(core.runner.caches) * pool_bytes
            assert used.temp_size_in_bytes < pool_bytes, f"{key} needs {used.temp_size_in_bytes} bytes"
    finally:
        core.shutdown()
