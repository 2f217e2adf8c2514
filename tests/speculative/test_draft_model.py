"""Draft models: they go on from where the target is, whatever it has taken of earlier drafts."""

import json
import shutil

import numpy as np
import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.speculative import draft_model
from tests.helpers import engines, goldens
from tests.speculative.by_hand import MAX_LENGTH, ByHand, target_hidden_states

TARGET = goldens.FOLDER / "llama_mha"
V = 128


def greedy(config, state, tokens: list[int], count: int, noise: np.ndarray) -> list[int]:
    """Output of a model after these tokens."""
    found = list(tokens)
    for _ in range(count):
        logits = goldens.logits(config, state, found, pad_to=MAX_LENGTH)[-1][:V]
        found.append(int(np.argmax(logits + noise[len(found)])))
    return found[len(tokens) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "is_drawn"),
    [("mistral_window", 1, False), ("qwen2", 2, True)],
)
def test_drafts_are_those_of_the_model_alone(name, size, is_drawn, monkeypatch):
    """Models of any family, with other sizes of heads and vocabulary (qwen2 has 131 tokens)."""
    monkeypatch.setattr(draft_model, "_check_vocabulary", lambda *_: None)
    directory = goldens.FOLDER / name
    split, split_state = goldens.load(TARGET, tensor_parallel_size=size)
    options = {"num_drafts": 3, "is_drawn": is_drawn, "tensor_parallel_size": size}
    drafter = draft_model.make(directory, split, target_directory=TARGET, **options)
    assert drafter.num_lookahead == 3 and drafter.feature_layers == ()
    noise = np.random.default_rng(1).gumbel(size=(MAX_LENGTH, V)) * is_drawn
    engine = ByHand(drafter, split, split_state, target_hidden_states(*goldens.load(TARGET), ()), size, noise)
    model = goldens.load(directory)
    engine.compare(lambda tokens: greedy(*model, tokens, 3, noise), rounds=2)


def test_a_draft_model_must_have_the_targets_vocabulary(tmp_path):
    """Or the same tokenizer, and rows behind it that nothing uses."""
    target = goldens.load(TARGET)[0]
    for name in ("draft", "target"):
        shutil.copytree(goldens.FOLDER / "qwen2", tmp_path / name)
    options = {"target_directory": tmp_path / "target", "num_drafts": 2}
    with pytest.raises(ConfigError, match=r"draft has 131 tokens, the target 128: both must have the same vocabulary"):
        draft_model.make(tmp_path / "draft", target, **options)
    for name in ("draft", "target"):
        tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert draft_model.make(tmp_path / "draft", target, **options).config.vocab_size == 131


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "draft_model", "model": str(goldens.FOLDER / "qwen2")}, "qwen2 has 131 tokens, the target 128"),
        (
            {"method": "eagle3", "model": str(goldens.FOLDER / "qwen2")},
            "vocab_size is 131, must be the target's 128",
        ),
        ({"method": "mtp"}, "has no layers for multi-token prediction"),
    ],
)
def test_an_engine_does_not_start_with_a_drafter_that_does_not_fit(options, told):
    with pytest.raises((ConfigError, ModelLoadError), match=told):
        engines.make_core(TARGET.name, speculative_config={**options, "num_speculative_tokens": 2})


def test_what_a_draft_model_cannot_be(tmp_path, caplog):
    target = goldens.load(TARGET, tensor_parallel_size=4)[0]
    options = {"target_directory": TARGET, "num_drafts": 2}
    with pytest.raises(ConfigError, match="qwen3_next .* states by row, which cannot be taken back"):
        draft_model.make(goldens.FOLDER / "qwen3_next", target, **options)
    shutil.copytree(goldens.FOLDER / "llama_gqa", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    with pytest.raises(
        ConfigError, match="the draft model .*odd: tensor_parallel_size is 4, which does not divide 6 query heads"
    ):
        draft_model.make(tmp_path / "odd", target, tensor_parallel_size=4, **options)
    draft_model.make(goldens.FOLDER / "llama_gqa", target, max_model_len=1000, **options)
    assert "knows sequences of 256 tokens, max_model_len is 1000" in caplog.text
