"""The goldens' models against transformers itself, where torch is installed."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.models import mistral_params
from scripts import make_encoder_goldens, make_goldens, make_picture_goldens, tiny_configs
from scripts.tiny_configs import mistral_form
from tests.helpers import goldens
from tests.helpers.encoders import check, make_core
from tests.helpers.slow import slow_except

pytestmark = pytest.mark.torch

SPLIT = (
    "glm4_moe_lite",
    "hunyuan_v1_moe",
    "hy_v3",
    "ling_2_5",
    "ling_3",
    "minimax_m2",
    "ministral3",
    "mistral4",
    "mistral_large_3",
    "nemotron_h_moe",
    "olmo2",
)
"""Compared on two devices too: norms over all heads, scaled queries, latents, and experts in forms that no golden has."""


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_the_script_that_makes_goldens_knows_each():
    folders = {path.name for path in make_goldens.FOLDER.iterdir() if any(path.glob("*.json"))}
    of_audio = {path.parent.name for path in make_goldens.FOLDER.glob("*/audio.json")}
    assert {*make_goldens.kept(), *make_picture_goldens.kept(), *make_encoder_goldens.kept(), *of_audio} == folders
    assert tiny_configs.VARIANTS.keys() >= set(make_goldens.kept())
    assert sorted(make_picture_goldens.VARIANTS) == make_picture_goldens.kept()


@pytest.mark.parametrize("name", goldens.NAMES)
def test_goldens_are_what_transformers_computes(name, torch):
    """Our logits are compared with them in test_families.py."""
    import transformers

    golden = goldens.golden(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(golden.directory, dtype=torch.float32)
    first = golden.results[0]
    with torch.no_grad():
        logits_TV = reference(torch.tensor([first.prompt])).logits[0].numpy()
    np.testing.assert_allclose(logits_TV, golden.first_prompt_logits, atol=1e-4)
    assert logits_TV[-1].argmax() == first.tokens[0]


@pytest.mark.parametrize("name", sorted(tiny_configs.VARIANTS.keys() - set(goldens.NAMES)))
def test_logits_of_variants_without_a_golden_equal_transformers(name, torch, tmp_path):
    reference = make_goldens.random_model(tiny_configs.VARIANTS[name], seed=1, scale=0.3)
    make_goldens.save(reference, tmp_path)
    token_ids = np.random.default_rng(0).integers(reference.config.get_text_config().vocab_size, size=56).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].numpy()
    for num_devices in (1, 2) if name in SPLIT else (1,):
        config, state = goldens.load(tmp_path, tensor_parallel_size=num_devices)
        found = goldens.logits(config, state, token_ids, pad_to=64)
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(5.0, np.abs(expected).max()))


@pytest.mark.parametrize("name", ["kimi_linear", "ling_3"])
def test_a_checkpoint_with_the_names_of_transformers_is_that_of_the_hub(name, torch, tmp_path):
    reference = make_goldens.random_model(tiny_configs.VARIANTS[name], seed=1, scale=0.3)
    make_goldens.save(reference, tmp_path / "hub")
    reference.save_pretrained(tmp_path / "transformers")
    (_, expected), (_, found) = (goldens.load(tmp_path / form) for form in ("hub", "transformers"))
    for weight, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(other, weight)


def test_weights_in_fp8_in_mistrals_own_form_are_those_of_the_hub(torch, tmp_path):
    """With a scale for each tensor, and one for its inputs, which is not used; routers stay as they are."""
    hub, own = tmp_path / "hub", tmp_path / "own"
    reference = make_goldens.random_model(tiny_configs.VARIANTS["mistral_large_3"], seed=1, scale=0.3)
    make_goldens.save(reference, own)
    reference.save_pretrained(hub)
    tensors = mistral_form.apart(load_file(hub / "model.safetensors"))
    for name, value in list(tensors.items()):
        if value.ndim == 2 and ".layers." in name and not name.endswith(".gate.weight"):
            scale = np.asarray(np.abs(value).max() / 448, np.float32)
            module = name.removesuffix(".weight")
            scales = {f"{module}.weight_scale": scale, f"{module}.input_scale": np.ones((), np.float32)}
            tensors |= {name: (value / scale).astype(ml_dtypes.float8_e4m3fn), **scales}
    save_file(tensors, hub / "model.safetensors")
    of_mistral = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}
    renamed = ((mistral_form.named(name).rpartition("."), value) for name, value in tensors.items())
    save_file(
        {f"{module}.{of_mistral.get(part, part)}": value for (module, _, part), value in renamed},
        own / "consolidated.safetensors",
    )
    params = json.loads((own / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (own / "params.json").write_text(json.dumps(params))
    (hub / "config.json").write_text(json.dumps(mistral_params.as_config(params, own)))
    (config, expected), (_, found) = (goldens.load(directory) for directory in (hub, own))
    assert config.formats[0].scale_name == "weight_scale"
    for weight, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(other, weight)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window", "qwen2", "qwen3"])
def test_hidden_states_of_a_bare_decoder_equal_transformers(name, torch, tmp_path):
    """As embedding models are saved: without a head, and without the prefix of a causal model's weights."""
    import transformers

    reference = transformers.AutoModel.from_pretrained(goldens.FOLDER / name, dtype=torch.float32)
    reference.save_pretrained(tmp_path)
    config, state = goldens.load(tmp_path)
    assert not config.generates
    token_ids = np.random.default_rng(0).integers(config.vocab_size, size=56).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(goldens.hidden(config, state, token_ids, pad_to=104), expected, atol=1e-4)


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_text_model_beside_an_encoder_equals_transformers(is_fused, torch, tmp_path):
    """Qwen 3.5 with experts, as transformers saves it and as it is published: with the experts of a layer in one tensor. Then with the
    other gate of linear attention's output, which transformers does not read from a config."""
    import transformers

    text = tiny_configs.VARIANTS["qwen3_5_moe"].to_dict()
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    vision = {**sizes, "out_hidden_size": text["hidden_size"]}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    reference = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(0, 0.15)
    reference.save_pretrained(tmp_path)
    if is_fused:
        file = tmp_path / "model.safetensors"
        others = {name: value for name, value in load_file(file).items() if ".experts." not in name}
        fused = {name: weight.detach().numpy() for name, weight in reference.named_parameters() if ".experts." in name}
        save_file({**others, **fused}, file)
    token_ids = np.random.default_rng(0).integers(text["vocab_size"], size=40).tolist()
    for gate in ("silu", "sigmoid"):
        for layer in reference.model.language_model.layers[:3]:
            layer.linear_attn.norm.activation = gate
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["text_config"]["output_gate_type"] = gate
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with torch.no_grad():
            expected = reference(torch.tensor([token_ids])).logits[0].numpy()
        found = goldens.logits(*goldens.load(tmp_path), token_ids)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    slow_except(["xlm_roberta_reranker"], sorted(make_encoder_goldens.VARIANTS.keys() - set(make_encoder_goldens.kept()))),
)
def test_encoders_and_classifiers_equal_transformers(name, torch, tmp_path):
    model = make_encoder_goldens.random_model(name)
    model.save_pretrained(tmp_path)
    prompts = make_encoder_goldens.prompts_of(name)
    results = [{**each, "found": make_encoder_goldens.compute(model, **each).numpy()} for each in prompts]
    core = make_core(tmp_path)
    check(core, results, "token_embed" if core.model_config.classifier is None else "classify")
    core.shutdown()
