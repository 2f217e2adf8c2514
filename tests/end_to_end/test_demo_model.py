"""The demo model that is shipped with the package."""

import json

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.hub import resolve_model

PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef list_files(path):\n", "class Stack:\n    def push(self, item):\n"]


@pytest.fixture(scope="module")
def llm():
    llm = LLM(model="demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    yield llm
    llm.shutdown()


@pytest.mark.slow
def test_it_completes_code_and_answers_questions(llm):
    params = SamplingParams(temperature=0, max_tokens=60)
    [code] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert "a, b = b, a + b" in code.outputs[0].text
    [answer] = llm.chat([{"role": "user", "content": "What is 17 + 28?"}], params, use_tqdm=False)
    assert answer.outputs[0].text.strip() == "17 + 28 = 45" and answer.outputs[0].finish_reason == "stop"


def test_the_package_holds_everything_and_no_more_than_24_megabytes():
    directory = resolve_model("demo")
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(
        files
    )
    assert 8e6 < sum(files.values()) < 24e6
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.torch
def test_transformers_loads_it_and_writes_the_same(llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        encoded = tokenizer(prompt, return_tensors="pt")
        assert encoded["input_ids"][0].tolist() == output.prompt_token_ids
        generated = model.generate(**encoded, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
        assert generated[0, encoded["input_ids"].shape[1] :].tolist() == output.outputs[0].token_ids
