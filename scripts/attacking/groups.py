"""All groups of attacks. Imports them, as each registers its own."""

from scripts.attacking import (  # noqa: F401
    access,
    admission,
    channels,
    connections,
    files,
    health,
    hostile,
    images,
    origins,
    places,
    processes,
    programs,
    store,
)
from scripts.attacking.attack import ATTACKS

__all__ = ["ATTACKS"]
