"""The web page at `/`: a chat and a live view of the metrics. Static files of `server/web/`, nothing from elsewhere."""

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from server.errors import ApiError

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Model output is shown as text, never as HTML; this holds even if that failed.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def public_paths() -> frozenset[str]:
    """What is served without a key; a path that ends with a slash stands for all below it, too."""
    return frozenset({"/", "/web/"})


def page_router() -> APIRouter:
    """`/` and `/web/…`. Needs no key: the page asks for one and sends it with what it calls."""
    router = APIRouter(include_in_schema=False)
    files = {
        file.name: (file.read_bytes(), f"{_KINDS[file.name.rpartition('.')[2]]}; charset=utf-8")
        for file in resources.files("server").joinpath("web").iterdir()
        if file.name.rpartition(".")[2] in _KINDS
    }

    @router.get("/")
    async def page() -> Response:
        content, kind = files["index.html"]
        return Response(content, media_type=kind, headers=_HEADERS)

    @router.get("/web/{name}")
    async def asset(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no file {name[:100]!r}", "not_found_error")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    return router
