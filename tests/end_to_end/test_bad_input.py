"""Bad input to the real engine: one clear message each, and no other request is affected. The model is a tiny golden one."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm import LLM, SamplingParams
from jaxllm.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    JaxLLMError,
    ModelLoadError,
    OutOfMemoryError,
)
from tests.helpers import goldens
from tests.helpers.tiny_tokenizers import write_tokenizer

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "use_progress_bar": False}
MAX_LEN = 64
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
VOCABULARY = json.loads((goldens.FOLDER / "llama_gqa" / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden checkpoint; the golden ones have no tokenizer, which every other test here asks for token ids."""
    directory = tmp_path_factory.mktemp("model")
    for file in (goldens.FOLDER / "llama_gqa").glob("*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    before = os.environ.get("JAXLLM_CACHE_DIR")
    os.environ["JAXLLM_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    engine = LLM(str(model), skip_tokenizer_init=True, max_model_len=MAX_LEN, **SMALL)
    yield engine
    engine.shutdown()
    os.environ.pop("JAXLLM_CACHE_DIR")
    if before is not None:
        os.environ["JAXLLM_CACHE_DIR"] = before


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **{"skip_tokenizer_init": True, **SMALL, **options})


def nothing_is_lost(llm: LLM) -> None:
    """No request and no block is left, and the engine still answers."""
    core: Any = llm.llm_engine.core
    core.scheduler.check_integrity()
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 2
    while core.has_unfinished_requests():  # the surplus step
        core.step()
    assert llm.reset_prefix_cache()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "prompt is empty, must have at least 1 token"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ("text", "there is no tokenizer; pass token ids"),
        ([[1] * MAX_LEN], f"prompt has {MAX_LEN} tokens, the model takes {MAX_LEN} with at least 1 of output; shorten it or"),
        ([[1, VOCABULARY]], f"token id {VOCABULARY} at position 1; the vocabulary has 0 to {VOCABULARY - 1}"),
        ([[-1]], "token id -1 at position 0"),
        ([[1.5]], "must have integers only"),
        ([{"promt": "a"}], "unknown key of a prompt 'promt'; did you mean 'prompt'"),
        (7, "prompts is a int, must be a prompt or a list"),
    ],
)
def test_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert message in str(caught.value)


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_one_bad_prompt_of_many_is_named_before_anything_runs(llm: LLM) -> None:
    core: Any = llm.llm_engine.core
    steps = core.runner.num_steps
    with pytest.raises(
        InvalidRequestError, match="2 of 3 prompts cannot be served, none was run: prompt 1: .*empty.*; prompt 2: "
    ):
        llm.generate([[1], [], [VOCABULARY]], GREEDY)
    assert core.runner.num_steps == steps
    nothing_is_lost(llm)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"temperature": float("nan")}, "temperature is nan, must be at least 0 and at most 1000000.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"top_p": 0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_p": 2}, "top_p is 2.0, must be above 0 and at most 1"),
        ({"n": 0}, "n is 0, must be at least 1 and at most 16384"),
        ({"n": 100_000}, "n is 100000, must be at least 1 and at most 16384"),
        ({"n": 2, "temperature": 0}, "n is 2, must be 1 when temperature is 0"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"stop": ["a", ""]}, "stop holds an empty string"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, must be at most max_tokens, which is 3"),
    ],
)
def test_sampling_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21, but this engine reports at most 20; ask for fewer or raise --max-logprobs"),
        ({"logprobs": -1}, f"logprobs is -1, the whole vocabulary of {VOCABULARY}"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"stop": "a"}, "stop needs a tokenizer"),
        ({"allowed_token_ids": [VOCABULARY]}, f"allowed_token_ids has token id {VOCABULARY}; the vocabulary has 0 to"),
        ({"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias has token id {VOCABULARY}"),
        ({"stop_token_ids": [VOCABULARY]}, f"stop_token_ids has token id {VOCABULARY}; the vocabulary has 0 to"),
        ({"min_tokens": MAX_LEN, "max_tokens": None}, f"only {MAX_LEN - 1} of {MAX_LEN} are left"),
        ({"extra_args": {"mine": [1]}}, "which is no logits processor"),
    ],
)
def test_sampling_values_that_this_engine_cannot_serve(llm: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[1]], SamplingParams(**values))
    assert message in str(caught.value)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: change_config(d, architectures=["MambaForCausalLM"]),
            "unknown architecture MambaForCausalLM; known and similar:",
        ),
        (lambda d: (d / "config.json").unlink(), "is not a model directory: it has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights: no file of it is named model*.safetensors, "),
        (lambda d: cut_in_half(d / "model.safetensors"), "model.safetensors is truncated or corrupt: "),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 99), "is truncated or corrupt: its header should have"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "it has 0 bytes, a safetensors file has at least 8"),
        (lambda d: (d / "model.safetensors").write_bytes(b"version https://git-lfs"), "Git LFS pointer to them; run `git lfs"),
        (lambda d: change_config(d, intermediate_size=40), "of the wrong shape: model.layers.0.mlp.down_proj.weight is ["),
        (lambda d: change_config(d, num_hidden_layers=3), "missing: model.layers.2."),
    ],
)
def test_models(copy: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(copy)
    with pytest.raises(ModelLoadError) as caught:
        open_llm(copy)
    assert message in str(caught.value)


def test_a_missing_tokenizer_is_told_with_the_way_out(copy: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer missing: .*; pass --tokenizer or --skip-tokenizer-init"):
        open_llm(copy, skip_tokenizer_init=False)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size is 3, which does not divide"),
        ({"num_gpu_blocks_override": 3}, OutOfMemoryError, "2 are there besides the null block"),
        (
            {"num_gpu_blocks_override": 3},
            OutOfMemoryError,
            "give it --num-gpu-blocks-override 5 or more, or use --max-model-len 32",
        ),
        (
            {"kv_cache_memory_bytes": 100},
            OutOfMemoryError,
            "0 are there besides the null block (0.0 MiB); give it --kv-cache-mem",
        ),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len is 1000000, the model was made for"),
        ({"max_num_seqs": 64}, ConfigError, "max_num_batched_tokens is 16, less than max_num_seqs 64"),
        ({"max_num_sequences": 64}, ConfigError, "unknown engine option 'max_num_sequences'; did you mean 'max_num_seqs'?"),
        ({"block_size": 7}, ConfigError, "block_size is 7, must be 8, 16, 32, 64 or 128"),
        ({"dtype": "int4"}, ConfigError, "dtype is 'int4', must be one of auto, bfloat16"),
    ],
)
def test_engine_options_are_refused_before_weights_are_read(
    copy: Path, options: dict[str, Any], kind: type[JaxLLMError], message: str
) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(kind) as caught:
        open_llm(copy, **{"max_model_len": MAX_LEN, **options})
    assert message in str(caught.value)


def test_more_devices_than_exist(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    change_config(copy, num_attention_heads=16, num_key_value_heads=16, head_dim=8, vocab_size=256, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 16, this machine has 8 devices \(cpu\); choose 1 to 8"):
        open_llm(copy, tensor_parallel_size=16)


def test_a_platform_that_jax_cannot_use(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise AssertionError  # what jax 0.10 raises for JAX_PLATFORMS=cuda without its plugin

    monkeypatch.setattr("jax.default_backend", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ConfigError, match="JAX finds no device for JAX_PLATFORMS=cuda .*; unset JAX_PLATFORMS, or install"):
        open_llm(copy)


def test_ctrl_c_ends_a_run_cleanly_and_keeps_the_engine(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    finished = []
    with pytest.raises(KeyboardInterrupt):
        for place, output in llm.generate_iter([[1], [2], [3]], [GREEDY, long, long]):
            if output.finished:
                finished.append(place)
                signal.raise_signal(signal.SIGINT)
    assert finished == [0]
    nothing_is_lost(llm)


def test_ctrl_c_during_a_step_is_raised_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = llm.llm_engine.core
    step = core.loop.step

    def interrupted() -> Any:
        monkeypatch.setattr(core.loop, "step", step)
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(core.loop, "step", interrupted)
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    nothing_is_lost(llm)


def test_a_failed_step_is_an_error_of_the_project_and_frees_the_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_llm(model, max_model_len=MAX_LEN, num_gpu_blocks_override=9)
    core: Any = engine.llm_engine.core

    def fail(plan: Any) -> Any:
        raise RuntimeError("INTERNAL: no luck")

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "dispatch", fail)
        with pytest.raises(EngineError, match="prompt 0 of 2 failed: the engine failed while it computed the request"):
            engine.generate([[1], [2]], GREEDY, use_tqdm=False)
    nothing_is_lost(engine)
    engine.shutdown()


def test_a_tokenizer_that_is_there_serves_texts(copy: Path) -> None:
    write_tokenizer(copy, "words")
    shutil.copy(Path(jaxllm.__file__).parent / "data" / "demo" / "generation_config.json", copy)
    config = json.loads((copy / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match="prompt 1: prompt is empty"):
        open_llm(copy, skip_tokenizer_init=False, max_model_len=min(MAX_LEN, config["max_position_embeddings"])).generate(
            ["one", ""]
        )
