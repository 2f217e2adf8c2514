"""Values of speculative_config, and the errors for all others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from jaxllm.engine import features
from jaxllm.errors import ConfigError
from jaxllm.llm_engine import check_model
from jaxllm.speculative.options import METHODS, SpeculativeConfig
from jaxllm.speculative.refused import METHODS_ELSEWHERE, REFUSED

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (NGRAM, {"prompt_lookup_min": 5, "prompt_lookup_max": 5, "draft_sample_method": "greedy"}),
        ({**NGRAM, "prompt_lookup_max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        ({**NGRAM, "prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        ({**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({**NGRAM, "method": "ngram_gpu", "model": None, "enforce_eager": True, "kv_cache_dtype": "auto"}, {"method": "ngram"}),
        ({**NGRAM, "model": "[ngram]"}, {"method": "ngram", "model": None}),
        ({"model": "[ngram]", "num_speculative_tokens": 1}, {"method": "ngram", "model": None}),
        (DRAFT, {"draft_sample_method": "probabilistic", "rejection_sample_method": "exact", "quantization": None}),
        ({**DRAFT, "draft_tensor_parallel_size": 2, "quantization": "fp8", "revision": "v1"}, {"quantization": "fp8", "revision": "v1"}),
        ({**DRAFT, "draft_sample_method": "greedy", "rejection_sample_method": "exact"}, {"draft_sample_method": "greedy"}),
        ({**NGRAM, "rejection_sample_method": "standard"}, {"rejection_sample_method": "standard"}),
        ({"method": "mtp"}, {"method": "mtp", "model": None, "num_speculative_tokens": 1}),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 16}, {"method": "mtp", "num_speculative_tokens": 16}),
        ({"model": "org/EAGLE-x", "num_speculative_tokens": 2}, {"method": "eagle"}),
        ({"model": "org/x-EAGLE3", "num_speculative_tokens": 2}, {"method": "eagle3"}),
        ({"model": "eagle config", "num_speculative_tokens": 2}, {"method": "eagle3"}),
        ({"model": "speculators", "num_speculative_tokens": 2}, {"method": "eagle3"}),
        ({"model": "plain", "num_speculative_tokens": 2}, {"method": "draft_model"}),
        ({"model": "blocks"}, {"method": "dflash", "num_speculative_tokens": 15, "draft_sample_method": "probabilistic"}),
        ({"model": "org/x-DFlash", "num_speculative_tokens": 7}, {"method": "dflash", "num_speculative_tokens": 7}),
        ({**NGRAM, "disable_by_batch_size": 8}, {"disable_by_batch_size": 8}),
    ],
)  # fmt: skip
def test_what_is_read(raw: dict[str, Any], read: dict[str, Any]) -> None:
    found = SpeculativeConfig.of(raw, tensor_parallel_size=2, read_config=config_of)
    assert {name: getattr(found, name) for name in read} == read


def config_of(model: str | None, revision: str | None) -> dict[str, Any]:
    """The config.json of the target, and of drafts whose names say nothing."""
    return {
        None: {"text_config": {"mtp_num_hidden_layers": 1}},
        "plain": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        "eagle config": {"architectures": ["LlamaForCausalLM"], "eagle_config": {"use_aux_hidden_state": True}},
        "speculators": {"speculators_model_type": "eagle3"},
        "blocks": {"architectures": ["DFlashDraftModel"], "block_size": 16},
        "medusa": {"architectures": None, "model_type": "medusa"},
    }[model]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, must be 1 to 16; for none, leave speculative_config out"),
        ({"num_speculative_tokens": 100}, "num_speculative_tokens is 100, must be 1 to 16"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, must be 1 to 16"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True, must be a whole number"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens is '3', must be a whole number"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing: the most drafts of a step, 1 to 16"),
        ({"num_speculative_token": 3}, "unknown name 'num_speculative_token'; did you mean 'num_speculative_tokens'?"),
        ({3: 3}, "unknown name '3'"),
        ({"method": None}, "neither method nor model is given; the methods are ngram, draft_model, eagle, eagle3, dflash, mtp, grammar"),
        ({"method": "ngrams"}, "draft_model, eagle, eagle3, dflash, mtp, grammar; did you mean 'ngram'?"),
        ({"method": 3}, "method is 3, must be text"),
        ({"method": "mimo_mtp"}, "method 'mimo_mtp' is not supported: layers for multi-token prediction are read from"),
        ({"method": "eagle3"}, "model is missing: for the method eagle3 it names the checkpoint of the EAGLE-3 head"),
        ({"method": "draft_model"}, "model is missing: for the method draft_model it names the smaller model"),
        ({"method": None, "model": "medusa"}, "model 'medusa' is a drafter of the kind medusa, which is not supported"),
        ({"model": "org/m"}, "model is set, but it is for draft_model, eagle, eagle3 or dflash, and the method is ngram; leave it out"),
        ({"revision": "v1"}, "revision is set, but it is for draft_model, eagle, eagle3 or dflash"),
        ({"draft_sample_method": "greedy"}, "draft_sample_method is set, but it is for draft_model, eagle, eagle3, dflash or mtp"),
        ({**DRAFT, "draft_sample_method": "best"}, "draft_sample_method is 'best', must be one of greedy, probabilistic"),
        ({**DRAFT, "prompt_lookup_max": 3}, "prompt_lookup_max is set, but it is for ngram, and the method is draft_model"),
        ({**DRAFT, "quantization": "awq"}, "quantization is 'awq', must be one of "),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4, must be at most prompt_lookup_max, which is 3"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0, must be at least 1"),
        ({"prompt_lookup_max": -2}, "prompt_lookup_max is -2, must be at least 1"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0, must be at least 1"),
        ({"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size is 1, but drafts are split like the model, over 2"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, which is not supported: drafts are split like the model"),
        ({"parallel_drafting": True}, "parallel_drafting is True, which is not supported: of heads that propose several"),
        ({"parallel_drafting": 0}, "parallel_drafting is 0, which is not supported"),
        ({"rejection_sample_method": "fly"}, "must be one of exact, standard, synthetic; fly changes the distribution of the output"),
        ({"rejection_sample_method": "strict"}, "rejection_sample_method is 'strict', must be one of exact, standard, synthetic"),
        ({"rejection_sample_method": "block"}, "synthetic; block keeps the distribution of the output, as standard does"),
        ({"synthetic_acceptance_length": 2.0}, 'rejection_sample_method is not "synthetic"; set it, or leave both out'),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(change: dict[Any, Any], told: str) -> None:
    assert told in fault(NGRAM | change)


def fault(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.of(raw, tensor_parallel_size=2, read_config=config_of)
    message = str(caught.value)
    assert message.startswith("speculative_config: ") and "\n" not in message
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_has_and_this_has_not_is_refused_with_a_reason(name: str) -> None:
    reason, *harmless = REFUSED[name]
    assert fault({**NGRAM, name: "anything"}).endswith(f"is not supported: {reason}")
    for value in (None, *harmless):
        assert SpeculativeConfig.of({**NGRAM, name: value}) == SpeculativeConfig.of(NGRAM)


@pytest.mark.parametrize("method", METHODS_ELSEWHERE)
def test_other_methods_are_refused_with_a_reason(method: str) -> None:
    message = fault({**NGRAM, "method": method})
    assert f"method {method!r} is not supported: {METHODS_ELSEWHERE[method]}" in message and ", ".join(METHODS) in message


@pytest.mark.parametrize("raw", [[], "ngram", 3, {}])
def test_it_must_be_an_object_that_says_something(raw: Any) -> None:
    assert ("is no JSON object" if raw != {} else "neither method nor model") in fault(raw)


SYNTHETIC = {**NGRAM, "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs synthetic_acceptance_rates or synthetic_acceptance_length, and not both"),
        ({"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2}, "and not both"),
        ({"synthetic_acceptance_rates": [0.5, 0.5]}, "has 2 rates, must have 3, one for each draft"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none above the one before it"),
        ({"synthetic_acceptance_rates": [1.5, 1, 1]}, "must hold numbers from 0 to 1"),
        ({"synthetic_acceptance_rates": [float("nan"), 0, 0]}, "must hold numbers from 0 to 1"),
        ({"synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates is 0.5, must be a list"),
        ({"synthetic_acceptance_length": 4.5}, "synthetic_acceptance_length is 4.5, must be 1 to 4, the tokens of a step"),
        ({"synthetic_acceptance_length": 0.5}, "must be 1 to 4"),
        ({"synthetic_acceptance_length": "2"}, "synthetic_acceptance_length is '2', must be a number"),
    ],
)
def test_synthetic_acceptance_needs_rates_or_a_length(given: dict[str, Any], told: str) -> None:
    assert told in fault({**SYNTHETIC, **given})


def test_synthetic_rates() -> None:
    by_rate = SpeculativeConfig.of({**SYNTHETIC, "synthetic_acceptance_rates": [0.8, 0.4, 0]})
    assert by_rate.synthetic_acceptance_rates == (0.8, 0.4, 0.0)
    assert by_rate.synthetic_rates_after_each == (0.8, 0.5, 0.0)
    for length in (1, 1.7, 2.5, 4):
        rates = SpeculativeConfig.of({**SYNTHETIC, "synthetic_acceptance_length": length}).synthetic_acceptance_rates
        assert rates is not None and 1 + sum(rates) == pytest.approx(length)
    assert SpeculativeConfig.of(NGRAM).synthetic_rates_after_each == ()


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ([], "is empty"),
        ({"1": 3}, "must be a list"),
        ([[1, 4]], "holds [1, 4], must hold [first size, last size, drafts of a row]"),
        ([[1, 4, 2.0]], "must hold [first size, last size, drafts of a row]"),
        ([[2, 4, 2]], "has the range 2 to 4, must go on from 1"),
        ([[1, 4, 2], [6, 8, 1]], "has the range 6 to 8, must go on from 5"),
        ([[1, 0, 2]], "has the range 1 to 0"),
        ([[1, 4, 5]], "gives 5 drafts to batches of 1 to 4, must be 0 to 4, num_speculative_tokens"),
        ([[1, 4, -1]], "gives -1 drafts"),
    ],
)
def test_a_bad_table_of_batch_sizes_gets_a_sentence(ranges: Any, told: str) -> None:
    assert told in fault({**NGRAM, "num_speculative_tokens_per_batch_size": ranges})


def test_drafts_by_batch_size() -> None:
    config = SpeculativeConfig.of({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 32, 2]]})
    assert [config.most_drafts(size) for size in (1, 4, 5, 32, 33)] == [4, 4, 2, 2, 2]
    config = SpeculativeConfig.of({**NGRAM, "disable_by_batch_size": 8})
    assert [config.most_drafts(size) for size in (1, 8, 9)] == [4, 4, 0]


def test_the_server_refuses_it_before_jax_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom jaxllm.config import EngineConfig\nfrom jaxllm.llm_engine import check_model\n"
        f"check_model(EngineConfig.from_options(speculative_config={NGRAM}))\n"
        "assert not {'jax', 'flax'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for options, told in (
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 0}}, "num_speculative_tokens is 0"),
        ({"speculative_config": NGRAM, "runner": "pooling"}, "runner is pooling, which writes no tokens"),
        ({"speculative_config": {"model": str(tmp_path / "none"), "num_speculative_tokens": 1}}, "model: "),
        ({"speculative_config": {**DRAFT, "model": str(tmp_path / "none")}}, "model: "),
        ({"speculative_config": {**DRAFT, "model": str(tmp_path)}}, "has no config.json"),
        ({"speculative_config": {"method": "mtp"}}, "num_speculative_tokens is missing"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_model(EngineConfig.from_options(**options))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    raw = {"model": str(tmp_path), "num_speculative_tokens": 1}
    check_model(EngineConfig.from_options(speculative_config=raw))


def test_scripts_and_commands_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 100, must be 1 to 16"):
        LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 100})
    with pytest.raises(ConfigError, match="speculative_config is 'ngram'"):
        LLM(speculative_config="ngram")  # type: ignore[arg-type]
    for line in ("serve", "generate hi", "bench throughput --dry-run"):
        assert main([*line.split(), "--spec-method", "ngram", "--spec-tokens", "100"]) == 1
        assert "speculative_config: num_speculative_tokens is 100, must be 1 to 16" in capsys.readouterr().err


def test_a_build_without_drafters_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "DRAFTERS", None)
    check_model(EngineConfig())
    with pytest.raises(ConfigError, match="this build has no drafters"):
        check_model(EngineConfig.from_options(speculative_config=NGRAM))


def test_names_of_vllm_that_change_nothing_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    more = {"attention_backend": "FLASH_ATTN", "moe_backend": "triton", "max_model_len": 4096}
    assert SpeculativeConfig.of({**NGRAM, **more}) == SpeculativeConfig.of(NGRAM)
    assert "speculative_config.attention_backend 'FLASH_ATTN' changes nothing here: drafts use the kernels" in caplog.text
