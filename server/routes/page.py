"""The web page at `/`: a chat and a live view of the metrics. Static files of `server/web/`, no external resources."""

from importlib import resources

from starlette.responses import Response
from starlette.routing import Route, Router

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Model output is shown as text, never as HTML; this policy is a second defence.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def public_paths() -> frozenset[str]:
    """Paths served without a key; a path that ends with a slash includes all below it."""
    return frozenset({"/", "/web/"})


def page_replies() -> dict[str, Response]:
    """The reply for each path of the page."""
    found = {}
    for file in resources.files("server").joinpath("web").iterdir():
        if (kind := _KINDS.get(file.name.rpartition(".")[2])) is not None:
            path = "/" if file.name == "index.html" else f"/web/{file.name}"
            found[path] = Response(file.read_bytes(), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
    return found


def page_router() -> Router:
    """`/` and `/web/…`. Needs no key: the page asks for one and sends it with what it calls."""
    return Router([Route(path, reply, methods=["GET"], include_in_schema=False) for path, reply in page_replies().items()])
