"""What `StepFunctions.sample` reports of the tokens it draws under masks, with a model whose hidden states are its logits."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.parallel.shards import ONE_DEVICE
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import NUM_ROW_COLUMNS, Column
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.rows import LogprobsKind
from jaxllm.runner.step import StepFunctions
from jaxllm.sampling.columns import pack_columns
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams

V, K = 70, 5
ALLOWED = ([3, 41, 69], list(range(V)), [5])
"""By row: some tokens, all as without a grammar, one."""
R = len(ALLOWED)
LOGITS = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32) * 4
NAMED = [3, 4, 69]
TEMPERATURE, TOP_K = 0.5, 2
FUNCTIONS = StepFunctions(
    merge=lambda params: SimpleNamespace(logits=lambda hidden_TD, shards: hidden_TD),
    shards=ONE_DEVICE,
    cache=None,  # type: ignore[arg-type]
    max_rows=R,
    kernels=Kernels(),
    num_logprobs=K,
    logprobs_mode="raw_logprobs",
)


def sample(functions: StepFunctions, variant: Variant) -> tuple[np.ndarray, Any]:
    """The tokens of all rows, and their scores."""
    params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=1)
    columns = np.zeros((R, NUM_ROW_COLUMNS), np.int32)
    columns[:, Column.TOKEN_ROW] = range(R)
    columns[:, Column.SAMPLING :] = pack_columns(params)
    bits = np.zeros((R, 32 * num_words(V)), np.uint8)
    for row, allowed in enumerate(ALLOWED):
        bits[row, allowed] = 1
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    state = SamplingState.zeros(R + 1, V) if variant == Variant.FULL else None
    rows = RowArrays(np.zeros(R + 1, np.int32), np.zeros((R + 1, 1), np.int32), {})  # type: ignore[arg-type]
    program = jax.jit(partial(functions.sample, R, variant, LogprobsKind.NAMED, 1, False, ()))
    named = np.tile(np.int32(NAMED), (R, 1))
    _, token_R, _, scores = jax.device_get(program(rows, LOGITS[:, None], columns, state, named, mask, None))
    return token_R, scores


@pytest.mark.parametrize(
    ("mode", "variant", "kernels"),
    [
        ("raw_logprobs", Variant.MASKED, {}),
        pytest.param("raw_logprobs", Variant.MASKED, {"sampling": "triton", "interpret": True}, marks=pytest.mark.slow),
        ("raw_logits", Variant.MASKED, {}),
        pytest.param("raw_logprobs", Variant.FULL, {}, marks=pytest.mark.slow),
        ("processed_logprobs", Variant.FULL, {}),
        ("processed_logits", Variant.FULL, {}),
    ],
)
def test_logprobs_are_of_the_tokens_that_the_mask_allows(mode: str, variant: Variant, kernels: dict[str, Any]) -> None:
    functions = replace(FUNCTIONS, logprobs_mode=mode, kernels=Kernels(**kernels))
    token_R, (top, named) = sample(functions, variant)
    for row, allowed in enumerate(ALLOWED):
        expected = np.full(V, -np.inf)
        expected[allowed] = LOGITS[row, allowed].astype(np.float64)
        if mode.startswith("processed"):
            expected /= TEMPERATURE
            expected[expected < np.sort(expected)[-TOP_K]] = -np.inf
        if mode.endswith("logprobs"):
            expected -= np.log(np.exp(expected).sum())
        assert token_R[row] in allowed
        for found in (top, named):
            assert found.token_ids_R1k[row, 0] == token_R[row]
            assert found.rank_R[row] == (expected >= expected[token_R[row]]).sum()
            np.testing.assert_allclose(found.logprobs_R1k[row], expected[found.token_ids_R1k[row]], atol=1e-5)
        likeliest = [token for token in np.argsort(-expected, kind="stable")[:K] if expected[token] > -np.inf]
        assert top.token_ids_R1k[row, 1 : 1 + len(likeliest)].tolist() == likeliest
        assert named.token_ids_R1k[row, 1:].tolist() == NAMED
