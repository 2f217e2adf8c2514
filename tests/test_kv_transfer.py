from typing import Any

import msgspec
import pytest

from jaxllm.engine import messages
from jaxllm.errors import InvalidRequestError
from jaxllm.kv_transfer import MAX_BYTES, KVTransfer, read_kv_limits, read_kv_transfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_stats import SchedulerStats

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TO_DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "5d1c",
    "remote_request_id": "00ff",
    "remote_host": "10.0.0.7",
    "remote_port": 14579,
    "remote_block_ids": [[0, 1, 2]],
    "remote_num_tokens": 48,
    "remote_prefill_cached_tokens": 16,
    "remote_blocks_expiry_time": 1790000000.5,
    "tp_size": 1,
    "transfer_mode": "pull",
    "jaxllm_signature": "ab12",
}
PULLED = KVTransfer(
    remote_engine_id="5d1c",
    lease_id="00ff",
    host="10.0.0.7",
    port=14579,
    num_blocks=3,
    num_tokens=48,
    num_cached_tokens=16,
    signature="ab12",
)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}, {"kv_load_tiers": ["x"]}])
def test_parameters_may_ask_for_nothing(params: Any) -> None:
    assert read_kv_transfer(params) is None


def test_both_legs_are_read() -> None:
    assert read_kv_transfer(TO_PREFILL) == KVTransfer(keep_for_decode=True)
    assert read_kv_transfer(TO_DECODE) == PULLED
    assert read_kv_transfer({**TO_DECODE, "remote_block_ids": [4, 5]}) == msgspec.structs.replace(PULLED, num_blocks=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"do_remote_decode": True, "do_remote_prefill": True}, "both do_remote_decode and do_remote_prefill"),
    ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode is 1, must be true or false"),
    ({"do_remote_prefill": "true"}, "kv_transfer_params.do_remote_prefill is 'true'"),
    ({"do_remote_prefill": True}, "remote_engine_id is missing"),
    ({**TO_DECODE, "remote_request_id": ["a"]}, "remote_request_id is a list"),
    ({**TO_DECODE, "remote_engine_id": ""}, "remote_engine_id has 0 characters"),
    ({**TO_DECODE, "remote_engine_id": "x" * 257}, "remote_engine_id has 257 characters, must have 1 to 256"),
    ({**TO_DECODE, "remote_host": "a b"}, "remote_host has 3 characters.*visible ASCII"),
    ({**TO_DECODE, "remote_host": "a\n"}, "remote_host"),
    ({**TO_DECODE, "remote_host": {}}, "remote_host is an object"),
    ({**TO_DECODE, "remote_port": 0}, "remote_port is 0, must be 1 to 65535"),
    ({**TO_DECODE, "remote_port": 65536}, "remote_port is 65536"),
    ({**TO_DECODE, "remote_port": None}, "remote_port is missing"),
    ({**TO_DECODE, "remote_block_ids": 7}, "remote_block_ids is 7"),
    ({**TO_DECODE, "remote_block_ids": [[1, -1]]}, "remote_block_ids has other entries"),
    ({**TO_DECODE, "remote_block_ids": [1, "2"]}, "remote_block_ids has other entries"),
    ({**TO_DECODE, "remote_num_tokens": -5}, "remote_num_tokens is -5, must be 0 to 9223372036854775807"),
    ({**TO_DECODE, "remote_num_tokens": 2**63}, "remote_num_tokens is 9223372036854775808"),
    ({**TO_DECODE, "remote_num_tokens": 10**80}, "remote_num_tokens is 10000.*…, must be"),
    ({**TO_DECODE, "remote_num_tokens": True}, "remote_num_tokens is True, must be an integer"),
    ({**TO_DECODE, "remote_num_tokens": "3"}, "remote_num_tokens is '3'"),
    ({**TO_DECODE, "remote_port": 2**63}, "remote_port is 9223372036854775808"),
    ({**TO_DECODE, "remote_prefill_cached_tokens": 2.5}, "remote_prefill_cached_tokens is 2.5"),
    ({**TO_DECODE, "jaxllm_signature": 4}, "jaxllm_signature is 4, must be a text"),
    ({"unknown": "x" * MAX_BYTES}, f"longer than {MAX_BYTES} bytes"),
]


@pytest.mark.parametrize(("params", "text"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_what_is_wrong_is_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        read_kv_transfer(params)
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_load_tokens": -1}, "kv_transfer_params.max_load_tokens is -1, must be 0 to 9223372036854775807"),
        ({"max_offload_tokens": 10**80}, "kv_transfer_params.max_offload_tokens is 10000"),
        ({"max_offload_tokens": "9"}, "kv_transfer_params.max_offload_tokens is '9', must be an integer"),
        ({"max_load_tokens": False}, "kv_transfer_params.max_load_tokens is False, must be an integer"),
    ],
)
def test_wrong_limits_are_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        read_kv_limits(params)


def test_limits_are_options_of_any_request() -> None:
    limits = {"max_load_tokens": 0, "max_offload_tokens": 4096}
    assert read_kv_limits(limits) == read_kv_limits({**TO_DECODE, **limits}) == limits
    assert read_kv_limits(None) == read_kv_limits({}) == dict.fromkeys(limits)
    assert read_kv_transfer(limits) is None and read_kv_transfer({**TO_DECODE, **limits}) == PULLED


def test_block_numbers_of_a_million_tokens_fit() -> None:
    found = read_kv_transfer({**TO_DECODE, "remote_block_ids": [list(range(62_500))]})
    assert found is not None and found.num_blocks == 62_500


def test_messages_carry_them() -> None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=1, seed=0),
        options=RequestOptions(kv_transfer=PULLED),
    )
    arrived = messages.decode_client_message(messages.encode(messages.Add("client", request)))
    assert isinstance(arrived, messages.Add) and arrived.request.options.kv_transfer == PULLED
    output = EngineCoreOutput("r", [5], kv_transfer_params=TO_DECODE)
    load = messages.Load(SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0))
    outputs = messages.decode_engine_message(messages.encode(messages.Outputs([output], load)))
    assert isinstance(outputs, messages.Outputs) and outputs.outputs[0].kv_transfer_params == TO_DECODE
