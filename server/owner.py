"""Identifies callers by a digest of their key, to keep their data apart; the key itself is not stored."""

import hashlib

from starlette.requests import Request


def owner_of(request: Request) -> str:
    """The owner of a request's data. All callers without a key are one owner."""
    return owner_of_key(request.headers.get("authorization") or request.headers.get("x-api-key"))


def owner_of_key(authorization: str | None) -> str:
    """The owner for `Bearer KEY` or KEY alone."""
    scheme, _, rest = (authorization or "").partition(" ")
    key = rest.strip() if scheme.lower() == "bearer" else authorization or ""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
