"""Error messages for paths and methods that the server does not have."""

import difflib
from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Route

LIKENESS = 0.75
MAX_LENGTH = 100
"""Maximum number of characters of a path that are compared and echoed."""


def no_such_path(
    path: str, routes: Iterable[BaseRoute], *, of_flags: Mapping[str, str] | None = None, docs: bool = True
) -> str:
    """The message of a 404: a similar path, else all main ones. `of_flags`: paths that are there only with a flag, and which."""
    shown = path[:MAX_LENGTH]
    known = sorted({route.path for route in routes if isinstance(route, Route) and route.include_in_schema})
    if path not in known and (flag := (of_flags or {}).get(path)) is not None:
        return f"{shown} is there only with {flag}"
    if near := difflib.get_close_matches(shown, known, 1, LIKENESS):
        return f"there is nothing at {shown}; did you mean {near[0]}?"
    main = ", ".join(one for one in known if one.startswith("/v1/") and "{" not in one and one.count("/") < 4)
    return f"there is nothing at {shown}; there is {main}" + ("; /docs shows everything" if docs else "")


def no_such_method(method: str, path: str, allowed: str) -> str:
    """The message of a 405."""
    return f"{path[:MAX_LENGTH]} does not take {method[:20]}; use {allowed or 'another method'}"
