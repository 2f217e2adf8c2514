"""The demo model with fp8 weights and an fp8 KV cache in a whole engine answers as before, and finds text about as likely, as it does with
other weights of few bits."""

import dataclasses
import shutil

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.hub import resolve_model
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import parameters, state_of
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import goldens

SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "token_buckets": (256,),
    "decode_buckets": (2,),
    "use_progress_bar": False,
}
TEXT = '''"""Reads and writes simple tables."""

import csv
import os


class Table:
    """Rows of named columns."""

    def __init__(self, columns):
        self.columns = list(columns)
        self.rows = []

    def add(self, *values):
        if len(values) != len(self.columns):
            raise ValueError("expected %d values, got %d" % (len(self.columns), len(values)))
        self.rows.append(values)

    def column(self, name):
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def save(self, path):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)


def load(path):
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    with open(path, newline="") as file:
        reader = csv.reader(file)
        table = Table(next(reader))
        for row in reader:
            table.add(*row)
    return table
'''


@pytest.fixture(scope="module")
def token_ids():
    return load_tokenizer(resolve_model("demo")).encode(TEXT)


@pytest.fixture(scope="module")
def exact(token_ids):
    """The mean negative log likelihood of the text's tokens in float32."""
    return dense_loss(None, token_ids)


def dense_loss(quantization, token_ids):
    config, state = demo(quantization)
    logits = goldens.logits(config, state, token_ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -np.mean([logprobs[i, token] for i, token in enumerate(token_ids[1:])])


def demo(quantization):
    config = load_model_config(resolve_model("demo"), quantization=quantization)
    state = load_weights(config, build_model(config), resolve_model("demo"), load_format="safetensors", mesh=make_mesh())
    return config, state


def loss(llm, token_ids):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    return -np.mean([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.01), ("int4", 0.03)])
def test_weights_of_few_bits_find_text_as_likely(token_ids, exact, quantization, limit):
    """Measured over 61 kB: see docs/MODELS.md."""
    assert len(token_ids) > 200
    assert 0 < abs(dense_loss(quantization, token_ids) / exact - 1) < limit


@pytest.mark.slow
def test_fp8_weights_and_cache(token_ids, exact):
    llm = LLM(model="demo", quantization="fp8", kv_cache_dtype="fp8", **SMALL)
    [answer] = llm.chat(
        [{"role": "user", "content": "What is 17 + 28?"}], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
    )
    assert answer.outputs[0].text.strip() == "17 + 28 = 45"
    assert 0 < abs(loss(llm, token_ids) / exact - 1) < 0.01
    llm.shutdown()


@pytest.mark.slow
def test_scales_of_a_checkpoint_on_two_devices(token_ids, exact, tmp_path):
    """Keys and values are divided by these scales when written and multiplied when read."""
    config, state = demo("fp8")
    config = dataclasses.replace(config, formats=(Fp8(computes=True, scale_name="weight_scale", kv_cache=True),))
    model = build_model(config)
    arrays = {path: variable[...] for path, variable in parameters(state)}
    arrays |= {path: np.array([0.03, 0.07], np.float32) for path, _ in parameters(model) if path[-1] == "kv_scale"}
    goldens.save(config, state_of(model, arrays), tmp_path, resolve_model("demo"))
    for file in resolve_model("demo").glob("*token*"):
        shutil.copy(file, tmp_path)
    llm = LLM(model=str(tmp_path), tensor_parallel_size=2, **SMALL)
    assert 0 < abs(loss(llm, token_ids) / exact - 1) < 0.01
    llm.shutdown()
