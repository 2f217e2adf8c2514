"""The place at which a failure of events can be injected."""

from jaxllm.fault_place import Place

PLACES = {
    "kv.event": Place("core", "jaxllm.kv_events.messages", "BatchEncoder.encode"),
}
"""By name, for the engine's `fault_points`."""
