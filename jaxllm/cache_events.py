"""Events of an engine's prefix cache, for balancers that choose among several engines."""

import msgspec

KEY_BYTES = 8
"""Bytes of a block's hash that name it here. A name that two blocks share costs a wrong guess, no wrong token."""


class CacheEvents(msgspec.Struct, array_like=True):
    """Blocks that became findable in a prefix cache, or can no longer be found.

    States what holds at the end of the time that it covers, so it may be applied twice, and after a later snapshot.
    """

    cleared: bool = False
    """Whether to forget first what was published before."""
    stored: bytes = b""
    """The first `KEY_BYTES` of the hash of each block that can be found, one after the other."""
    removed: bytes = b""
    """Keys of blocks that can no longer be found."""
    with_host: "CacheEvents | None" = None
    """Changes of the blocks that are on the devices or in host memory; None: host memory keeps none."""
