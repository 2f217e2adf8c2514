"""Failures of packages written in Rust that are of no type: bare Exceptions, and panics, which reach Python as BaseExceptions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxllm.errors import JaxLLMError, shortened


@contextmanager
def failures_as(error: Callable[[str], JaxLLMError]) -> Iterator[None]:
    """Raise the error that is made of a failure's message, shortened, in its place."""
    try:
        yield
    except BaseException as failure:
        if type(failure) is not Exception and type(failure).__name__ != "PanicException":
            raise
        raise error(shortened(str(failure))) from None
