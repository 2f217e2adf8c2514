"""Checks objects inside a body whose `type` selects their class; errors name their location."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import validation_error

Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], value: Any, where: str) -> Model:
    """Check an object. Errors begin with its location `where` in the body, such as `input[3]`. Raises ApiError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=True)
        raise validation_error([{**fault, "loc": (where, *fault["loc"])} for fault in faults]) from None
