import numpy as np
import pytest

from jaxllm.sampling.columns import NUM_COLUMNS, pack_columns, unpack_columns
from jaxllm.sampling.variants import StateUse
from jaxllm.sampling_params import SamplingParams


def test_packed_columns_come_back():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=-2,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        min_tokens=3,
        top_n_sigma=0.3,
    )
    packed = pack_columns(params)
    assert packed.shape == (NUM_COLUMNS,) and packed.dtype == np.int32
    columns = unpack_columns(packed[None])
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "min_tokens",
        "top_n_sigma",
    ):
        assert getattr(columns, name)[0] == np.float32(getattr(params, name))
    assert (int(columns.seed_high[0]) << 32 | int(columns.seed_low[0])) == 2**64 - 2
    assert columns.uses_state[0] == StateUse.ALL and columns.presence_penalty[0] == 0


def test_zeros_and_a_plain_greedy_request_ask_for_nothing():
    np.testing.assert_array_equal(pack_columns(SamplingParams(temperature=0)), 0)
    columns = unpack_columns(np.zeros((1, NUM_COLUMNS), np.int32))
    assert columns.temperature[0] == 0 and columns.top_p[0] == 1 and columns.repetition_penalty[0] == 1


def test_a_random_request_must_have_a_seed():
    with pytest.raises(AssertionError):
        pack_columns(SamplingParams())
