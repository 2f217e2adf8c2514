"""How a head is cut into operands of products, whose sizes are powers of two."""

MIN_PART = 16
"""The narrowest operand of a product."""


def head_parts(head_dim: int) -> tuple[tuple[int, int], ...]:
    """First value and size of the parts of a head, the widest first; the last may reach beyond the head's end.

    They are the powers of two that the width is the sum of, after it is rounded up to a multiple of MIN_PART.
    """
    parts, first, total = [], 0, -(-head_dim // MIN_PART) * MIN_PART
    while first < total:
        size = 1 << ((total - first).bit_length() - 1)
        parts.append((first, size))
        first += size
    return tuple(parts)
