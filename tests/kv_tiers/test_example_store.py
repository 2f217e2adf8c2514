"""docs/example_store: engines that share a directory find what each other has computed."""

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.settings import read_config_file
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from jaxllm.kv_tiers.kv_store import KVStore
from jaxllm.kv_tiers.own.own_store import OwnStore
from jaxllm.llm_engine import check_model
from tests.helpers import goldens
from tests.helpers.core_client import Client, make_prompts
from tests.kv_tiers.test_offloading import expected, make, tier_of

ROOT = Path(__file__).parent.parent.parent
NUM_SLOTS = 40
"""Slots of host memory: too few for the blocks of all prompts."""


@pytest.fixture
def transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(ROOT / "docs" / "example_store")
    yield {
        "kv_connector": "DirectoryStore",
        "kv_connector_module_path": "directory_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"directory": str(tmp_path / "contents"), "refresh_seconds": 0.01},
    }
    sys.modules.pop("directory_store", None)


def make_sharing(transfer: dict[str, Any], **options: Any) -> EngineCore:
    """An engine that keeps little itself."""
    return make("qwen3", kv_offloading_size=NUM_SLOTS * 4096 / 2**30, kv_transfer_config=transfer, **options)


def store_of(core: EngineCore) -> OwnStore:
    """The store behind the host memory of an engine."""
    (store,) = tier_of(core)._stores._stores
    assert isinstance(store, OwnStore)
    return store


def count_reads(core: EngineCore) -> list[bool]:
    """A list that gets whether each content that an engine reads is there."""
    own: Any = store_of(core)._store
    read, found = own.read, list[bool]()

    def counted(key: str, content: memoryview) -> bool:
        found.append(read(key, content))
        return found[-1]

    own.read = counted
    return found


def run_until_written(client: Client, directory: Path, num_files: int) -> list[list[int]]:
    tokens = client.run()
    for _ in range(20):
        if len(list(directory.iterdir())) >= num_files:
            break
        assert client.run() == tokens
    return tokens


@pytest.mark.slow
def test_a_second_engine_loads_what_the_first_has_stored(transfer: dict[str, Any]) -> None:
    directory = Path(transfer["kv_connector_extra_config"]["directory"])
    prompts = make_prompts(12)
    wanted = expected("qwen3", prompts)
    first = make_sharing(transfer)
    assert run_until_written(Client(first, prompts), directory, 20) == wanted
    first.shutdown()
    for options in ({}, {"tensor_parallel_size": 2}):
        second = make_sharing(transfer, **options)
        num_read = count_reads(second)
        assert Client(second, prompts).run() == wanted
        stats = second.stats()
        assert sum(num_read) > 0 and stats.num_loaded_blocks > 0 and not stats.num_damaged_blocks
        second.check_integrity()
        second.shutdown()
    assert not list(directory.glob("*.new"))
    third = make_sharing(transfer, kv_cache_dtype="fp8")
    assert not store_of(third).find([bytes.fromhex(file.name.split("-")[1]) for file in directory.iterdir()]), "of another type"
    third.shutdown()


@pytest.mark.slow
def test_files_and_a_store_of_one_s_own_both_get_what_leaves_host_memory(transfer: dict[str, Any], tmp_path: Path) -> None:
    directory = Path(transfer["kv_connector_extra_config"]["directory"])
    prompts = make_prompts(12)
    files = {"kv_offloading_disk": str(tmp_path / "files"), "kv_offloading_disk_size": 0.1}
    first = make_sharing(transfer, **files)
    wanted = run_until_written(Client(first, prompts), directory, 20)
    stats = first.stats()
    assert wanted == expected("qwen3", prompts) and stats.num_disk_writes >= 20
    first.shutdown()
    of_store = make_sharing(transfer)
    num_read = count_reads(of_store)
    assert Client(of_store, prompts).run() == wanted and any(num_read)
    of_store.shutdown()
    of_files = make("qwen3", kv_offloading_size=NUM_SLOTS * 4096 / 2**30, **files)
    client = Client(of_files, prompts)
    for _ in range(3):
        assert client.run() == wanted
    assert of_files.stats().num_disk_reads > 0
    of_files.check_integrity()
    of_files.shutdown()


@pytest.mark.slow
def test_damaged_and_lost_files_are_computed_again(transfer: dict[str, Any]) -> None:
    directory = Path(transfer["kv_connector_extra_config"]["directory"])
    prompts = make_prompts(12)
    first = make_sharing(transfer)
    wanted = run_until_written(Client(first, prompts), directory, 20)
    first.shutdown()
    for number, file in enumerate(sorted(directory.iterdir())):
        content = bytearray(file.read_bytes())
        content[-1 - number] ^= 1
        file.write_bytes(content[:-1] if number % 3 == 1 else content)
        if number % 3 == 2:
            file.unlink()
    second = make_sharing(transfer)
    client = Client(second, prompts)
    for _ in range(3):
        assert client.run() == wanted
    assert second.stats().num_damaged_blocks > 0
    second.shutdown()


class Broken(KVStore):
    """Has everything and can do nothing."""

    def find(self, keys: Sequence[str]) -> Collection[str]:
        return keys

    def read(self, key: str, content: memoryview) -> bool:
        raise ConnectionError("away")

    def write(self, key: str, content: memoryview) -> None:
        raise ConnectionError("away")

    def discard(self, keys: Sequence[str]) -> None:
        raise ConnectionError("away")


@pytest.mark.slow
def test_a_store_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    prompts = make_prompts(12)
    wanted = expected("qwen3", prompts)
    core = make_sharing({"kv_connector": "Broken", "kv_connector_module_path": __name__, "kv_role": "kv_both"})
    client = Client(core, prompts)
    for _ in range(3):
        assert client.run() == wanted
    core.check_integrity()
    core.shutdown()
    told = [record.message for record in caplog.records if "Broken" in record.message]
    assert any("read of Broken failed" in text for text in told) and any("is not used for 60 s" in text for text in told)
    assert len(told) <= 5


def test_the_options_on_its_page_are_accepted(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "example_store" / "directory_store.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "KV_OFFLOADING.md").read_text(encoding="utf-8")
    for part in (text.split("store.yaml:\n")[1].split("\nIt deletes")[0], page.split("```yaml\n")[1].split("```")[0]):
        file = tmp_path / "store.yaml"
        file.write_text(part, encoding="utf-8")
        options = {name: value for name, (value, _) in read_config_file(str(file)).items()}
        assert EngineConfig.from_options(**options).cache.kv_transfer_config


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_connector": "NoStore"}, "'NoStore' of the module 'directory_store' cannot be imported: AttributeError"),
        ({"kv_connector": "Path"}, "'Path' of the module 'directory_store' is no class derived from"),
        ({"kv_connector_module_path": "no_such"}, "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_wrong_class_is_said_before_weights_are_loaded(transfer: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    options = {"model": str(goldens.golden("qwen3").directory), "kv_offloading_size": 0.01, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=told):
        check_model(EngineConfig.from_options(**options, kv_transfer_config={**transfer, **changes}))


def test_a_store_that_cannot_be_made_ends_the_start(transfer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'DirectoryStore' .* cannot be made: KeyError: 'directory'"):
        make_sharing({**transfer, "kv_connector_extra_config": {}})
