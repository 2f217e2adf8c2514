"""The OpenAPI document: bodies are parsed by `server/body.py` instead of FastAPI, so their schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from jaxllm import __version__

_MODELS: dict[str, type[BaseModel]] = {}
_REF = "#/components/schemas/{model}"


def bodies() -> list[type[BaseModel]]:
    """The models of all bodies."""
    return list(_MODELS.values())


def form_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is a form with this model's fields and a file."""
    _MODELS[model.__name__] = model
    file = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
    schema = {"allOf": [{"$ref": _REF.format(model=model.__name__)}, file]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is this model."""
    _MODELS[model.__name__] = model
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI, *, root_path: str = "") -> None:
    """Add the bodies of all routes to the application's OpenAPI document. `root_path`: the proxy's prefix."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            servers = [{"url": root_path}] if root_path else None
            found = get_openapi(title="jaxllm", version=__version__, routes=app.routes, servers=servers)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for name, model in _MODELS.items():
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[name] = schema
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
