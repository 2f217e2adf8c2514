"""Who a caller is, as far as keeping things apart needs it: a digest of the key that was sent, never the key."""

import hashlib

from starlette.requests import Request


def owner_of(request: Request) -> str:
    """The owner of what a request makes. Callers without a key are one owner."""
    return owner_of_key(request.headers.get("authorization") or request.headers.get("x-api-key"))


def owner_of_key(authorization: str | None) -> str:
    """The same for `Bearer KEY` and for KEY alone."""
    scheme, _, rest = (authorization or "").partition(" ")
    key = rest.strip() if scheme.lower() == "bearer" else authorization or ""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
