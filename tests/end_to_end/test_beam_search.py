"""The demo model, searched by a script and over HTTP."""

import pytest

from jaxllm import LLM, AsyncLLM
from jaxllm.sampling_params import BeamSearchParams
from server.app import create_app
from server.options import ServerOptions
from tests.server.client import Client

PROMPTS = ["def add(a, b):\n", "2 + 3 ="]


@pytest.mark.slow
def test_http_finds_what_a_script_finds():
    llm = LLM(
        model="demo", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, token_buckets=(64,), decode_buckets=(8,)
    )
    params = BeamSearchParams(3, 8, length_penalty=0.5)
    expected = [output.sequences for output in llm.beam_search(PROMPTS, params)]
    with AsyncLLM(core=llm.llm_engine.core) as engine, Client(create_app(engine, ServerOptions())) as client:
        body = {"use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5}
        found = client.complete(**body, prompt=PROMPTS, echo=True, return_token_ids=True).json()["choices"]
        scored = client.complete(**body, prompt=PROMPTS, logprobs=0).json()["choices"]
    sequences = [sequence for each in expected for sequence in each]
    assert [choice["text"] for choice in found] == [sequence.text for sequence in sequences]
    for choice, with_logprobs, sequence in zip(found, scored, sequences, strict=True):
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert ids[: len(sequence.tokens)] == sequence.tokens and len(ids) <= len(sequence.tokens) + 1
        assert sum(with_logprobs["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob, abs=1e-3)
