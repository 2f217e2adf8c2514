"""Requests for data-parallel ranks, and their host 0 as a process: python -m tests.helpers.rank_scenario DIRECTORY OPTIONS"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.request import EngineCoreRequest, FinishReason, Grammar
from jaxllm.request_options import RequestOptions
from tests.helpers import engines, every_kind, goldens
from tests.helpers.stage_scenario import numbers, print_answers

NAME = "qwen3_moe"
OPTIONS: dict[str, Any] = {
    **engines.SMALL,
    "max_num_batched_tokens": 32,  # prompts come in chunks
    "token_buckets": (32,),
    "num_gpu_blocks_override": 9,  # and requests are preempted
    "expert_load": True,
}
PROMPTS = [result.prompt for result in goldens.golden(NAME).results]


def options(directory: Path) -> dict[str, Any]:
    """Options of an engine with the tokenizer of a directory, and the model in it (`goldens.of_one_layer`)."""
    return {**OPTIONS, "tokenizer": str(directory), "model": str(directory / NAME)}


def requests() -> list[EngineCoreRequest]:
    """Requests of every kind, but for penalties (see `stage_scenario`), with a grammar of this tokenizer's letters."""
    found = [each for each in every_kind.requests(PROMPTS) if each.request_id != "penalties"]
    return [replace(each, grammar=Grammar("start: /[a-c]{30}/")) if each.grammar else each for each in found]


def expected(core: EngineCore) -> dict[str, list[float]]:
    """The answers of one device."""
    return {name: [*answer.tokens, *numbers(answer)] for name, answer in engines.run(core, requests()).items()}


def answers(core: EngineCore) -> list[dict[str, list[float]]]:
    """Answers to the same requests: wherever they go; all in the last data-parallel rank, which another host has; after sleep in
    the midst of steps; and while the plan of a step with others fails, so that steps in flight are forgotten."""
    last = core.config.parallel.num_ranks - 1
    in_last = [replace(each, options=RequestOptions(data_parallel_rank=last)) for each in requests()]
    found = [engines.run(core, requests())]
    before = np.sum(core.expert_load()["tokens"])
    found.append(engines.run(core, in_last))
    assert np.sum(core.expert_load()["tokens"]) > before and core.stats().num_preemptions > 0
    for request in in_last[2:5]:
        core.add_request(request)
    for _ in range(6):
        core.step()
    core.sleep(1)
    core.wake_up()
    core.step()
    found.append(engines.run(core, requests()))
    lost = engines.request("lost", PROMPTS[0], max_tokens=8)
    with injected("allocate:id=lost:error"):
        found.append(engines.run(core, [*requests(), lost]))
    assert found[-1].pop("lost").finish_reason is FinishReason.ERROR and core.stats().num_retried_steps == 1
    core.check_integrity()
    assert core.config.speculative.speculative_config is None or core.stats().num_accepted_tokens > 0
    if core.config.parallel.enable_eplb:
        slots = core._expert_load._layout.slots  # type: ignore[union-attr]
        assert any((places[:8] != np.arange(8)).any() for places in slots), "no expert has moved"
    return [{name: [*answer.tokens, *numbers(answer)] for name, answer in run.items()} for run in found]


if __name__ == "__main__":
    print_answers(options, answers)
