"""Decode engines whose prefill engine is lost, damages contents or is silent; and pairs of engines of other kinds."""

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jaxllm import env
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.kv_tiers import fingerprint
from jaxllm.kv_tiers.peers import client, peer_store, server
from jaxllm.kv_tiers.peers.server import Server
from jaxllm.kv_transfer import read_kv_transfer
from jaxllm.request import ErrorKind, FinishReason
from tests.helpers import goldens
from tests.helpers.engines import make_core
from tests.helpers.slow import slow_except
from tests.helpers.waiting import wait_until
from tests.kv_tiers.peers.test_two_engines import DECODE, GREEDY, NUM_BLOCKS, PREFILL, SEEDED, Runner, make, prompt_of


def descriptors() -> set[str]:
    """The open descriptors of this process, as what is behind each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


@contextmanager
def pair(name: str = "qwen3", prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Iterator[Any]:
    """A prefill and a decode engine, of which nothing is left afterwards."""
    gc.collect()
    before = descriptors()
    engines = Runner(make(name, **{**PREFILL, **(prefill or {})})), Runner(make(name, **{**DECODE, **(decode or {})}))
    try:
        yield engines
        for each in engines:
            each.core.check_integrity()
    finally:
        for each in engines:
            each.core.shutdown()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name in ("kv-listen", "kv-serve", "kv-renew", "kv-peer")
    ]
    del engines, each
    gc.collect()
    with suppress(AssertionError):
        wait_until(lambda: descriptors() <= before)  # others may have a file open for a moment
    assert not descriptors() - before


@pytest.fixture(scope="module")
def one(little_to_collect: None) -> Iterator[Runner]:
    core = make_core("qwen3", shares_programs=True, num_gpu_blocks_override=NUM_BLOCKS)
    yield Runner(core)
    core.shutdown()


def server_of(runner: Runner) -> Server:
    (tier,) = runner.core._tiers
    return tier._server


def break_off(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """The prefill engine ends in the middle of a pull."""
    send = Server._send_contents

    def broken(self: Server, channel: Any, number: str, names: Any) -> None:
        send(self, channel, number, names[: len(names) // 2])
        channel.interrupt()

    monkeypatch.setattr(Server, "_send_contents", broken)


def damage(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """Bits flip on the way."""
    words = runner.core._tiers[0]._copies.arena.words
    words[:, 0, 5] ^= 1 << 7


def silence(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    monkeypatch.setattr(Server, "_answer", lambda *args: time.sleep(0.5))


FAULTS = {
    "it ended before": lambda monkeypatch, runner: server_of(runner).close(),
    "it ends meanwhile": break_off,
    "it is silent": silence,
    "damaged contents": damage,
    "a lease that has ended": lambda monkeypatch, runner: runner.core._tiers[0]._leases.end_all(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "transport"), [("recompute", "shared memory"), ("fail", "tcp")])
def test_what_is_lost_is_computed_or_fails(one: Runner, policy: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "tcp":
        monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
    options = {"kv_load_failure_policy": policy, "kv_pull_timeout": 0.3}
    with pair(decode=options) as (prefill, decode):
        for seed, (name, fault) in enumerate(reversed(FAULTS.items())):
            prompt = prompt_of(90, seed)
            wanted, _ = one.run(prompt)
            answer = prefill.prefill(prompt)
            while prefill.core.has_unfinished_requests():
                prefill.core.step()
            with monkeypatch.context() as broken:
                fault(broken, prefill)
                tokens, last = decode.decode(prompt, answer)
                time.sleep(0.6 if name == "it is silent" else 0.0)
            if policy == "recompute":
                assert tokens == wanted, name
            else:
                assert last.finish_reason is FinishReason.ERROR and last.error_kind is ErrorKind.KV_TRANSFER, name
                assert "the prefill engine that computed the prompt did not deliver its blocks" in str(last.stop_reason)
                assert decode.run(prompt)[0] == wanted
            decode.core.scheduler.check_integrity()


@pytest.mark.slow
def test_engines_with_tokens(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.KV_TOKEN, "secret")
    with pair() as (prefill, decode):
        prompt = prompt_of(90, 1)
        answer = prefill.prefill(prompt)
        for change in ({"remote_host": "127.0.0.2"}, {"remote_port": 5}, {"jaxllm_signature": None}, {"remote_num_tokens": 1}):
            with pytest.raises(InvalidRequestError, match="jaxllm_signature"):
                decode.decode(prompt, {**answer, **change})
        tokens, last = decode.decode(prompt, answer)
        assert tokens == one.run(prompt)[0] and last.num_cached_tokens == 80


@pytest.mark.slow
def test_an_engine_with_another_token_or_model_is_not_asked_again(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(decode={"dtype": "bfloat16"}) as (prefill, decode):
        answers = [prefill.prefill(prompt_of(90, seed)) for seed in (1, 2)]
        connect = client.Connection.to
        calls = []
        (store,) = decode.core._tiers[0]._stores._stores
        store._connect_to = lambda *args, **kwargs: (
            calls.append(args) or connect(*args, own=store._own, memory=store._memory, peers=None, seconds=60.0, **kwargs)
        )
        for seed, answer in zip((1, 2), answers, strict=True):
            _, last = decode.decode(prompt_of(90, seed), answer)
            assert last.num_cached_tokens == 0
        assert len(calls) == 1 and sum(store.failures.values()) == 1


SPLIT = {"prefill_context_parallel_size": 2, "block_size": 8}
CASES: list[list[Any]] = [
    [
        "qwen3",
        {"max_num_batched_tokens": 32, "token_buckets": (32,), "kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2, "async_scheduling": False, "kv_cache_dtype": "fp8"},
    ],
    ["gemma3", SPLIT, {**SPLIT, "tensor_parallel_size": 2}],  # of a layer with a window and one without
]


@pytest.mark.parametrize("case", slow_except([], CASES), ids=str)
@pytest.mark.usefixtures("little_to_collect")
def test_tokens_are_those_of_one_engine(case: list[Any], tmp_path: Path) -> None:
    name, prefill_options, decode_options = case
    shared = {key: value for key, value in decode_options.items() if key == "kv_cache_dtype"}
    if name == "gemma3":
        shared["model"] = str(goldens.of_layers(name, tmp_path / name, [1, 2]))
    one = Runner(make_core(name, shares_programs=True, num_gpu_blocks_override=NUM_BLOCKS, **shared))
    with pair(name, {**prefill_options, **shared}, {**decode_options, **shared}) as (prefill, decode):
        for seed, params in enumerate((GREEDY, SEEDED, GREEDY)):
            prompt = prompt_of(90 + seed, seed)
            answer = prefill.prefill(prompt, params)
            tokens, last = decode.decode(prompt, answer, params)
            assert tokens == one.run(prompt, params)[0]
            assert last.num_cached_tokens == 80
    one.core.shutdown()


@pytest.mark.slow
def test_sleep_of_a_prefill_engine_ends_what_is_being_stored(one: Runner) -> None:
    with pair() as (prefill, decode):
        prompt = prompt_of(90, 3)
        answer = prefill.prefill(prompt)
        prefill.core.sleep(1)
        assert not prefill.core.has_unfinished_requests()
        assert decode.decode(prompt, answer)[0] == one.run(prompt)[0]
        prefill.core.wake_up()
        again = prompt_of(90, 4)
        assert decode.decode(again, prefill.prefill(again))[1].num_cached_tokens == 80


@pytest.mark.slow
def test_weights_that_changed_in_sleep_are_not_those_of_the_other_engine(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (prefill, decode):
        for seed, cached in ((10, 80), (11, 80), (12, 0)):
            if not cached:
                monkeypatch.setattr(fingerprint, "weights_digest", lambda model_dir: "others")
            prefill.core.sleep(2)
            prefill.core.wake_up()
            prompt = prompt_of(90, seed)
            tokens, output = decode.decode(prompt, prefill.prefill(prompt))
            assert tokens == one.run(prompt)[0] and output.num_cached_tokens == cached
        assert "weights" in next(text for _, text in decode.core._tiers[0]._stores._stores[0]._bad.values())


@pytest.mark.slow
def test_idle_connections_are_closed(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(peer_store, "IDLE_SECONDS", 0.2)
    with pair() as (prefill, decode):
        prompt = prompt_of(90, 5)
        assert decode.decode(prompt, prefill.prefill(prompt))[1].num_cached_tokens == 80
        wait_until(lambda: server_of(prefill).num_connections == 0)
        again = prompt_of(90, 6)
        assert decode.decode(again, prefill.prefill(again))[1].num_cached_tokens == 80


@pytest.mark.slow
def test_engines_that_met_stay_connected_until_one_ends(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(peer_store, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.5)
    with pair() as (prefill, decode):
        store, address = decode.core._tiers[0]._stores._stores[0], prefill.core.prefill_address
        assert address is not None and decode.core.prefill_address is None
        decode.core.meet(replace(address, remote_engine_id=None))  # the address of no engine
        assert not store._peers
        decode.core.meet(address)
        decode.core.meet(address)
        ((peer, _),) = store._peers.values()
        wait_until(lambda: peer.mapped_region is not None, "its memory is not read where it is")
        threading.Event().wait(0.8)  # longer than either end keeps what is idle
        assert store._peers and next(iter(store._peers.values()))[0] is peer and not peer.is_left
        prompt = prompt_of(90, 15)
        tokens, output = decode.decode(prompt, prefill.prefill(prompt))
        assert tokens == one.run(prompt)[0] and output.num_cached_tokens == 80
        decode.core.reset_prefix_cache()
        wait_until(lambda: bool(store._peers) and next(iter(store._peers.values()))[0] is not peer, "it is not met again")
        server_of(prefill).close()
        wait_until(lambda: not store._peers and not store._met and not store._closing, "it holds what has ended")
        decode.core.meet(address)
        wait_until(lambda: not store._met, "it goes on with an engine that has ended")


@pytest.mark.slow
def test_a_waiting_request_renews_its_lease(one: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "RENEW_SECONDS", 0.05)
    with pair(decode={"max_num_seqs": 1, "decode_buckets": (1,)}) as (prefill, decode):
        prompt = prompt_of(90, 7)
        answer = prefill.prefill(prompt)
        decode.send(prompt_of(20, 8), GREEDY)
        decode.core.step()
        decode.send(prompt, GREEDY, read_kv_transfer(answer))
        (lease,) = prefill.core._tiers[0]._leases._leases.values()
        wait_until(lambda: bool(lease.connections))
        before = lease.expires_at
        wait_until(lambda: lease.expires_at > before)
        found = decode.finish()
        assert found["r2"][0] == one.run(prompt)[0] and found["r2"][1].num_cached_tokens == 80


def test_a_port_that_is_taken_is_found_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.engine.start.Started.of", lambda *args: pytest.fail("it starts"))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="kv_host is 127.0.0.1 and kv_port .*, where this engine cannot listen"),
    ):
        make(**{**PREFILL, "kv_port": taken.getsockname()[1]})


@pytest.mark.slow
def test_an_engine_that_cannot_listen_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.engine.core.check_address", lambda config: None)  # another takes the port meanwhile
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {"kv_port": taken.getsockname()[1], "kv_offloading_disk": str(tmp_path), "kv_offloading_disk_size": 1.0}
        with pytest.raises(ConfigError, match="cannot listen") as error:
            make(**{**PREFILL, **options, "warmup": "lazy"})
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    assert "memfd:jaxllm-kv" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    del error  # until here it kept the variables of the start alive, as a handler does
