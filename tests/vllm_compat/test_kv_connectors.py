"""--kv-transfer-config: what is taken sets options of ours, and everything else is refused by name."""

import json
import re
from typing import Any

import pytest

from jaxllm.cli.main import command_parser
from jaxllm.config import EngineConfig, KVTransferConfig
from jaxllm.errors import ConfigError
from jaxllm.options.host_tier import HostTierOptions
from jaxllm.vllm_compat import kv_connectors
from jaxllm.vllm_compat.kv_connectors import CONNECTORS, tell_unused_connector_keys

GIB = 1 << 30


def offloading(extra: Any = None, **more: Any) -> dict[str, Any]:
    """The object for host memory, with changes."""
    extra = {"cpu_bytes_to_use": GIB} if extra is None else extra
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def own(**more: Any) -> dict[str, Any]:
    """The JSON object for a user-defined class, with changes."""
    return {"kv_connector": "Store", "kv_role": "kv_both", "kv_connector_module_path": "my.stores", **more}


def config_of(raw: Any, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(kv_transfer_config=raw, **options)


def test_offloading_connectors_set_the_size_of_host_memory() -> None:
    assert config_of(offloading({"cpu_bytes_to_use": 3 * GIB})).cache.kv_offloading_size == 3
    assert config_of(offloading({"cpu_bytes_to_use": 4e9})).cache.kv_offloading_size == 4e9 / GIB
    simple = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    assert config_of(simple).cache.kv_offloading_size == 8
    assert config_of(json.dumps(offloading())) == config_of(offloading())
    assert config_of(KVTransferConfig(**offloading())).cache.kv_offloading_size == 1
    assert config_of(None) == EngineConfig() and config_of({}).cache.kv_offloading_size is None
    for num_replicas in (2, 3):  # it is the memory of one engine
        assert config_of(offloading(), data_parallel_size=num_replicas).cache.kv_offloading_size == num_replicas
    config = config_of(offloading(), data_parallel_size=2)
    assert config.replace(max_num_seqs=3).cache == config.cache, "an option that was set by another does not contradict it"


def test_lazy_offload_says_when_blocks_are_stored() -> None:
    def written(**extra: Any) -> str:
        return config_of(offloading({"cpu_bytes_to_use": GIB, **extra})).cache.kv_offloading_write

    assert [written(), written(lazy_offload=True), written(lazy_offload=False)] == ["cold", "cold", "full"]
    eager = offloading({"cpu_bytes_to_use": GIB, "lazy_offload": False})
    with pytest.raises(
        ConfigError, match="sets kv_offloading_write to full, but kv_offloading_write is cold; leave one of both out"
    ):
        config_of(eager, kv_offloading_write="cold")
    with pytest.raises(ConfigError, match="lazy_offload is 1, must be true or false"):
        config_of(offloading({"cpu_bytes_to_use": GIB, "lazy_offload": 1}))
    with pytest.raises(ConfigError, match="kv_offloading_write is 'full', but .* there is none; give kv_offloading_size"):
        EngineConfig.from_options(kv_offloading_write="full")


def test_it_is_an_option_of_the_command_line() -> None:
    parser = command_parser("serve")
    found = parser.parse(["demo", "--kv-transfer-config", json.dumps(offloading()), "--kv-transfer-config.kv_port", "0"])
    assert found.kv_transfer_config == offloading(kv_port=0)


def test_keys_of_the_host_tier_are_read() -> None:
    extra = {"cpu_bytes_to_use": GIB, "eviction_policy": "lru", "store_threshold": 2, "offload_prompt_only": True}
    extra |= {"max_tracker_size": 9, "blocks_per_chunk": 1, "lazy_offload": True, "secondary_tiers": [], "block_size": None}
    wanted = HostTierOptions(
        cpu_bytes_to_use=GIB,
        eviction_policy="lru",
        store_threshold=2,
        max_tracker_size=9,
        offload_prompt_only=True,
        lazy_offload=True,
    )
    assert KVTransferConfig.of(offloading(extra)).host_tier() == wanted
    assert KVTransferConfig.of(own(kv_connector_extra_config=extra)).host_tier() == HostTierOptions()
    assert KVTransferConfig.of(None).host_tier() == HostTierOptions()


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ("no JSON", "must be dict"),
        ('"text"', "must be dict"),
        ("[" * 100_000, "must be dict"),
        ([], "must be dict"),
        ({"kv_role": "kv_both"}, "has no kv_connector; name one"),
        ({"kv_conector": "x"}, "has 'kv_conector', which is unknown; it takes kv_connector"),
        ({"kv_connector": "OffloadingConnector"}, "kv_role is missing, must be kv_producer, kv_consumer or kv_both"),
        (offloading(kv_role="both"), "kv_role is 'both', must be"),
        (offloading(kv_role="kv_producer"), "kv_role is kv_producer, but host memory is written and read; give kv_both"),
        (offloading(kv_role=1), "kv_role is of type int, must be str"),
        (offloading(kv_connector="Offloading"), "'Offloading', which is unknown; name one of OffloadingConnector"),
        (offloading(kv_connector=""), "has no kv_connector"),
        (offloading(kv_port=70_000), "kv_port is 70000, must be 0 to 65535"),
        (offloading(kv_port=True), "kv_port is True"),
        (offloading(kv_buffer_device="xpu"), "kv_buffer_device is 'xpu', must be cuda or cpu"),
        (offloading(enable_permute_local_kv=True), "one layout; leave it out"),
        (offloading(kv_load_failure_policy="fail"), "takes recompute alone; give that"),
        (offloading([]), "kv_connector_extra_config is of type list, must be dict"),
        (offloading({}), "cpu_bytes_to_use is missing"),
        (offloading({"cpu_bytes_to_use": 0}), "cpu_bytes_to_use is 0, must be a number of bytes, at least 1"),
        (offloading({"cpu_bytes_to_use": -1}), "is -1, must be"),
        (offloading({"cpu_bytes_to_use": "4G"}), "is '4G', must be"),
        (offloading({"cpu_bytes_to_use": True}), "is True, must be"),
        (offloading({"cpu_bytes_to_use": float("nan")}), "is nan, must be"),
        (offloading({"cpu_bytes_to_use": 2**63}), "must be a number of bytes"),
        (offloading({"cpu_bytes": 1}), "has 'cpu_bytes', which is unknown; it takes cpu_bytes_to_use"),
        (offloading({"eviction_policy": "arc"}), "is 'arc', must be lru or slru; in place of arc take slru"),
        (offloading({"eviction_policy": ["lru"]}), "must be lru or slru"),
        (offloading({"store_threshold": -1}), "must be a whole number, at least 0"),
        (offloading({"max_tracker_size": 0}), "must be a whole number, at least 1"),
        (offloading({"offload_prompt_only": 1}), "must be true or false"),
        (offloading({"blocks_per_chunk": 4}), "is 4: what is kept is a block of --block-size tokens; leave it out"),
        (offloading({"blocks_per_chunk": True}), "is True: what is kept"),
        (
            offloading({"secondary_tiers": [{"type": "fs"}]}),
            "--kv-offloading-disk keeps .* name a class of your own",
        ),
        (offloading({"spec_name": "TieringOffloadingSpec"}), "name a class of your own"),
        (offloading({"cpu_bytes_to_use_per_rank": 1}), "give cpu_bytes_to_use, over all ranks"),
        (own(kv_connector_module_path=""), "kv_connector_module_path is '', must be the name of a module"),
        (own(kv_connector_module_path="/tmp/x.py"), "must be the name of a module"),
        (own(kv_connector="a b"), "kv_connector is 'a b', must be the name"),
        (own(), "kv_connector Store reads and writes host memory, but kv_offloading_size is not set; set it too"),
        (own(kv_connector_module_path=None), "'Store', which is unknown"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named(raw: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(raw)


@pytest.mark.parametrize("name", sorted(name for name, connector in CONNECTORS.items() if isinstance(connector, str)))
def test_other_connectors_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kv_connector {name} is refused: {CONNECTORS[name]}")):
        config_of({"kv_connector": name, "kv_role": "kv_producer"})


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "JaxLLMConnector"])
def test_connectors_between_engines_set_roles(name: str) -> None:
    def transfer(kv_role: str, **more: Any) -> Any:
        return config_of({"kv_connector": name, "kv_role": kv_role, **more}, kv_offloading_size=1.0).kv_transfer

    prefill, decode = (
        transfer("kv_producer", kv_port=5000),
        transfer("kv_consumer", kv_port=5000, kv_load_failure_policy="fail"),
    )
    assert (prefill.kv_role, prefill.kv_port, prefill.kv_load_failure_policy) == ("prefill", 5000, "recompute")
    assert (decode.kv_role, decode.kv_load_failure_policy) == ("decode", "fail") and decode.kv_port != 5000
    assert transfer("kv_both").kv_role == "both"
    raw = {"kv_connector": name, "kv_role": "kv_producer"}
    for changed, told in (
        ({}, "kv_offloading_size"),
        ({"kv_load_failure_policy": "fail"}, "takes recompute alone"),
        ({"kv_connector_extra_config": {"backends": ["UCX"]}}, f"{name} takes no keys here"),
    ):
        with pytest.raises(ConfigError, match=told):
            config_of(raw | changed)
    with pytest.raises(ConfigError, match="sets kv_role to prefill, but kv_role is decode; leave one of both out"):
        config_of(raw, kv_role="decode", kv_offloading_size=1.0)


def test_a_size_of_its_own_may_not_contradict() -> None:
    assert config_of(offloading(), kv_offloading_size=1.0).cache.kv_offloading_size == 1
    with pytest.raises(ConfigError, match="sets kv_offloading_size to 1, but kv_offloading_size is 2; leave one of both out"):
        config_of(offloading(), kv_offloading_size=2.0)
    with pytest.raises(ConfigError, match="sets kv_offloading_size to 1, but kv_offloading_size is 0"):
        config_of(offloading(), kv_offloading_size=0.0)
    with pytest.raises(ConfigError, match="prefix caching, which is off"):
        config_of(offloading(), enable_prefix_caching=False)


def test_what_changes_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kv_connectors, "info_once", said.append)
    tell_unused_connector_keys(
        offloading({"cpu_bytes_to_use": GIB, "canonical_layout": True}, kv_port=5, kv_buffer_device="cuda")
    )
    assert len(said) == 3 and said[1].endswith("kv_port changes nothing here")
    assert "canonical_layout changes nothing" in said[2]
    tell_unused_connector_keys(own(kv_port=5))
    tell_unused_connector_keys(None)
    assert len(said) == 3
    tell_unused_connector_keys({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": 5, "engine_id": "a"})
    assert "not to or from vLLM's" in said[3] and said[4].endswith("engine_id changes nothing here") and len(said) == 5
