"""Arithmetic of tile sizes."""


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: Triton's tiles have no other sizes."""
    return 1 << max(0, n - 1).bit_length()
