"""Whole engines with adapters against the model with the same adapter merged into its weights, computed by dense attention."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.engine.core import EngineCore
from jaxllm.errors import AdapterError
from jaxllm.request_options import RequestOptions
from tests.helpers import engines, goldens, peft_files

NUM_TOKENS = 16
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(128, size=length).tolist() for length in (12, 1, 40)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all layers": {"rank": 4},
    "rank of its own": {
        "rank": 16,
        "rank_pattern": {"o_proj": 3, "up_proj": 8},
        "alpha_pattern": {"q_proj": 5},
        "rslora": True,
    },
    "few modules": {"rank": 8, "targets": ["v_proj", "down_proj"], "layers": [1], "strength": 2.0},
}
"""More than slots. The weights are so large that every answer changes."""
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate"]
MIXED: dict[str, dict[str, Any]] = {
    "parameters of all experts": {"rank": 4, "stacked": True, "rank_pattern": {"experts.down_proj": 3}, "strength": 0.2},
    "modules of each expert": {"rank": 8, "targets": LAYERS, "strength": 0.2},
    "embedding and head": {"rank": 8, "targets": ["embed_tokens", "lm_head", "q_proj"]},
}
HEADS = {f"head of rank {rank}": {"rank": rank, "targets": ["lm_head"], "strength": 2.0} for rank in (3, 4, 8)}
EVERYWHERE = ADAPTERS | {"embedding and head": MIXED["embedding and head"]}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    devices: int
    adapters: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: ADAPTERS)
    lora_target_modules: list[str] | None = None
    stages: tuple[int, ...] = ()
    """The layers of each, in a pipeline."""

    def __str__(self) -> str:
        """Names a test."""
        stages = f" in {len(self.stages)} stages" if self.stages else ""
        return f"{len(self.adapters)} of {self.model} on {self.devices}{stages}"


CASES = [
    Case("qwen3", 1),
    pytest.param(
        Case("llama_tied", 2, EVERYWHERE, [*LAYERS[:7], "embed_tokens", "lm_head"], stages=(1, 1)), marks=pytest.mark.slow
    ),
    # The first stage has no slots.
    pytest.param(Case("llama_tied", 1, HEADS, ["lm_head"], stages=(1, 1)), marks=pytest.mark.slow),
    pytest.param(Case("qwen3_moe", 2, MIXED, [*LAYERS, "embed_tokens", "lm_head"]), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(request, tmp_path_factory):
    """A case, the directory of its adapters, and an engine that has them."""
    case, folder = request.param, tmp_path_factory.mktemp("adapters")
    core = engines.make_core(
        case.model,
        tensor_parallel_size=case.devices,
        pipeline_parallel_size=max(len(case.stages), 1),
        pipeline_parallel_layers=case.stages or None,
        num_gpu_blocks_override=300,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=16,
        lora_target_modules=case.lora_target_modules,
    )
    for seed, (adapter, options) in enumerate(case.adapters.items()):
        add(core, adapter, peft_files.write(folder / adapter, goldens.FOLDER / case.model, seed=seed, **options))
    yield case, folder, core
    core.shutdown()


def add(core: EngineCore, name: str, directory: Path) -> None:
    number = core.add_adapter(name, str(directory))
    while (found := core.adapter_state(number)).state == "loading":
        time.sleep(0.002)
    assert found.state == "ready", found.error


Answers = Mapping[str | None, Sequence[engines.Answer]]


def run(core: EngineCore, names: Sequence[str | None], **params: Any) -> Answers:
    """Every prompt with every adapter, all at once."""
    params = {"max_tokens": NUM_TOKENS, "logprobs": 0, **params}
    requests = [
        dataclasses.replace(engines.request(f"{name} {i}", prompt, **params), options=RequestOptions(adapter=name))
        for i, prompt in enumerate(PROMPTS)
        for name in names
    ]
    answers = engines.run(core, requests)
    return {name: [answers[f"{name} {i}"] for i in range(len(PROMPTS))] for name in names}


def check(model: Path, answers: Sequence[engines.Answer]) -> None:
    """Compare greedy tokens and the logprobs of all with a model's."""
    config, state = goldens.load(model)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [*prompt, *answer.tokens]
        logits = goldens.logits(config, state, tokens[:-1], pad_to=64)
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
        start = len(prompt) - 1
        assert len(answer.tokens) == NUM_TOKENS and logits[start:].argmax(-1).tolist() == answer.tokens
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], expected[start:], atol=2e-4)
        if start:
            assert answer.prompt_logprobs is not None
            np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], expected[:start], atol=2e-4)


def test_answers_are_those_of_merged_models(served, tmp_path):
    """All adapters and none in the same steps, with more adapters than slots."""
    case, folder, core = served
    model = goldens.FOLDER / case.model
    answers = run(core, [None, *case.adapters], prompt_logprobs=0)
    check(model, answers[None])
    for name in case.adapters:
        check(peft_files.merged(model, folder / name, tmp_path / name), answers[name])
        assert all(a.tokens != b.tokens for a, b in zip(answers[name], answers[None], strict=True))


@pytest.mark.slow
def test_neighbours_and_cached_prefixes_do_not_matter(served):
    """Other adapters' keys and values of the same prompts are in the cache."""
    case, _, core = served
    engines.reschedule(core)
    names = [None, *case.adapters]
    together = run(core, names)
    for name in names:
        alone = run(core, [name])
        for first, second in zip(together[name], alone[name], strict=True):
            assert first.tokens == second.tokens
            np.testing.assert_allclose(first.token_logprobs.logprobs, second.token_logprobs.logprobs, atol=2e-5)
        assert [answers[name][-1].num_cached_tokens for answers in (together, alone)] == [0, 32]


@pytest.mark.parametrize("served", CASES[:2], ids=str, indirect=True)
@pytest.mark.slow
def test_tokens_are_the_same_without_logprobs(served):
    """Other programs draw them, on one device, and in stages of two."""
    case, _, core = served
    engines.reschedule(core)
    names = [None, *case.adapters]
    first, second = run(core, names), run(core, names, logprobs=None)
    assert all(a.tokens == b.tokens for name in names for a, b in zip(first[name], second[name], strict=True))


@pytest.mark.parametrize("served", CASES[:1], ids=str, indirect=True)
def test_scripts_name_them_by_lora_requests(served, tmp_path):
    """Loaded ones by their names and paths, and new ones."""
    case, folder, core = served
    engines.reschedule(core)
    name = list(case.adapters)[-1]
    answers = run(core, [name, None])
    (tmp_path / "copy").symlink_to(folder / name)
    llm = LLM.from_config(core.config, core=core)
    adapters = [LoRARequest(name, 1, str(folder / name)), None, LoRARequest("copy", 2, str(tmp_path / "copy"))]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS, logprobs=0)
    outputs = llm.generate([PROMPTS[2]] * 3, params, lora_request=adapters)
    expected = [answers[adapter][2].tokens for adapter in (name, None, name)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.list_loras() == {1, 2} and llm.remove_lora(2) and not llm.remove_lora(2)
    with pytest.raises(AdapterError, match="cannot read .*adapter_config.json: No such file"):
        llm.generate(PROMPTS[0], params, lora_request=LoRARequest("nothing", 3, str(tmp_path)))
    llm.check_integrity()


@pytest.mark.slow
def test_answers_where_devices_share_the_heads_of_a_group_of_mamba(tmp_path):
    model = goldens.FOLDER / "granite_hybrid"
    names = ["in_proj", "out_proj"]
    options = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": names}
    core = engines.make_core(model.name, tensor_parallel_size=2, num_gpu_blocks_override=300, **options)
    add(core, "mixers", peft_files.write(tmp_path / "mixers", model, rank=4, targets=names))
    answers = run(core, [None, "mixers"], prompt_logprobs=0)
    check(model, answers[None])
    check(peft_files.merged(model, tmp_path / "mixers", tmp_path / "merged"), answers["mixers"])
    core.shutdown()
