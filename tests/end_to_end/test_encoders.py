"""Encoders and classifiers in whole engines against what transformers computed (tests/goldens/*/encoder.json)."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file, save_file

from jaxllm.config import EngineConfig
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.models.load_config import load_model_config
from tests.helpers import engines, goldens
from tests.helpers.encoders import check, golden, make_core, request_of
from tests.helpers.goldens import FOLDER
from tests.helpers.slow import slow_except


@pytest.mark.parametrize(("name", "task"), [("bert_classifier", "classify"), ("modernbert", "token_embed")])
def test_packed_prompts_equal_transformers(name, task):
    core, results = make_core(FOLDER / name), golden(name)
    check(core, results, task)
    if task == "token_embed":
        check(core, results, "embed", lambda found: found[0])
    else:
        logits = results[0]["found"]
        answer = engines.run(core, [request_of("probabilities", results[0], task=task, use_activation=True)])["probabilities"]
        np.testing.assert_allclose(answer.pooled, np.exp(logits) / np.exp(logits).sum(), atol=1e-5)
        first_text = {**results[2], "second_text_start": None}
        assert not np.allclose(
            engines.run(core, [request_of("one", first_text, task=task)])["one"].pooled, results[2]["found"], atol=1e-2
        )
    assert core.memory_plan.cache_bytes == 0
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("bert_classifier", "classify"), ("modernbert", "embed")])
def test_two_devices_compute_the_same_and_nothing_is_compiled_late(name, task):
    options = {} if task == "classify" else {"pooler_config": {"pooling_type": "mean"}}
    core = make_core(FOLDER / name, tensor_parallel_size=2, warmup="all", **options)
    check(core, golden(name), task, (lambda found: found) if task == "classify" else lambda found: found.mean(axis=0))
    assert core.num_compiled_after_warmup == 0
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 40, "max_num_seqs": 4}, "computes prompts of up to 66 tokens whole"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is set, but BertForSequenceClassification is an encoder"),
        ({"enable_prefix_caching": True, "enable_lora": True}, "enable_prefix_caching and enable_lora is set"),
        ({"runner": "generate"}, "without a head for text, which makes scores only"),
        ({"tensor_parallel_size": 3}, "4 query heads"),
    ],
)
def test_options_that_encoders_do_not_have_are_refused(options, message):
    config = EngineConfig.from_options(model=str(FOLDER / "bert_classifier"), **options)
    with pytest.raises(ConfigError, match=message):
        resolve_sizes(config, FOLDER / "bert_classifier")


@pytest.mark.parametrize("is_tied", slow_except([True], [True, False]))
def test_a_reranker_scores_by_the_logits_of_two_tokens(is_tied, tmp_path):
    """As Qwen3-Reranker is made: a model that answers yes or no."""
    source = goldens.FOLDER / ("qwen3" if is_tied else "llama_gqa")
    asks = {"architectures": ["Qwen3ForSequenceClassification" if is_tied else "LlamaForSequenceClassification"]}
    raw = {**json.loads((source / "config.json").read_text()), **asks, "classifier_from_token": ["no", "yes"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has no tokenizer.json"):
        load_model_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 5, "yes": 9}}}))
    prompt = np.random.default_rng(0).integers(128, size=20).tolist()
    logits_V = goldens.logits(*goldens.load(source), prompt, pad_to=32)[-1]
    config, state = goldens.load(tmp_path)
    assert (config.generates, config.classifier.labels, config.pooling.pooling_type) == (False, ("LABEL_0",), "last")
    hidden_1D = goldens.hidden(config, state, prompt, pad_to=32)[-1:]
    head = nnx.merge(nnx.graphdef(build_model(config)), state).classifier
    raw["classifier_from_token"] = ["yes"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    one_config, one_state = goldens.load(tmp_path)
    one = nnx.merge(nnx.graphdef(build_model(one_config)), one_state).classifier
    np.testing.assert_allclose(one(hidden_1D, np.array([0])), [[logits_V[9]]], rtol=1e-4, atol=1e-4)
    for is_activated, expected in ((0, logits_V[9] - logits_V[5]), (1, 1 / (1 + np.exp(logits_V[5] - logits_V[9])))):
        np.testing.assert_allclose(head(hidden_1D, np.array([is_activated])), [[expected]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "labels", "activation"),
    [
        ({}, 3, "softmax"),
        ({"id2label": {"0": "good"}}, 1, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "regression", "id2label": {"0": "good"}}, 1, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 3, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 3, "sigmoid"),
        ({"id2label": None, "num_labels": 7}, 7, "softmax"),
    ],
)
def test_config_json_says_what_the_classes_are(given, labels, activation):
    classifier = load_model_config(FOLDER / "bert_classifier", overrides=given).classifier
    assert (len(classifier.labels), classifier.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id2label": {"1": "good"}}, "id2label is"),
        ({"problem_type": "other"}, "problem_type is 'other'"),
        ({"sbert_ce_default_activation_function": "torch.nn.GELU"}, "activation of scores is 'torch.nn.GELU'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"num_attention_heads": 5}, "must divide hidden_size"),
    ],
)
def test_what_an_encoder_cannot_be_is_named(given, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(FOLDER / "bert_classifier", overrides=given)


def test_norms_may_have_their_older_names(tmp_path):
    config, state = goldens.load(FOLDER / "bert_classifier")
    tensors = load_file(FOLDER / "bert_classifier" / "model.safetensors")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in tensors.items()
    }
    assert older.keys() != tensors.keys()
    save_file(older, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / "bert_classifier" / "config.json", tmp_path)
    _, found = goldens.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, state, found)
