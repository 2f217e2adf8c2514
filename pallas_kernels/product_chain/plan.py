"""Which part of which product each CTA computes. Imports no kernels.

A product is a grid of units: a block of BLOCK outputs, and one of several equal parts of the inputs. CTA c computes the units c, c + CTAs,
c + 2 CTAs …; those of a block follow each other, so that they end at about the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK = 128
"""Outputs of a block; with a gate, as many of the gate and as many of up."""
HALF = 64
"""Outputs of a block that a warpgroup computes, and inputs of a tile."""
STEP = 128
"""Inputs for which x is copied at once."""
MAX_PARTS = 16
"""Parts of the inputs, at most: their sums are read by one warpgroup at once."""
_MORE_ROWS, _MAX_PARTS_OF_MORE = 16, 8
"""With more rows fewer parts: each writes sums of all rows."""


@dataclass(frozen=True)
class Product:
    """x @ weight and what follows, up to what the next product takes."""

    num_inputs: int
    num_outputs: int
    gated: bool = False
    """silu(gate) * up of two products."""
    adds_residual: bool = False
    is_normed: bool = False
    """Whether sums are multiplied with the rows' 1 / rms: x comes without, already multiplied with the norm's weight."""
    norms_next: bool = False
    """Whether the next product takes a norm of the result."""
    num_parts: int = 1

    @property
    def num_blocks(self) -> int:
        return self.num_outputs // BLOCK

    @property
    def num_units(self) -> int:
        return self.num_blocks * self.num_parts

    @property
    def num_steps(self) -> int:
        """Steps of a unit."""
        return self.num_inputs // STEP // self.num_parts

    @property
    def num_sums(self) -> int:
        """Sums of an output."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class Chain:
    """Products, each of what the one before returns."""

    products: tuple[Product, ...]
    num_rows: int
    eps: float

    @property
    def padded_rows(self) -> int:
        """Columns of the tensor cores' products."""
        return max(8, 1 << (self.num_rows - 1).bit_length())


def chain_of(
    *, inputs: int, width: int, hidden: int, qkv: int | None, starts_with_out: bool, num_rows: int, eps: float, num_ctas: int
) -> Chain:
    """The products between two attentions, or a part of them: see `pallas_kernels.product_chain.chain`.

    inputs: values of a row of x, which are those of attention's result if `starts_with_out`.
    """
    found = [Product(inputs, width, adds_residual=True, norms_next=True)] * starts_with_out
    found.append(Product(width, hidden, gated=True, is_normed=starts_with_out))
    found.append(Product(hidden, width, adds_residual=True, norms_next=qkv is not None))
    if qkv is not None:
        found.append(Product(width, qkv, is_normed=True))
    return Chain(tuple(with_parts(product, num_rows, num_ctas) for product in found), num_rows, eps)


def with_parts(product: Product, num_rows: int, num_ctas: int) -> Product:
    """With the parts with which a CTA reads the least of the weight; of equal ones the fewest."""
    most = MAX_PARTS if num_rows <= _MORE_ROWS else _MAX_PARTS_OF_MORE
    num_steps = product.num_inputs // STEP
    choices = [replace(product, num_parts=parts) for parts in range(1, most + 1) if num_steps % parts == 0]
    return min(choices, key=lambda each: (-(-each.num_units // num_ctas) * each.num_steps, each.num_parts))


def is_taken(widths: Sequence[int]) -> bool:
    """Whether inputs and outputs are whole blocks."""
    return all(width > 0 and width % BLOCK == 0 for width in widths)
