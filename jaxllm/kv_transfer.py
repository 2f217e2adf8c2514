"""Parameters of requests whose KV cache another engine computes or has computed: `kv_transfer_params` of vLLM's API, as a KVTransfer.

A router sends a prompt to a prefill engine with `do_remote_decode`, and its answer's `kv_transfer_params`, unchanged, with the same
prompt to a decode engine. Types and sizes are checked here; whether a lease is valid and where an engine may connect, by the engine.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError

PARAM = "kv_transfer_params"
MAX_BYTES = 512 * 1024
"""The longest parameters, as JSON. Most of it are block numbers: of a prompt of a million tokens, in blocks of 16, 420 kB."""
MAX_NAME = 256
"""Characters of an id, a host or a signature."""
_MAX_NUMBER = 2**63 - 1
_NAME = re.compile(r"[!-~]+")
_LIMITS = ("max_load_tokens", "max_offload_tokens")
"""Keys that any request may have."""
_WAY_OUT = f"pass on the {PARAM} of the prefill engine's answer as they are, or leave {PARAM} out"


class KVTransfer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where blocks of a request's prompt come from, and for whom they are kept."""

    keep_for_decode: bool = False
    """do_remote_decode: this engine computes the prompt, another continues. The prompt's blocks are kept under a lease, which the
    last output's `kv_transfer_params` name."""
    tells_early: bool = False
    """With keep_for_decode: an output with these parameters comes as soon as the first blocks are computed, so that another engine may
    fetch what is stored while the rest is computed. Routers of this server alone set it: no request has a key for it."""
    remote_engine_id: str | None = None
    """do_remote_prefill: the engine that has blocks of the prompt. The four fields below are set exactly if this one is."""
    lease_id: str | None = None
    """remote_request_id: what they are kept under there."""
    host: str | None = None
    port: int | None = None
    num_blocks: int | None = None
    """How many block numbers remote_block_ids has, those of the first group of layers if it has a list for each."""
    num_tokens: int | None = None
    """remote_num_tokens: tokens of the prompt whose blocks are kept there; None: not said."""
    num_cached_tokens: int | None = None
    """remote_prefill_cached_tokens: tokens of the prompt that the prefill engine found in its prefix cache, for the usage."""
    signature: str | None = None
    """jaxllm_signature: by the prefill engine, of the other fields with do_remote_prefill."""


def read_kv_transfer(params: Mapping[str, Any] | None) -> KVTransfer | None:
    """Read the `kv_transfer_params` of a request. Unknown keys are ignored; None: they ask for nothing. Raises InvalidRequestError."""
    if not params:
        return None
    if len(json.dumps(params, separators=(",", ":"))) > MAX_BYTES:
        raise InvalidRequestError(f"{PARAM} is longer than {MAX_BYTES} bytes of JSON; {_WAY_OUT}", PARAM)
    keep, pull = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if keep and pull:
        raise InvalidRequestError(
            f"{PARAM} has both do_remote_decode and do_remote_prefill; set the first for the engine that computes the prompt, the "
            "second for the one that computes the answer",
            PARAM,
        )
    if not pull:
        return KVTransfer(keep_for_decode=True) if keep else None
    return KVTransfer(
        remote_engine_id=_name(params, "remote_engine_id"),
        lease_id=_name(params, "remote_request_id"),
        host=_name(params, "remote_host"),
        port=_port(params),
        num_blocks=_num_blocks(params),
        num_tokens=_number(params, "remote_num_tokens"),
        num_cached_tokens=_number(params, "remote_prefill_cached_tokens"),
        signature=None if params.get("jaxllm_signature") is None else _name(params, "jaxllm_signature"),
    )


def read_kv_limits(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of a request that its `kv_transfer_params` limit, by their name there. Raises InvalidRequestError."""
    return {name: _number(params or {}, name) for name in _LIMITS}


def check_role(transfer: KVTransfer, role: str | None) -> None:
    """Raise InvalidRequestError for a request that an engine of this `kv_role` does not serve."""
    if transfer.keep_for_decode and role not in ("prefill", "both"):
        asked, needed = "do_remote_decode", "prefill"
    elif transfer.remote_engine_id is not None and role not in ("decode", "both"):
        asked, needed = "do_remote_prefill", "decode"
    else:
        return
    has = "no --kv-role" if role is None else f"--kv-role {role}"
    raise InvalidRequestError(
        f"{PARAM} has {asked}, but this server has {has}; start it with --kv-role {needed} or both, send the request to one that has "
        f"it, or leave {PARAM} out",
        PARAM,
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise _fault(name, f"is {_told(value)}, must be true or false")
    return bool(value)


def _number(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise _fault(name, f"is {_told(value)}, must be an integer")
    if value is not None and not 0 <= value <= _MAX_NUMBER:
        raise _fault(name, f"is {_told(value)}, must be 0 to {_MAX_NUMBER}")
    return value


def _port(params: Mapping[str, Any]) -> int:
    port = _number(params, "remote_port")
    if port is None or not 0 < port < 65536:
        raise _fault("remote_port", f"is {_told(port)}, must be 1 to 65535")
    return port


def _name(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise _fault(name, f"is {_told(value)}, must be a text")
    if len(value) > MAX_NAME or not _NAME.fullmatch(value):
        raise _fault(name, f"has {len(value)} characters, must have 1 to {MAX_NAME}, all visible ASCII")
    return value


def _num_blocks(params: Mapping[str, Any]) -> int:
    """The length of remote_block_ids, a list of numbers or a list of such lists. Routers test that it is not empty."""
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list):
        raise _fault("remote_block_ids", f"is {_told(groups)}, must be a list of block numbers for each group of layers")
    numbers = groups[0] if groups and isinstance(groups[0], list) else groups
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MAX_NUMBER for number in numbers):
        raise _fault("remote_block_ids", f"has other entries than integers from 0 to {_MAX_NUMBER}")
    return len(numbers)


def _fault(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}.{name} {what}; {_WAY_OUT}", PARAM)


def _told(value: Any) -> str:
    """A value of the client, as errors show it."""
    if value is None:
        return "missing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
