"""An engine on two devices whose adapters change every module: experts, routers, embedding and head too."""

import dataclasses

from tests.helpers import engines, goldens, peft_files
from tests.helpers.adapted import PROMPTS, add, check, run

NAMES = ["q_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


def test_answers_are_those_of_merged_models(tmp_path):
    model = goldens.FOLDER / "qwen3_moe"
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_target_modules": NAMES}
    core = engines.make_core("qwen3_moe", tensor_parallel_size=2, num_gpu_blocks_override=300, **options)
    try:
        adapters = {
            "all": peft_files.write(tmp_path / "all", model, rank=4, targets=NAMES),
            "head": peft_files.write(tmp_path / "head", model, rank=8, seed=1, targets=["lm_head"], strength=2.0),
        }
        for name, directory in adapters.items():
            add(core, name, directory)
        answers = run(core, [None, *adapters], prompt_logprobs=0)
        check(model, answers[None])
        for name, directory in adapters.items():
            check(peft_files.merged(model, directory, tmp_path / f"merged {name}"), answers[name])
            assert all(a.tokens != b.tokens for a, b in zip(answers[name], answers[None], strict=True))
        # Without logprobs, other programs draw the tokens.
        requests = [
            dataclasses.replace(engines.request(f"{name} {i}", prompt, max_tokens=len(answers[name][i].tokens)), adapter=name)
            for i, prompt in enumerate(PROMPTS)
            for name in answers
        ]
        found = engines.run(core, requests)
        assert all(found[f"{name} {i}"].tokens == each.tokens for name in answers for i, each in enumerate(answers[name]))
    finally:
        core.shutdown()
