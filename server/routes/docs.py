"""GET /openapi.json and /docs: the endpoints as a document, and a self-contained page that shows it."""

from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_FILES = resources.files("server").joinpath("docs_page")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
PUBLIC_PATHS = frozenset({"/docs", "/docs.js"})
"""The pages contain no data of this server; the document they show requires the key."""


@router.get("/openapi.json")
async def openapi(request: Request) -> dict[str, Any]:
    """The endpoints as an OpenAPI document."""
    return request.app.openapi()


@router.get("/docs")
async def docs() -> Response:
    """The page."""
    return Response(_FILES.joinpath("index.html").read_bytes(), media_type="text/html", headers=_HEADERS)


@router.get("/docs.js")
async def script() -> Response:
    """Its script."""
    return Response(_FILES.joinpath("docs.js").read_bytes(), media_type="text/javascript", headers=_HEADERS)
