"""Identities that two engines exchange before one fetches blocks of the other, and signatures of a prefill engine's answers."""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxllm.kv_transfer import KVTransfer

_SHORT, _MOST_NAMED = 80, 3
"""Characters of a value that is shown as it is, and differences that an error names."""


class Identity:
    """One engine."""

    def __init__(
        self, engine_id: str, facts: Mapping[str, str] | Callable[[], Mapping[str, str]], block_bytes: int, token: bytes = b""
    ):
        """facts: all that bytes of contents depend on, by names for error messages: equal for engines with the same bytes for the same
        tokens; or a function that finds this out, in any thread. block_bytes: bytes of a block's content. token: the secret of
        all engines that pass blocks to each other."""
        self.engine_id, self.block_bytes, self.token = engine_id, block_bytes, token
        self._find = facts if callable(facts) else lambda: facts
        self._num_changes = 0
        self._found: tuple[int, Mapping[str, str]] | None = None
        """The facts, and how many changes there had been before they were looked up."""

    @property
    def facts(self) -> Mapping[str, str]:
        """The facts, which are looked up if the weights may have changed. Raises what that raises."""
        num_changes, found = self._num_changes, self._found
        if found is None or found[0] != num_changes:
            self._found = found = num_changes, self._find()
        return found[1]

    def forget_facts(self) -> None:
        """The weights may be others from now on."""
        self._num_changes += 1

    def difference(self, facts: Mapping[str, str], block_bytes: int) -> str | None:
        """Describe why another engine cannot use this one's blocks, with the values of both; None if it can."""
        own, other = (
            {**each, "bytes of a block": str(size)} for each, size in ((self.facts, self.block_bytes), (facts, block_bytes))
        )
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if not names:
            return None
        found = "; ".join(f"{name}: {own.get(name, 'none')} and {other.get(name, 'none')}" for name in names[:_MOST_NAMED])
        return f"the engines cannot use each other's blocks: they differ in {found}"


def facts_of(described: Mapping[str, Any]) -> dict[str, str]:
    """Shorten the result of `fingerprint.describe`: long values become a digest."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in described.items()}
    return {
        name: text if len(text) <= _SHORT else f"digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for name, text in texts.items()
    }


def signature(token: bytes, transfer: KVTransfer) -> str:
    """Shows that an engine with the token answered these parameters, so that clients cannot send an engine elsewhere."""
    signed = [
        transfer.remote_engine_id, transfer.lease_id, transfer.host, transfer.port,
        transfer.num_blocks, transfer.num_tokens, transfer.num_cached_tokens,
    ]  # fmt: skip
    return hmac.new(token, b"transfer\0" + msgspec.msgpack.encode(signed), hashlib.sha256).hexdigest()


def is_signed(token: bytes, transfer: KVTransfer) -> bool:
    """Whether the parameters have the signature that they need: none without a token."""
    return not token or hmac.compare_digest((transfer.signature or "").encode(), signature(token, transfer).encode())
