"""What two engines show each other before one fetches blocks of the other, and the signature of what a prefill engine answers."""

import hashlib
import hmac
from dataclasses import dataclass

import msgspec

from jaxllm.kv_transfer import KVTransfer


@dataclass(frozen=True)
class Identity:
    """One engine."""

    engine_id: str
    fingerprint: str
    """Equal for engines with the same bytes for the same tokens."""
    block_bytes: int
    """Bytes of a block's content."""
    token: bytes = b""
    """The secret of all engines that pass blocks to each other."""

    def difference(self, fingerprint: str, block_bytes: int) -> str | None:
        """What keeps another engine from using this one's blocks, with the values of both; None if nothing does."""
        if fingerprint != self.fingerprint:
            return (
                f"the fingerprints differ ({self.fingerprint} and {fingerprint}): both engines must have the same model, weights, types, "
                "block_size and options of the cache"
            )
        if block_bytes != self.block_bytes:
            return f"a block has {self.block_bytes} bytes at one engine and {block_bytes} at the other"
        return None


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
