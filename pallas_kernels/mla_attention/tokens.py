"""The tokens of a step between their projection and attention."""

from typing import NamedTuple

import jax


class Tokens(NamedTuple):
    """Queries, and vectors as the cache holds them: rounded to its type, in that of the queries."""

    q_TNP: jax.Array
    """What W_k is multiplied with."""
    q_TNE: jax.Array
    """Rotated."""
    latent_TL: jax.Array
    """Normed."""
    rotated_TE: jax.Array
    """The part of the key that all heads share."""
