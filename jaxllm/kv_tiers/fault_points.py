"""Places at which failures of tiers can be injected, and of the copies that tiers have steps make."""

from jaxllm.fault_place import Place, flip_bit

PLACES = {
    "kv.local": Place("core", "jaxllm.kv_tiers.peers.client", "_connect_on_host"),
    "kv.hello": Place("core", "jaxllm.kv_tiers.peers.client", "_greet"),
    "kv.follow": Place("core", "jaxllm.kv_tiers.peers.client", "Connection.follow"),
    "kv.pull": Place("core", "jaxllm.kv_tiers.peers.client", "Connection.pull"),
    "kv.locate": Place("core", "jaxllm.kv_tiers.peers.client", "Connection.locate"),
    "kv.receive": Place(
        "core",
        "jaxllm.kv_tiers.peers.client",
        "Connection._set_sums",
        corrupt=lambda self, slot, *args: flip_bit(self._memory.view(slot)),
    ),
    "kv.match": Place("core", "jaxllm.kv_tiers.host_tier", "HostTier.match"),
    "kv.gather": Place("core", "jaxllm.runner.features.block_copies.programs", "gather"),
    "kv.copy_out": Place("core", "jaxllm.runner.features.block_copies.copier", "BlockCopier._to_host"),
    "kv.copy_in": Place(
        "core",
        "jaxllm.runner.features.block_copies.copier",
        "BlockCopier._sums",
        corrupt=lambda self, op: flip_bit(self.arena.view(op.slots[0])),
    ),
    "kv.scatter": Place("core", "jaxllm.runner.features.block_copies.programs", "scatter"),
    "kv.verdict": Place("core", "jaxllm.runner.features.block_copies.copier", "BlockCopier._verdict"),
    "kv.disk_read": Place(
        "core",
        "jaxllm.kv_tiers.disk.block_file",
        "FileFormat.unpack",
        corrupt=lambda self, buffer, name: flip_bit(buffer),
    ),
    "kv.disk_write": Place(
        "core",
        "jaxllm.kv_tiers.disk.block_file",
        "write_all",
        corrupt=lambda descriptor, buffer: flip_bit(buffer),
    ),
    "kv.memory": Place("core", "jaxllm.runner.features.block_copies.arena", "Arena._take"),
    "kv.staging": Place("core", "jaxllm.runner.features.block_copies.copier", "BlockCopier._new_staging"),
    "kv.workers": Place("core", "jaxllm.kv_tiers.workers", "Workers._start"),
}
"""By name, for the engine's `fault_points`."""
