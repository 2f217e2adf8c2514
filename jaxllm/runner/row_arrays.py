"""The arrays that the programs of steps take and give."""

from typing import Any, NamedTuple

import jax

Params = tuple[jax.Array, ...]
Caches = tuple[jax.Array, ...]


class RowArrays(NamedTuple):
    """The device's state of every running request, one per row. The last row is a trash row."""

    last_token_N: jax.Array
    block_table_NB: jax.Array
    """The block tables of all groups of layers, side by side."""
    of_features: dict[str, Any]
    """Further arrays by name: see `StepFeature.row_arrays`."""

    def replaced(self, **parts: Any) -> "RowArrays":
        """With other arrays of features."""
        return self._replace(of_features={**self.of_features, **parts})


class Logprobs(NamedTuple):
    """Top logprobs of R tokens; column 0 is the token itself."""

    token_ids_R1k: jax.Array
    logprobs_R1k: jax.Array
    rank_R: jax.Array


class Scores(NamedTuple):
    """Logprobs of a step's sampled tokens, as far as requested."""

    top: Logprobs | None
    named: Logprobs | None
