"""Which columns of a product belong to which of the modules that are computed together, such as q, k and v."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Parts:
    """The columns of y seen as [before, sum(sizes), after]; module m has `sizes[m]` of the middle dimension."""

    before: int
    sizes: tuple[int, ...]
    after: int

    @property
    def num_columns(self) -> int:
        return self.before * sum(self.sizes) * self.after

    @property
    def num_modules(self) -> int:
        return len(self.sizes)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first column, number of columns) of each module within each of the `before` periods."""
        first = 0
        for size in self.sizes:
            yield first, size * self.after
            first += size * self.after

    def modules(self) -> np.ndarray:
        """int64 [N]: the module of each column."""
        return np.tile(np.repeat(np.arange(self.num_modules), [size * self.after for size in self.sizes]), self.before)
