"""The host's side: what is written into workspaces, in which order, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.collectives import Communicator, peers_can_access, workspace
from pallas_kernels.collectives.exchange import FAILED, PEERS, RANK, SILENT, STATE, WAITING


def test_cpu_devices_are_no_peers(mesh) -> None:
    assert not peers_can_access(jax.devices())
    with pytest.raises(ValueError, match="cannot access each other's memory; use 'xla'"):
        Communicator(mesh)


@pytest.mark.parametrize("shape", [(1,), (2, 2)])
def test_a_mesh_of_another_form_is_refused(shape, plain_peer) -> None:
    names = ("one", "two")[: len(shape)]
    with pytest.raises(ValueError, match="need a mesh of one axis with 2 to 8 devices"):
        Communicator(Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names))


def test_each_header_has_the_addresses_from_the_own_one_on(mesh, plain_peer) -> None:
    communicator = Communicator(mesh)
    parts = sorted(communicator.workspace.addressable_shards, key=lambda shard: shard.index[0].start)
    pointers = [part.data.unsafe_buffer_pointer() for part in parts]
    for rank, header in enumerate(communicator._header([SILENT] * 4)):
        assert header[PEERS // 4 : 8].view(np.uint64).tolist() == pointers[rank:] + pointers[:rank]
        assert (header[RANK // 4], header[STATE // 4]) == (rank, SILENT)
    communicator.close()
    assert communicator.workspace.is_deleted()


def test_first_runs_are_silent_and_end_in_waiting(mesh, plain_peer, monkeypatch) -> None:
    communicator = Communicator(mesh)
    events = []
    monkeypatch.setattr(communicator, "_write", lambda states: events.append(states[0]))
    communicator.first_runs(lambda: events.append("run"), count=2)
    assert events == [SILENT, "run", "run", WAITING]
    with pytest.raises(ZeroDivisionError):
        communicator.first_runs(lambda: 1 // 0)
    assert events[-2:] == [SILENT, WAITING]


def test_only_a_reset_follows_a_failure(mesh, plain_peer, monkeypatch) -> None:
    communicator = Communicator(mesh)
    assert communicator.states() == [0] * 4 and not communicator.failed()
    monkeypatch.setattr(communicator, "states", lambda: [WAITING, FAILED, WAITING, WAITING])
    assert communicator.failed()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        communicator.set_waiting(True)
    communicator.reset()


def test_some_devices_can_be_silent_alone(mesh, plain_peer, monkeypatch) -> None:
    communicator = Communicator(mesh)
    written = []
    monkeypatch.setattr(communicator, "_write", written.append)
    communicator.set_waiting(False, ranks=[1, 3])
    assert written == [[WAITING, SILENT, WAITING, SILENT]]


def test_a_device_that_does_not_take_what_is_written_is_noticed(mesh, plain_peer, monkeypatch) -> None:
    communicator = Communicator(mesh)
    monkeypatch.setattr(communicator, "_run_write", lambda workspace, header: jax.numpy.array([0, 0, 2, 0]))
    with pytest.raises(RuntimeError, match=r"wrote \[0, 0, 2, 0\] into the workspaces of the devices, not \[0, 0, 0, 0\]"):
        communicator.reset()


def test_without_a_driver_nothing_is_accessible(monkeypatch) -> None:
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(workspace.ctypes, "CDLL", missing)
    workspace._can_access.cache_clear()
    assert not workspace._can_access(0, 1)
    workspace._can_access.cache_clear()
