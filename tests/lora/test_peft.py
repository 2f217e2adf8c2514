"""Adapters that PEFT itself saved: what is read of them and of its scales, against what its models compute."""

import warnings

import numpy as np
import pytest

from jaxllm.layers.build import build_model
from jaxllm.lora.names import TargetNames
from jaxllm.lora.targets import adaptable
from jaxllm.models.load_config import load_model_config
from tests.helpers import goldens, peft_files

pytestmark = pytest.mark.torch

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "llama_gqa": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.down_proj": 2, "proj": 3},
        "alpha_pattern": {r"^model\.layers\.0\.self_attn\.v_proj": 1, "down_proj": 5},
        "use_rslora": True,
    },
    "qwen3": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "qwen3 regex": {"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*layers\.0.*", "lora_alpha": 3},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True, "layers_to_transform": [0]},
    "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 2}},
    "qwen3_moe gate_up": {"target_modules": [], "target_parameters": EXPERTS[:1]},
    "qwen3_moe down": {"target_modules": [], "target_parameters": EXPERTS[1:]},
    "mixtral": {
        "target_modules": ["o_proj"],
        "target_parameters": [*EXPERTS, "mlp.gate.weight"],
        "rank_pattern": {"gate.weight": 3},
    },
    "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "llama4": {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft(case, tmp_path):
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    name = case.partition(" ")[0]
    model = goldens.FOLDER / name
    if not model.is_dir():
        from scripts import make_goldens, tiny_configs  # which need seconds to import

        model = tmp_path / "model"
        make_goldens.random_model(tiny_configs.VARIANTS[name], seed=1, scale=0.3).save_pretrained(model)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, "task_type": "CAUSAL_LM", **CASES[case]})
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, config)
        with torch.no_grad():
            for parameter, values in adapted.named_parameters():
                if "lora_" in parameter:
                    values.normal_(0, 0.2)
        adapted.save_pretrained(tmp_path / "adapter")
        merged = peft_files.merged(model, tmp_path / "adapter", tmp_path / "merged")
        peft_files.check_changes(model, tmp_path / "adapter", merged)
        token_ids = torch.tensor([np.random.default_rng(0).integers(120, size=56).tolist()])
        reference = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        with torch.no_grad():
            found, expected = (each(token_ids).logits[0].numpy() for each in (reference, adapted))
            with adapted.disable_adapter():
                plain = adapted(token_ids).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=3e-5 * max(10.0, np.abs(expected).max()))
    assert np.abs(expected - plain).max() > 0.1, "the adapter changes nothing"


def test_every_family_has_the_linear_layers_that_all_linear_stands_for(tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    from scripts import tiny_configs

    missing = set()
    # Modules of these are called otherwise in transformers than in their checkpoints, by which adapters are read.
    called_otherwise = {"hy_v3", "laguna", "nemotron_h", "nemotron_h_moe", "sarvam_moe"}
    called_otherwise |= {"kimi_linear", "ling_2_5", "ling_3", "mistral_large_3", "muse_glimmer", "plamo3", "step3p7"}
    for name, config in tiny_configs.VARIANTS.items():
        if name in called_otherwise:
            continue
        config.save_pretrained(tmp_path / name)
        with torch.device("meta"):
            model = getattr(transformers, tiny_configs.class_name(config))(config)
        parts = adaptable(build_model(load_model_config(tmp_path / name)))
        targets = {module: shape for part in parts for module, shape in part.modules.items()}
        names = TargetNames(targets)
        for module, part in model.named_modules():
            if type(part).__name__ not in ("Linear", "Conv1D"):
                continue
            target = names.target(module)
            if target is None:
                missing.add(module.rpartition(".")[2])
                continue
            outputs, inputs = part.weight.shape if isinstance(part, torch.nn.Linear) else reversed(part.weight.shape)
            assert (targets[target].outputs, targets[target].inputs) == (outputs, inputs), f"{name}: {module}"
    assert missing == {"kv_b_proj", "weights_proj", "wk", "wq_b"}, "of latents, and of indexers, which are not loaded"
