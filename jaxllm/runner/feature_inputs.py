"""What the features of an engine mean for its steps: which of them a step needs, and what they add to its buffer."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.runner.layout import NUM_ROW_COLUMNS

if TYPE_CHECKING:
    from jaxllm.request import PromptItem
    from jaxllm.runner.batch import Batch, Chunk
    from jaxllm.runner.step_feature import StepFeature
    from jaxllm.scheduler_output import NewRequestData

Names = tuple[str, ...]
"""Names of optional features, sorted."""


class FeatureInputs:
    """Programs are compiled without optional features, with each of them, and with all of them: other sets take the last."""

    def __init__(self, features: Sequence["StepFeature"] = ()):
        self._optional = tuple(feature for feature in features if feature.is_optional)
        self._with_columns = tuple(feature for feature in features if feature.num_columns)
        self.all: Names = self._names(self._optional)
        """All optional features."""
        self.sets: tuple[Names, ...] = _sets(self.all)
        """Those of programs that run layers over any mix of tokens."""
        self.decode_sets: tuple[Names, ...] = _sets(self.in_decodes(self.all))
        """Those of programs that run layers over decodes."""
        self.logits_sets: tuple[Names, ...] = _sets(self.in_logits(self.all))
        """Those of programs that compute logits of hidden states."""
        self.columns = _parts({feature.name: feature.num_columns for feature in self._with_columns}, NUM_ROW_COLUMNS)
        """The columns that features add to those of each row."""
        self.num_columns = max((part.stop for part in self.columns.values()), default=NUM_ROW_COLUMNS)
        """Columns of each row."""

    def needed(self, columns_NC: np.ndarray, index_R: Any, chunks: Sequence["Chunk"]) -> Names:
        """The features that a step with some of these rows and with these known tokens needs."""
        if not self._optional:
            return ()
        columns_RC = columns_NC[index_R]
        return self._names(feature for feature in self._optional if feature.is_needed(columns_RC, chunks))

    def of_mixed(self, needed: Iterable[str]) -> Names:
        """The features of the program that runs layers over any mix of tokens, for a step that needs these."""
        return _fit(needed, self.sets) or ()

    def of_items(self, items: Sequence["PromptItem"]) -> Names:
        """The same for steps that compute items of a prompt."""
        return self.of_mixed(feature.name for feature in self._optional if feature.computes(items))

    def of_decode(self, needed: Iterable[str]) -> Names | None:
        """The same of decodes; None: the step cannot be one."""
        return _fit(needed, self.decode_sets)

    def of_logits(self, needed: Names) -> Names:
        """The same of programs that compute logits, which need those that change them."""
        return _fit(self.in_logits(needed), self.logits_sets) or ()

    def in_decodes(self, names: Names) -> Names:
        """Those that programs of decodes may have."""
        return self._names(feature for feature in self._optional if feature.is_in_decodes and feature.name in names)

    def in_logits(self, names: Names) -> Names:
        """Those that change logits not only by the hidden states."""
        return self._names(feature for feature in self._optional if feature.changes_logits and feature.name in names)

    def common(self, num_tokens: int) -> Names:
        """All that common programs of so many tokens have."""
        return self._names(feature for feature in self._optional if feature.is_common(num_tokens))

    def are_common(self, names: Names, num_tokens: int) -> bool:
        """Whether almost every engine runs a program of so many tokens with these features."""
        return all(feature.is_common(num_tokens) for feature in self._optional if feature.name in names)

    def row_columns(self, data: "NewRequestData") -> list[int]:
        """The columns that features add to those of a request's row."""
        return [*chain.from_iterable(feature.row_columns(data) for feature in self._with_columns)]

    def token_inputs(self, names: Names) -> Mapping[str, slice]:
        """The values of each token in the buffers of programs with these features, by feature."""
        counts = {feature.name: feature.num_token_inputs for feature in self._optional if feature.name in names}
        return _parts({name: count for name, count in counts.items() if count})

    def num_token_inputs(self, names: Names) -> int:
        """How many there are."""
        return max((part.stop for part in self.token_inputs(names).values()), default=0)

    def token_inputs_of(self, batch: "Batch", name: str) -> np.ndarray | None:
        """[…, T]: a feature's values of each token in a step's buffer, to be filled; None if the step does without the feature."""
        part = self.token_inputs(batch.features).get(name)
        return None if part is None else batch.layout.views(batch.buffer).inputs_IT[part]

    def _names(self, features: Iterable["StepFeature"]) -> Names:
        return tuple(sorted(feature.name for feature in features))


def _sets(names: Names) -> tuple[Names, ...]:
    return tuple(dict.fromkeys([(), *((name,) for name in names), names]))


def _fit(needed: Iterable[str], sets: Sequence[Names]) -> Names | None:
    """The smallest of the sets that has all that is needed."""
    wanted = {*needed}
    return next((names for names in sets if wanted <= {*names}), None)


def _parts(counts: Mapping[str, int], start: int = 0) -> dict[str, slice]:
    """Slices of these lengths, one behind the other."""
    parts = {}
    for name, count in counts.items():
        parts[name] = slice(start, start + count)
        start += count
    return parts
