"""Work of devices that a plan carries beside its rows. Does not import JAX."""

import msgspec


class DeviceOp(msgspec.Struct, frozen=True, tag_field="op"):
    """One piece of work, done before the step of the plan that carries it, in the order of the plan. Each kind is a subclass."""
