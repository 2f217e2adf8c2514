"""Checking objects inside a body whose kind their `type` tells, with errors that say where they lie."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import validation_error

Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], value: Any, where: str) -> Model:
    """A checked object. `where` it lies in the body, such as `input[3]`, begins the error. Raises ApiError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=True)
        raise validation_error([{**fault, "loc": (where, *fault["loc"])} for fault in faults]) from None
