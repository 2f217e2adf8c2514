"""The programs of an engine with data-parallel ranks: all are there after the warm-up, and each is compiled or loaded once."""

from dataclasses import replace

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import stage_plans
from jaxllm.engine.prepare import Prepared
from jaxllm.progress import Progress
from jaxllm.request import Grammar
from jaxllm.request_options import RequestOptions
from jaxllm.runner.runner import ModelRunner
from jaxllm.speculative import control
from jaxllm.start_times import StartTimes
from tests.data_parallel.conftest import NAME
from tests.helpers import engines, goldens
from tests.helpers.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_COMPILED: list[str] = []


def _record(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_record)
KINDS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 4},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
    {"logprob_token_ids": [1, 2]},
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"repetition_penalty": 1.3, "logprobs": 2},
]


def requests():
    """Requests of every kind, with prompts of several lengths."""
    found = [
        engines.request(f"{i} {length}", [1 + (i + 3 * j) % 90 for j in range(length)], max_tokens=length % 7 + 2, **params)
        for i, params in enumerate(KINDS)
        for length in (1, 13, 40)
    ]
    masked = engines.request("masked", [3, 4, 5], max_tokens=8)
    return [
        *found,
        replace(masked, grammar=Grammar("start: /[a-f]+/")),
        replace(
            masked, request_id="masked too", grammar=Grammar("start: /[a-f]+/"), options=RequestOptions(data_parallel_rank=1)
        ),
        engines.pooling_request("vector", [5] * 30),
    ]


def check_n_grams(core):
    """N-grams propose drafts in both data-parallel ranks, in one while the other has nothing, and from cached prefixes."""
    results = goldens.golden(NAME).results
    before = core.stats()
    for ranks in ((0, 1), (1,), (0, 1)):
        wanted = [engines.request(str(i), result.prompt, max_tokens=64) for i, result in enumerate(results)]
        pinned = [
            replace(each, options=RequestOptions(data_parallel_rank=ranks[i % len(ranks)])) for i, each in enumerate(wanted)
        ]
        found = engines.run(core, pinned)
        assert [answer.tokens for answer in found.values()] == [result.tokens for result in results]
    after = core.stats()
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert num_accepted > 6 and len(after.accepted_per_position) == 1
    assert sum(after.accepted_per_position) - sum(before.accepted_per_position or (0,)) == num_accepted


def test_nothing_compiles_after_the_warm_up_and_the_next_start_loads_everything(tmp_path, monkeypatch):
    """With drafts, whose engines have the programs of others and more."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(control.StepTimes, "level_to_time", lambda self: None)  # drafts in all steps
    options = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 6, "num_redundant_experts": 2},
        "tokenizer": str(write_tokenizer(tmp_path, "ascii")),
        "warmup": "background",
        "compilation_cache": True,
        "block_size": 8,
        "num_gpu_blocks_override": 20,
        "max_num_batched_tokens": 48,
        "decode_buckets": (4,),  # in several widths
        "token_buckets": (48,),
        "speculative_config": {**NGRAM, "num_speculative_tokens": 1},
    }
    core = engines.make_core(NAME, **options)
    core.finish_compiling()
    engines.run(core, [each for each in requests() if each.grammar is not None])  # compiles the grammar
    num_compiled = len(_COMPILED)
    with jax.transfer_guard_host_to_device("disallow"):  # arrays go to the devices by device_put and never in passing
        answers = engines.run(core, requests())
    assert core.num_compiled_after_warmup == 0
    assert core._expert_load._layout.slots[0].tolist() != [*range(8), 0, 1], "no expert moved"
    assert len(_COMPILED) == num_compiled, "something compiled that is not one of the engine's programs"
    check_n_grams(core)
    num_programs = core.runner.programs.num_compiled
    core.check_integrity()
    core.shutdown()

    again = engines.make_core(NAME, **options)
    again.finish_compiling()
    assert (again.runner.programs.num_compiled, again.runner.programs.num_loaded) == (0, num_programs)
    found = engines.run(again, requests())
    assert {name: answer.tokens for name, answer in found.items()} == {name: answer.tokens for name, answer in answers.items()}
    again.shutdown()


def test_a_smaller_cache_after_compiling_keeps_the_weights(monkeypatch):
    """An engine whose largest step needs more than was estimated is made again around the weights that it has."""
    directory = goldens.golden(NAME).directory
    options = {**engines.SMALL, "model": str(directory), "data_parallel_size": 2, "enable_expert_parallel": True}
    first = Prepared.of(EngineConfig.from_options(**options), directory, (), StartTimes())
    first.runner.load_weights(directory, Progress())
    weights = first.runner.params
    needed = first.plan.work_bytes + 1
    monkeypatch.setattr(ModelRunner, "work_bytes", lambda self: needed)
    real = stage_plans.memory_plan

    def on_a_small_device(*args, work_bytes=None, **options):
        plan = real(*args, work_bytes=work_bytes, **options)
        return plan if work_bytes is None else replace(plan, num_blocks=plan.num_blocks - 5)

    monkeypatch.setattr(stage_plans, "memory_plan", on_a_small_device)
    monkeypatch.setattr(ModelRunner, "start_programs", lambda self, *, rare_later: None)
    second = first.settled(rare_later=True)
    assert second.runner is not first.runner and second.runner.params is weights and not first.runner.params
    second.runner.allocate_caches()
    assert {cache.shape[0] for cache in second.runner.caches} == {2 * second.plan.num_blocks}
    second.runner.close()
    assert all(array.is_deleted() for array in weights)
