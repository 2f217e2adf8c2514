"""The options of engines that compute prompts for others, or answers to prompts that others computed. Does not import JAX."""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from jaxllm import env
from jaxllm.errors import ConfigError

Role = Literal["prefill", "decode", "both"]
LOOPBACK = "127.0.0.1"
PORT = 14579


@dataclass(frozen=True, kw_only=True)
class KVTransferOptions:
    """Prefill and decode"""

    kv_role: Annotated[
        Role | None,
        "what this engine does for requests with kv_transfer_params (docs/PREFILL_DECODE.md): prefill computes prompts for others and "
        "keeps their blocks, decode fetches blocks that others computed; needs kv_offloading_size; default: neither",
    ] = None
    kv_host: Annotated[
        str,
        "address at which decode engines reach this prefill engine, or those of this host with --prefill and --nnodes, which listen there; "
        "except on loopback JAXLLM_KV_TOKEN must be set; default with --nnodes: the address that this host has towards host 0",
    ] = LOOPBACK
    kv_port: Annotated[
        int, "port of that address, of the first of several engines; the next ones have the next ports; 0: any free"
    ] = PORT
    kv_peers: Annotated[
        list[str] | None,
        "hosts and networks, such as 10.1.0.0/16, from which this decode engine fetches blocks, several after one flag; except for "
        "loopback JAXLLM_KV_TOKEN must be set; default: loopback alone",
    ] = None
    kv_pull_timeout: Annotated[
        float, "most seconds that a request waits for a prefill engine; after that its prompt is computed here"
    ] = 10.0
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        "what happens to a request whose blocks a prefill engine does not deliver: its prompt is computed here, or it ends with an error",
    ] = "recompute"

    @property
    def is_prefill(self) -> bool:
        """Whether it keeps blocks for other engines."""
        return self.kv_role in ("prefill", "both")

    @property
    def is_decode(self) -> bool:
        """Whether it fetches blocks from other engines."""
        return self.kv_role in ("decode", "both")


_OF_PREFILL = ("kv_host", "kv_port")
_POLICIES = ("kv_pull_timeout", "kv_load_failure_policy")
"""Options of decode engines that a server with prefill and decode engines takes too, which gives each engine its role later."""
_OF_DECODE = ("kv_peers", *_POLICIES)


def token() -> bytes:
    """The secret that engines of both roles share; empty if there is none."""
    return os.environ.get(env.KV_TOKEN, "").encode()


def kv_transfer_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options of roles that contradict each other or others."""
    role = flat["kv_role"]
    defaults = {field.name: field.default for field in fields(KVTransferOptions)}
    has_hosts = flat["nnodes"] != 1
    # On several hosts, a server with both kinds takes them too: they say where its prefill engines listen.
    without_role = ("kv_peers",) if has_hosts else (*_OF_PREFILL, "kv_peers")
    idle = {"prefill": _OF_DECODE, "decode": _OF_PREFILL, "both": ()}.get(role, without_role)
    given = "no kv_role is given" if role is None else f"kv_role is {role}"
    faults = [
        f"{name} is {flat[name]!r}, but {given}: it is for {'prefill' if name in _OF_PREFILL else 'decode'} engines; leave it out, or "
        "choose another kv_role"
        for name in idle
        if flat[name] != defaults[name]
    ]
    if role is None:
        return faults + (_host_faults(flat["kv_host"]) if has_hosts else [])
    if has_hosts:
        faults.append(
            f"{given} and nnodes {flat['nnodes']}, but an engine with a kv_role lies on one host; start a server on each, or give prefill "
            "and decode to jaxllm serve"
        )
    if not flat["kv_offloading_size"]:
        faults.append(
            f"{given}, but there is no host memory through which blocks are passed between engines; set kv_offloading_size (GiB)"
        )
    if role != "decode":
        faults += _host_faults(flat["kv_host"])
    if isinstance(flat["kv_peers"], list):
        faults += _peers_faults(flat["kv_peers"])
    return faults


def check_policies(options: KVTransferOptions) -> None:
    """Raise ConfigError for options that an engine without a role would ignore."""
    default = KVTransferOptions()
    given = [name for name in (*_POLICIES, *_OF_PREFILL) if getattr(options, name) != getattr(default, name)]
    if options.kv_role is None and given:
        role, why = ("prefill", "keeps no blocks for") if given[0] in _OF_PREFILL else ("decode", "fetches no blocks from")
        raise ConfigError(
            f"{given[0]} is {getattr(options, given[0])!r}, but this engine {why} others; leave it "
            f"out, or give kv_role {role}, or prefill and decode to jaxllm serve"
        )


def without_policies() -> dict[str, Any]:
    """The defaults of the options that only decode engines take from those of a server with both kinds."""
    return {field.name: field.default for field in fields(KVTransferOptions) if field.name in _POLICIES}


def _host_faults(host: Any) -> list[str]:
    if not isinstance(host, str):
        return []  # reported already
    if not host or not host.isprintable() or any(char.isspace() for char in host):
        return [f"kv_host is {host!r}, must be a name or an address"]
    if is_loopback(host):
        return []
    address = _address(host)
    if address is not None and address.is_unspecified:
        return [f"kv_host is {host}, which decode engines cannot connect to; name the address at which they reach this host"]
    if not token():
        return [
            f"kv_host is {host}, which others reach, but {env.KV_TOKEN} is not set: prompts would be open to them; set the same secret for "
            "all engines that pass blocks, or leave kv_host out"
        ]
    return []


def _peers_faults(peers: Sequence[Any]) -> list[str]:
    if not peers:
        return [
            "kv_peers is empty, so blocks could be fetched from nowhere; name hosts or networks, or leave it out for loopback"
        ]
    faults = []
    for peer in peers:
        if not isinstance(peer, str):
            continue  # reported already
        try:
            network(peer)
        except ValueError as error:
            faults.append(f"kv_peers has {peer!r}, which is no host and no network ({error}); write e.g. 10.1.0.0/16")
    beyond = [peer for peer in peers if isinstance(peer, str) and not _is_loopback_peer(peer)]
    if beyond and not faults and not token():
        faults.append(
            f"kv_peers has {beyond[0]}, but {env.KV_TOKEN} is not set: any client could have this engine connect there; set the secret of "
            "the prefill engines, or leave kv_peers out"
        )
    return faults


def _is_loopback_peer(peer: str) -> bool:
    try:
        found = network(peer)
    except ValueError:
        return False  # reported already
    return is_loopback(peer) if found is None else found.is_loopback


def network(peer: str) -> "ipaddress.IPv4Network | ipaddress.IPv6Network | None":
    """The network that an entry of kv_peers names; None if it is the name of a host. Raises ValueError if it is neither."""
    try:
        return ipaddress.ip_network(peer)
    except ValueError:
        if (
            "/" in peer
            or ":" in peer
            or not peer
            or not peer.isascii()
            or not peer.isprintable()
            or " " in peer
            or peer[0].isdigit()
        ):
            raise
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this host alone."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
