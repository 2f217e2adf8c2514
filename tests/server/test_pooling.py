"""Embeddings, pooling, scores and ranks over a core whose vectors count tokens."""

import asyncio
import base64
import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.model_parts import Classifier
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import ErrorKind, FinishReason
from jaxllm.text.tokenizer import load_tokenizer
from server.app import create_app
from server.pooling_service import Input, PoolingService
from server.vectors import as_bytes, as_json
from server.work import WorkPool
from tests.helpers.fake_engine_core import WIDTH
from tests.helpers.scripted_core import fake_core
from tests.server.client import Client
from tests.server.conftest import options

TEXTS = ["one two three", "four five six seven", "one two three four"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def tokenizer(served_directory):
    return load_tokenizer(served_directory)


def counts(ids) -> np.ndarray:
    """The fake core's vector of a prompt."""
    vector = np.bincount(np.array(ids) % WIDTH, minlength=WIDTH).astype(np.float32)
    return vector / np.linalg.norm(vector)


def embed(client, **body):
    response = client.post(PATH, {"model": "m", "input": TEXTS, **body})
    assert response.status_code == 200, response.text
    return response


def refused(client, path, body, param, *, status=400):
    response = client.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return error


def test_each_text_gets_its_vector(client, tokenizer):
    reply = embed(client, user="somebody", request_id="mine").json()
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert reply["id"] == "embd-mine" and reply["object"] == "list" and reply["model"] == "m"
    assert [item["index"] for item in reply["data"]] == [0, 1, 2]
    assert all(item["object"] == "embedding" for item in reply["data"])
    for item, each in zip(reply["data"], ids, strict=True):
        np.testing.assert_allclose(item["embedding"], counts(each), rtol=1e-6)
    num_tokens = sum(map(len, ids))
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]]], ids=["ids", "lists of ids"])
def test_token_ids_are_taken_as_they_are(client, given):
    data = embed(client, input=given).json()["data"]
    lists = given if isinstance(given[0], list) else [given]
    assert len(data) == len(lists)
    np.testing.assert_allclose(data[0]["embedding"], counts(lists[0]), rtol=1e-6)


def test_a_conversation_is_rendered(client, tokenizer):
    messages = [{"role": "user", "content": "one two"}]
    data = embed(client, input=None, messages=messages).json()["data"]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    np.testing.assert_allclose(data[0]["embedding"], counts(ids), rtol=1e-6)


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_every_format_holds_the_same_numbers(client, dtype, endianness):
    options = {"embed_dtype": dtype, "endianness": endianness}
    numbers = np.array([item["embedding"] for item in embed(client, **options).json()["data"]], np.float32)
    scalar = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}.get(dtype, dtype)
    scalar = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else scalar)

    def read(data: bytes) -> np.ndarray:
        raw = np.frombuffer(data, f"{'>' if endianness == 'big' else '<'}u{scalar.itemsize}")
        return raw.astype(f"<u{scalar.itemsize}").view(scalar).astype(np.float32).reshape(-1, WIDTH)

    for item, expected in zip(embed(client, encoding_format="base64", **options).json()["data"], numbers, strict=True):
        np.testing.assert_array_equal(read(base64.b64decode(item["embedding"]))[0], expected)
    response = embed(client, encoding_format="bytes", **options)
    np.testing.assert_array_equal(read(response.content), numbers)
    about = json.loads(response.headers["metadata"])
    assert [entry["end"] - entry["start"] for entry in about["data"]] == [WIDTH * scalar.itemsize] * 3
    assert about["usage"]["prompt_tokens"] > 0
    response = embed(client, encoding_format="bytes_only", **options)
    np.testing.assert_array_equal(read(response.content), numbers)
    assert "metadata" not in response.headers


@pytest.mark.parametrize(("side", "kept"), [("right", [7, 8]), ("left", [9, 10]), (None, [7, 8])])
def test_ids_that_are_too_many_are_cut_off(client, side, kept):
    reply = embed(client, input=[7, 8, 9, 10], truncate_prompt_tokens=2, truncation_side=side).json()
    np.testing.assert_allclose(reply["data"][0]["embedding"], counts(kept), rtol=1e-6)
    assert reply["usage"]["prompt_tokens"] == 2


def test_special_tokens_stay_when_a_text_is_cut(client, tokenizer):
    plain = tokenizer.encode(TEXTS[1], add_special_tokens=False)
    reply = embed(client, input=TEXTS[1], truncate_prompt_tokens=3).json()
    np.testing.assert_allclose(reply["data"][0]["embedding"], counts([tokenizer.bos_token_id, *plain[:2]]), rtol=1e-6)
    reply = embed(client, input=TEXTS[1], truncate_prompt_tokens=3, add_special_tokens=False).json()
    np.testing.assert_allclose(reply["data"][0]["embedding"], counts(plain[:3]), rtol=1e-6)
    assert embed(client, input="one " * 1000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 200


def test_pooling_gives_a_vector_for_each_token(client):
    reply = client.post("/pooling", {"input": [[5, 6, 7], [8]], "task": "token_embed"}).json()
    assert reply["id"].startswith("pool-")
    assert [np.array(item["data"]).shape for item in reply["data"]] == [(3, WIDTH), (1, WIDTH)]
    assert reply["data"][0]["object"] == "pooling"
    np.testing.assert_array_equal(reply["data"][0]["data"], np.eye(WIDTH)[[5, 6, 7]])
    for task in ({}, {"task": "embed"}):
        reply = client.post("/v1/pooling", {"input": [5, 6], "use_activation": False, **task}).json()
        np.testing.assert_array_equal(reply["data"][0]["data"], np.eye(WIDTH)[5] + np.eye(WIDTH)[6])


def test_scores_are_cosines_of_pairs(client, tokenizer):
    vectors = [counts(tokenizer.encode(text)) for text in TEXTS]
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    reply = client.post("/score", body).json()
    assert [item["index"] for item in reply["data"]] == [0, 1, 2] and reply["data"][0]["object"] == "score"
    np.testing.assert_allclose([item["score"] for item in reply["data"]], [vectors[0] @ v for v in vectors], rtol=1e-5)
    for names in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        reply = client.post("/v1/score", {names[0]: TEXTS, names[1]: TEXTS[::-1]}).json()
        expected = [a @ b for a, b in zip(vectors, vectors[::-1], strict=True)]
        np.testing.assert_allclose([item["score"] for item in reply["data"]], expected, rtol=1e-5)


def test_ranks_put_the_likest_first(client):
    documents = ["four five six seven", "one two three", {"text": "one two six"}]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        reply = client.post(path, {"model": "m", "query": "one two three", "documents": documents}).json()
        assert reply["id"].startswith("rerank-") and reply["usage"]["total_tokens"] > 0
        assert reply["results"][0] == {"index": 1, "document": {"text": "one two three"}, "relevance_score": pytest.approx(1)}
        scores = [result["relevance_score"] for result in reply["results"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
    body = {"query": "one two three", "documents": documents, "top_n": 1, "return_documents": False}
    assert client.post("/rerank", body).json()["results"] == [{"index": 1, "relevance_score": pytest.approx(1)}]


def test_texts_that_are_compared_are_cut_each_at_its_own_length(client):
    body = {"text_1": "one two three", "text_2": "one two three", "max_tokens_per_query": 3, "max_tokens_per_doc": 2}
    reply = client.post("/score", body).json()
    assert reply["usage"]["prompt_tokens"] == 5
    long = {"text_1": "one two three", "text_2": "one " * 300, "max_tokens_per_query": 10**30, "max_tokens_per_doc": 10**30}
    assert client.post("/score", long).json()["usage"]["prompt_tokens"] > 200
    refused(client, "/score", {**long, "max_tokens_per_doc": 0}, "max_tokens_per_doc")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["one", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[5], [999_999]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ["a"] * 33, "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 201}, "truncate_prompt_tokens"),
        ({"input": "a", "softmax": "perhaps"}, "softmax"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_embedded_is_refused(client, body, param):
    refused(client, PATH, body, param)


def test_a_prompt_may_be_as_long_as_the_model_takes_and_no_longer(client):
    assert embed(client, input=[5] * 200).json()["usage"]["prompt_tokens"] == 200
    for body in ({"input": [5] * 201}, {"input": "one " * 300}, {"input": "one " * 300_000}):
        assert refused(client, PATH, body, "input")["code"] == "context_length_exceeded"
    error = refused(client, "/score", {"text_1": "one", "text_2": ["one", "one " * 300]}, "text_2")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "data_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [""]}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruction": "x"}, "instruction"),
    ],
)
def test_what_cannot_be_pooled_or_compared_is_refused(client, path, body, param):
    refused(client, path, body, param)


def test_an_unknown_model_is_not_found(client):
    refused(client, PATH, {"model": "other", "input": "a"}, "model", status=404)


def test_inputs_that_nobody_waits_for_are_aborted(served_directory):
    core = fake_core(served_directory, max_model_len=200)
    core.step = list  # no request ever ends

    async def leave() -> None:
        with AsyncLLM(core=core) as engine:
            service = PoolingService(engine, options().limits, WorkPool())
            requests = await service.prepare([Input([5, place], "input", PoolingParams()) for place in range(3)], "r")
            work = asyncio.create_task(service.run(requests))
            while len(core.running) < 3:
                await engine.get_metrics()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await engine.get_metrics()
            assert len(core.aborted) == 3

    asyncio.run(asyncio.wait_for(leave(), 120))


def test_an_input_that_waits_too_long_is_answered_as_overload(served_directory):
    core = fake_core(served_directory)

    def expired(running):
        del core.running[running.request.request_id]
        return EngineCoreOutput(
            running.request.request_id, [], FinishReason.ERROR, "waited", error_kind=ErrorKind.QUEUE_TIMEOUT
        )

    core._advance = expired
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        reply = client.post(PATH, {"input": TEXTS})
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "overloaded"


def test_a_model_without_a_head_serves_vectors_alone(served_directory):
    core = fake_core(served_directory, max_model_len=200)
    core.model_config = dataclasses.replace(core.model_config, generates=False)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        assert len(embed(client).json()["data"]) == 3
        for response in (client.complete(), client.chat(), client.chat(stream=True)):
            assert response.status_code == 400 and "runs as an embedding model" in response.json()["error"]["message"]


def test_so_many_numbers_as_nobody_wants_are_refused(client, monkeypatch):
    monkeypatch.setattr("server.pooling_service.MAX_VALUES", 7 * WIDTH)
    tokens = {"task": "token_embed"}
    assert client.post("/pooling", {"input": [5] * 7, **tokens}).status_code == 200
    assert "64 numbers, at most 56" in refused(client, "/pooling", {"input": [5] * 8, **tokens}, "input")["message"]


def test_numbers_beyond_a_narrow_type_are_its_largest():
    vectors = np.array([1e6, -1e6, 1], np.float32)
    assert asyncio.run(as_json(vectors, "float", "float16", "native")) == [b"[65504.0,-65504.0,1.0]"]
    assert np.frombuffer(as_bytes(vectors, "fp8_e4m3", "native"), ml_dtypes.float8_e4m3fn).tolist() == [448, -448, 1]


@pytest.fixture
def classifier(served_directory):
    """A client of a model whose only class is the fake core's first number."""

    def make(labels=("good",)):
        core = fake_core(served_directory, max_model_len=200)
        head = Classifier(labels, "score", "sigmoid")
        core.model_config = dataclasses.replace(core.model_config, generates=False, classifier=head)
        return Client(create_app(AsyncLLM(core=core), options()))

    return make


def test_inputs_get_the_probability_of_each_class(classifier, tokenizer):
    labels = tuple(f"class {i}" for i in range(WIDTH))
    with classifier(labels) as client:
        reply = client.post("/classify", {"input": TEXTS, "request_id": "mine"}).json()
        vector = counts(tokenizer.encode(TEXTS[0]))
        assert (reply["id"], reply["object"], reply["usage"]["completion_tokens"]) == ("classify-mine", "list", 0)
        np.testing.assert_allclose(reply["data"][0]["probs"], vector, rtol=1e-6)
        assert client.post("/v1/classify", {"input": [5, 5, 6]}).json()["data"][0] == {
            "index": 0,
            "label": "class 5",
            "probs": pytest.approx(counts([5, 5, 6]).tolist()),
            "num_classes": WIDTH,
        }
        assert client.post("/invocations", {"input": [5, 5, 6]}).json()["data"][0]["label"] == "class 5"
        assert client.post("/pooling", {"input": [5, 5, 6], "task": "classify"}).json()["data"][0]["object"] == "pooling"
        assert "is a classifier" in refused(client, PATH, {"input": TEXTS}, "task")["message"]
        assert "8 classes" in refused(client, "/score", {"text_1": "one", "text_2": "two"}, None)["message"]
        for path, asked in (
            ("/v1/completions", {"prompt": "one"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}),
        ):
            assert "generates no text" in refused(client, path, asked, "model")["message"]


def test_a_model_of_pairs_scores_both_texts_at_once(classifier, tokenizer):
    with classifier() as client:
        joined = [counts(tokenizer.encode("one " + text))[0] for text in TEXTS]
        reply = client.post("/score", {"text_1": "one ", "text_2": TEXTS}).json()
        np.testing.assert_allclose([item["score"] for item in reply["data"]], joined, rtol=1e-5)
        reply = client.post("/rerank", {"query": "one ", "documents": TEXTS, "top_n": 2}).json()
        best = sorted(range(3), key=lambda place: -joined[place])[:2]
        assert [result["index"] for result in reply["results"]] == best
        body = {"query": "one", "documents": [" two three four"], "max_tokens_per_doc": 1}
        assert client.post("/rerank", body).json()["usage"]["prompt_tokens"] == len(tokenizer.encode("one two"))
        body = {"text_1": "one", "text_2": " two" * 100_000, "max_tokens_per_doc": 1}
        assert client.post("/score", body).json()["usage"]["prompt_tokens"] == len(tokenizer.encode("one two"))
        whole, plain = (tokenizer.encode("one two three four", add_special_tokens=special) for special in (True, False))
        num_special = len(whole) - len(plain)
        pair = {"text_1": "one ", "text_2": "two three four"}
        for more, ids in (
            ({"truncate_prompt_tokens": num_special + 2}, tokenizer.encode("one two")),
            ({"add_special_tokens": False}, plain),
        ):
            reply = client.post("/score", pair | more).json()
            assert reply["usage"]["prompt_tokens"] == len(ids)
            np.testing.assert_allclose(reply["data"][0]["score"], counts(ids)[0], rtol=1e-5)
        for length in (0, -2, 201):
            refused(client, "/score", pair | {"truncate_prompt_tokens": length}, "truncate_prompt_tokens")
        refused(client, "/score", pair | {"model": "other", "text_2": ""}, "model", status=404)
        refused(client, "/score", pair | {"text_2": " two" * 150_000, "timeout": 1e-3}, None, status=408)
        refused(client, "/score", {"text_1": "one", "text_2": ["two", ""]}, "text_2")
        error = refused(client, "/score", {"text_1": "one", "text_2": "two " * 400}, "text_2")
        assert "maximum context length is 200" in error["message"]


def test_classes_and_activations_need_a_classifier(client):
    assert "no classification head" in refused(client, "/classify", {"input": TEXTS}, "task")["message"]
    refused(client, "/score", {"text_1": "one", "text_2": "two", "use_activation": False}, None)
