"""Options of prefill and decode engines that contradict each other."""

from typing import Any

import pytest

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.options.kv_transfer import check_policies, network

PREFILL = {"kv_role": "prefill", "kv_offloading_size": 1.0}
DECODE = {"kv_role": "decode", "kv_offloading_size": 1.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_role": "prefill"}, "kv_role is prefill, but there is no host memory.*set kv_offloading_size"),
        ({"kv_role": "decode", "kv_offloading_size": 0}, "kv_role is decode, but there is no host memory"),
        ({"kv_role": "producer", "kv_offloading_size": 1.0}, "kv_role is 'producer', must be"),
        ({"kv_port": 1}, "kv_port is 1, but no kv_role is given"),
        ({**PREFILL, "data_parallel_size": 2, "nnodes": 2}, "kv_role is prefill and nnodes 2, .* start a server on each"),
        ({"data_parallel_size": 2, "nnodes": 2, "kv_host": "0.0.0.0"}, "kv_host is 0.0.0.0, which decode engines cannot"),
        ({"kv_peers": ["10.0.0.0/8"]}, "kv_peers is .*, but no kv_role is given: it is for decode engines"),
        ({**PREFILL, "kv_peers": ["10.0.0.0/8"]}, "kv_peers is .*, but kv_role is prefill"),
        ({**PREFILL, "kv_load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail', but kv_role is prefill"),
        ({**DECODE, "kv_host": "10.0.0.1"}, "kv_host is '10.0.0.1', but kv_role is decode"),
        ({**PREFILL, "kv_host": "0.0.0.0"}, "kv_host is 0.0.0.0, which decode engines cannot connect to"),
        ({**PREFILL, "kv_host": "10.0.0.1"}, "JAXLLM_KV_TOKEN is not set"),
        ({**PREFILL, "kv_host": ""}, "kv_host is '', must be a name or an address"),
        ({**PREFILL, "kv_port": 65536}, "kv_port is 65536, must be 0 to 65535"),
        ({**DECODE, "kv_peers": []}, "kv_peers is empty"),
        ({**DECODE, "kv_peers": ["10.0.0.1/8"]}, "kv_peers has '10.0.0.1/8', which is no host and no network"),
        ({**DECODE, "kv_peers": ["300.0.0.1"]}, "kv_peers has '300.0.0.1', which is no host"),
        (
            {**DECODE, "kv_peers": ["127.0.0.0/8", "10.0.0.0/8"]},
            "kv_peers has 10.0.0.0/8, but JAXLLM_KV_TOKEN is not set: any client",
        ),
        ({**DECODE, "kv_peers": ["prefill-1"]}, "kv_peers has prefill-1, but JAXLLM_KV_TOKEN is not set"),
        ({**DECODE, "kv_pull_timeout": 0.0}, "kv_pull_timeout is 0.0, must be above 0"),
    ],
    ids=str,
)
def test_options_that_contradict(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KV_TOKEN, raising=False)
    with pytest.raises(ConfigError, match=text):
        EngineConfig.from_options(**options)


def test_an_engine_without_a_role_takes_no_policies_of_decode_engines() -> None:
    for options in ({"kv_pull_timeout": 3.0}, {"kv_load_failure_policy": "fail"}):
        config = EngineConfig.from_options(**options, kv_offloading_size=1.0)  # a server may give it a role
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*, but this engine fetches no blocks from others"):
            check_policies(config.kv_transfer)
        check_policies(config.replace(kv_role="decode").kv_transfer)
    replicas = EngineConfig.from_options(data_parallel_size=2, nnodes=2, kv_port=1)
    with pytest.raises(ConfigError, match="kv_port is 1, but this engine keeps no blocks for others; .* kv_role prefill"):
        check_policies(replicas.kv_transfer)


def test_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KV_TOKEN, raising=False)
    assert EngineConfig.from_options(**DECODE, kv_peers=["127.0.0.0/8", "::1", "localhost"]).kv_transfer.is_decode
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    config = EngineConfig.from_options(kv_role="both", kv_offloading_size=1.0, kv_peers=["10.0.0.0/8", "::1", "prefill-1"])
    assert config.kv_transfer.is_prefill and config.kv_transfer.is_decode
    assert network("prefill-1") is None and network("::1") is not None
    assert not EngineConfig.from_options().kv_transfer.is_prefill
    assert EngineConfig.from_options(**PREFILL, kv_host="10.0.0.1").kv_transfer.kv_host == "10.0.0.1"
