"""What the features of an engine mean for its steps: which of them a step needs, and so which programs run it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxllm.runner.batch import Chunk
    from jaxllm.runner.step_feature import StepFeature

Names = tuple[str, ...]
"""Names of optional features, sorted."""


class FeatureInputs:
    """Programs are compiled without optional features, with each of them, and with all: there are no programs for other sets."""

    def __init__(self, features: Sequence["StepFeature"] = ()):
        self._optional = tuple(feature for feature in features if feature.is_optional)
        self.all: Names = self._names(self._optional)
        """All optional features."""
        self.sets: tuple[Names, ...] = _sets(self.all)
        """Those of programs that run layers over any mix of tokens."""
        self.decode_sets: tuple[Names, ...] = _sets(self.in_decodes(self.all))
        """Those of programs that run layers over decodes."""
        self.logits_sets: tuple[Names, ...] = _sets(self.in_logits(self.all))
        """Those of programs that compute logits of hidden states."""

    def needed(self, columns_NC: np.ndarray, index_R: Any, chunks: Sequence["Chunk"]) -> Names:
        """The features of the program for a step with some of these rows and with these known tokens."""
        if not self._optional:
            return ()
        columns_RC = columns_NC[index_R]
        return self.fit(feature.name for feature in self._optional if feature.is_needed(columns_RC, chunks))

    def fit(self, names: Iterable[str]) -> Names:
        """The features of the program for a step that needs these."""
        found = {*names}
        return self.all if len(found) > 1 else (*found,)

    def in_decodes(self, names: Names) -> Names:
        """Those that programs of decodes may have."""
        return self._names(feature for feature in self._optional if feature.is_in_decodes and feature.name in names)

    def in_logits(self, names: Names) -> Names:
        """Those that change logits not only by the hidden states."""
        return self._names(feature for feature in self._optional if feature.changes_logits and feature.name in names)

    def are_common(self, names: Names, num_tokens: int) -> bool:
        """Whether almost every engine runs a program of so many tokens with these features."""
        return all(feature.is_common(num_tokens) for feature in self._optional if feature.name in names)

    def _names(self, features: Iterable["StepFeature"]) -> Names:
        return tuple(sorted(feature.name for feature in features))


def _sets(names: Names) -> tuple[Names, ...]:
    return tuple(dict.fromkeys([(), *((name,) for name in names), names]))
