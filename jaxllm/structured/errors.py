"""What goes wrong with the form of one output, as callers may read it."""


class GrammarError(ValueError):
    """A form that cannot be compiled, or an output that cannot go on in it."""
