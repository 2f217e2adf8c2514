"""The checks of collectives pass what is right, to the last bit over a chain, and nothing else."""

import jax.numpy as jnp
import pytest

from pallas_kernels.checking import collectives as checking
from pallas_kernels.collectives import Communicator, peer

FEW = [
    checking.Single("all_reduce_norm", (3, 64), num_shots=1),
    checking.Single("all_reduce_norm", (3, 64), "float32", num_shots=2, has_residual=False),
    checking.Single("all_reduce", (3, 64)),
    checking.Single("all_gather", (5, 2), "int32"),
    checking.Single("all_to_all", (4, 2, 8), "float32"),
]


@pytest.fixture(autouse=True)
def few_cases(monkeypatch) -> None:
    monkeypatch.setattr(checking, "singles", lambda num_devices: FEW)


def test_the_collectives_of_xla_pass(mesh) -> None:
    found = dict(checking.check(mesh, implementation="xla"))
    assert len(found) == len(FEW) and set(found.values()) == {None}


@pytest.mark.slow
def test_a_chain_is_followed_to_the_last_bit(mesh, plain_peer) -> None:
    found = dict(checking.check(mesh, cycles=2))
    assert found.pop("chain of 16 calls") is None
    assert len(found) == len(FEW) and set(found.values()) == {None}


@pytest.mark.parametrize("kind", ["a bit", "one device"])
@pytest.mark.slow
def test_wrong_sums_fail(mesh, plain_peer, monkeypatch, kind) -> None:
    import jax

    def wrong(x, *, axis, **options):
        right = plain_peer.all_reduce(x, axis=axis, workspace=None)
        if kind == "a bit":
            return right.at[0, 0].multiply(1.01)
        return jnp.where(jax.lax.axis_index(axis) == 2, right * 1.01, right)

    monkeypatch.setattr(peer, "all_reduce", wrong)
    found = {name: fault and fault.text for name, fault in checking.check(mesh, cycles=1)}
    text = "1 of 192 sums are not those in rank order" if kind == "a bit" else "devices have different bits"
    assert found["all_reduce [3, 64] bfloat16"] == text
    assert found["chain of 8 calls"].startswith("cycle 0, result 0: ")
    assert found["all_gather [5, 2] int32"] is None


def test_nothing_is_checked_after_a_wait_that_was_given_up(mesh, plain_peer, monkeypatch) -> None:
    monkeypatch.setattr(Communicator, "failed", lambda self: bool(self.first_runs_done))
    monkeypatch.setattr(Communicator, "first_runs_done", 0, raising=False)
    monkeypatch.setattr(Communicator, "first_runs", lambda self, call: setattr(self, "first_runs_done", 1))
    (_, last) = checking.check(mesh)
    assert last[0] == "waiting" and "a wait was given up in all_reduce_norm" in last[1].text
