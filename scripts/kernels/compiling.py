"""Compiles many programs at once, as the kernels' own checks do."""

from pallas_kernels.checking.compiling import Compiler, first_line

__all__ = ["Compiler", "first_line"]
