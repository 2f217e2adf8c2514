import json
import shutil

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.build import num_parameters
from jaxllm.models.load_config import load_model_config
from jaxllm.pooling_config import PoolingConfig
from tests.helpers import goldens

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
LAST, MEAN = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, {"pooling_mode_mean_tokens": True}


@pytest.fixture
def directory(tmp_path):
    """The config of a causal model, to be made an embedding model."""
    shutil.copy(goldens.FOLDER / "qwen3" / "config.json", tmp_path)
    return tmp_path


def write(directory, chain=(), pooling=None, /, **files):
    """sentence-transformers' files: the chain of modules, the config of the pooling module, and others by name."""
    if chain:
        files["modules"] = list(chain)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    if pooling is not None:
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_causal_model_generates_and_pools_by_its_last_token(directory):
    config = load_model_config(directory)
    assert config.generates and config.pooling == PoolingConfig("last", normalize=True)


def test_a_model_without_a_head_only_pools(directory):
    whole = load_model_config(directory, overrides={"tie_word_embeddings": False})
    config = load_model_config(directory, overrides={"architectures": ["Qwen3Model"], "tie_word_embeddings": False})
    assert not config.generates and config.architecture == "Qwen3ForCausalLM"
    assert num_parameters(config) == num_parameters(whole) - whole.vocab_size * whole.hidden_size
    with pytest.raises(ConfigError, match="runner is generate"):
        load_model_config(directory, overrides={"architectures": ["Qwen3Model"]}, runner="generate")


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], LAST, ("last", True)),
        ([TRANSFORMER, POOLING], LAST, ("last", False)),
        ([TRANSFORMER, POOLING, NORMALIZE], MEAN, ("mean", True)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, ("last", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": ["mean"]}, ("mean", False)),
    ],
)
def test_sentence_transformers_files_say_how_to_pool(directory, modules, pooling, expected):
    write(directory, modules, pooling)
    config = load_model_config(directory)
    assert not config.generates
    assert (config.pooling.pooling_type, config.pooling.normalize) == expected
    assert load_model_config(directory, runner="generate").generates


def test_prompts_and_lengths_are_read(directory):
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    files = {"config_sentence_transformers": {"prompts": prompts}, "sentence_bert_config": {"max_seq_length": 64}}
    write(directory, [TRANSFORMER, POOLING], LAST, **files)
    config = load_model_config(directory)
    assert config.pooling.prompt_names == ("query", "document")
    assert config.max_position == 64
    assert load_model_config(directory, runner="generate").max_position == 256


@pytest.mark.parametrize(
    ("modules", "pooling", "files", "message"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, {}, "pools by cls_token"),
        ([TRANSFORMER, POOLING], {**LAST, **MEAN}, {}, "lasttoken and mean_tokens"),
        ([TRANSFORMER, POOLING], None, {}, "pools by nothing"),
        ([TRANSFORMER, POOLING], {**MEAN, "include_prompt": False}, {}, "include_prompt"),
        ([TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense"}], LAST, {}, "module 'Dense'"),
        ([TRANSFORMER, POOLING], LAST, {"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
        ([TRANSFORMER, POOLING], LAST, {"modules": {}}, "not a list"),
    ],
)
def test_what_is_not_supported_is_named(directory, modules, pooling, files, message):
    write(directory, modules, pooling)
    write(directory, **files)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(directory)


@pytest.mark.parametrize(("key", "value"), [("is_causal", False), ("use_bidirectional_attention", True)])
def test_attention_to_later_tokens_is_refused(directory, key, value):
    with pytest.raises(ModelLoadError, match=f"{key} is {value}, supported: causal"):
        load_model_config(directory, overrides={key: value})


def test_the_engines_option_is_laid_over_the_files(directory):
    write(directory, [TRANSFORMER, POOLING], {"pooling_mode_cls_token": True})
    config = load_model_config(directory, pooler_config={"pooling_type": "MEAN", "normalize": True})
    assert (config.pooling.pooling_type, config.pooling.normalize) == ("mean", True)


@pytest.mark.parametrize("given", [{"pooling_type": "CLS"}, {"normalize": "yes"}, {"dimensions": 3}])
def test_wrong_pooler_configs_are_refused(directory, given):
    with pytest.raises(ConfigError, match=f"pooler_config.*{next(iter(given))}"):
        load_model_config(directory, pooler_config=given)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [64, 32], "is_matryoshka": True}, (32, 64))],
)
def test_shorter_vectors_are_for_models_that_say_so(directory, raw, expected):
    assert load_model_config(directory, overrides=raw).pooling.matryoshka_dimensions == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seq_pooling_type": "CLS"}, "'CLS', must be last or mean: .* needs an encoder"),
        ({"tok_pooling_type": "STEP"}, "tok_pooling_type is 'STEP', which is not supported: vectors of tokens"),
        ({"logit_mean": 0.5}, "logit_mean is 0.5, which is not supported: scores are those of"),
        ({"max_embed_len": 9}, "max_embed_len is 9, which is not supported: a prompt is pooled as a whole"),
    ],
)
def test_vllm_s_other_pooler_configs_are_refused_with_the_reason(directory, given, told):
    with pytest.raises(ConfigError, match=told):
        load_model_config(directory, pooler_config=given)
    load_model_config(directory, pooler_config={"tok_pooling_type": "ALL", "enable_chunked_processing": False, "task": "embed"})
