"""The roles of a server's engine processes with --prefill and --decode: which engine has which, and what each is started with."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.options.kv_transfer import LOOPBACK, PORT, token, without_policies
from jaxllm.replicas.devices import of_one_host
from jaxllm.vllm_compat.kv_connectors import with_connector_options

_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((1,), "prefill and decode say how many engines there are; leave data_parallel_size out"),
    "distributed_executor_backend": (
        (None, "mp", "uni"),
        "the server starts the engines itself, and on other hosts the same command does; leave it out",
    ),
    "enable_expert_parallel": (
        (False,),
        "it would make one engine of them, which shares the experts; leave enable_expert_parallel out",
    ),
    "kv_role": ((None,), "the server gives each engine its role; leave kv_role out"),
    "enable_prefix_caching": ((None, True), "blocks of prompts are found by prefix caching; leave one of both out"),
}
"""Options with the values that such a server takes, and why no others."""
_ANYWHERE = ["0.0.0.0/0", "::/0"]
"""Peers of decode engines on several hosts, whose addresses are not known before they connect: a signature shows which to trust."""


class Roles(NamedTuple):
    """So many prefill and decode engines. Each host has as many engines, with the next ranks, and of these the first are its prefill
    engines."""

    num_prefill: int
    num_decode: int
    prefill_hosts: Literal["all", "first"] = "all"
    """The hosts that have prefill engines, of several: all, as far as there are enough, or as few as possible."""

    def __str__(self) -> str:
        return f"prefill {self.num_prefill} and decode {self.num_decode}"

    def on_hosts(self, num_hosts: int) -> str:
        """Describe them on so many hosts."""
        return f"{self} on {num_hosts} hosts" if num_hosts > 1 else str(self)

    @property
    def num_engines(self) -> int:
        return self.num_prefill + self.num_decode

    def prefill_ranks(self, num_hosts: int = 1) -> Sequence[int]:
        """The ranks of the prefill engines."""
        share = self.num_engines // num_hosts
        found: list[int] = []
        for host in range(num_hosts):
            if self.prefill_hosts == "all":  # dealt out to the hosts in turn
                here = len(range(host, self.num_prefill, num_hosts))
            else:
                here = min(share, max(0, self.num_prefill - host * share))
            found += range(host * share, host * share + here)
        return found

    def applied_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The flat options that the engines have in common: they are replicas. Raises ConfigError for options that contradict roles."""
        flat = {**EngineConfig().flat(), **with_connector_options({**options, "data_parallel_size": self.num_engines})}
        flat["data_parallel_size"] = options.get("data_parallel_size", 1)
        faults = [
            f"the server has {self}, and {name} is {flat[name]}: {why}"
            for name, (allowed, why) in _ALLOWED.items()
            if flat[name] not in allowed
        ]
        if not flat["kv_offloading_size"]:
            faults.append(
                f"the server has {self}, but there is no host memory through which engines pass blocks; set kv_offloading_size, in GiB for "
                "all engines of a host together (docs/PREFILL_DECODE.md says how much)"
            )
        faults += self._hosts_faults(flat["nnodes"]) or self._address_faults(flat)
        if faults:
            raise ConfigError("; ".join(faults))
        return {**options, "data_parallel_size": self.num_engines}

    def _hosts_faults(self, num_hosts: Any) -> list[str]:
        """Describe what is wrong with so many hosts."""
        if num_hosts == 1 and self.prefill_hosts != "all":
            return [f"prefill_hosts is {self.prefill_hosts}, but there is one host; set nnodes too, or leave prefill_hosts out"]
        if type(num_hosts) is not int or num_hosts <= 1:
            return []  # if it is wrong, that is reported with its range
        faults = []
        if self.num_engines % num_hosts:
            faults.append(
                f"the server has {self}, {self.num_engines} engines, which {num_hosts} hosts (nnodes) cannot share equally; choose numbers "
                f"whose sum is a multiple of {num_hosts}"
            )
        if not token():
            faults.append(
                f"the server has {self.on_hosts(num_hosts)} (nnodes), but {env.KV_TOKEN} is not set: whoever reaches the ports of prefill "
                "engines could fetch prompts from them; set the same secret on all hosts"
            )
        return faults

    def _address_faults(self, flat: Mapping[str, Any]) -> list[str]:
        """Describe an address of a host where nothing listens."""
        num_hosts, rank, host = flat["nnodes"], flat["node_rank"], flat["kv_host"]
        if (
            num_hosts == 1
            or host == LOOPBACK
            or type(num_hosts) is not int
            or type(rank) is not int
            or not 0 <= rank < num_hosts
        ):
            return []  # what is wrong is reported elsewhere
        share = self.num_engines // num_hosts
        if any(each // share == rank for each in self.prefill_ranks(num_hosts)):
            return []
        return [
            f"the server has {self.on_hosts(num_hosts)}, and kv_host is {host!r} on host {rank} (node_rank), where no prefill engine "
            "would listen: it has decode engines alone; leave kv_host out on this host"
        ]

    def decode_engine(self, config: EngineConfig) -> EngineConfig:
        """The options of a decode engine, for checks before any engine starts. config: what they have in common."""
        each = self.options_of_each(config)
        return of_one_host(config).replace(**next(own for own in each.values() if own["kv_role"] == "decode"))

    def options_of_each(self, config: EngineConfig, address: str = LOOPBACK) -> dict[int, dict[str, Any]]:
        """The engine options of each rank alone. Prefill engines of a single host listen at free ports of loopback, and of one of several
        at its `address`, unless kv_host names another; their answers name both."""
        prefill: dict[str, Any] = {"kv_role": "prefill", "kv_port": 0, **without_policies()}
        decode: dict[str, Any] = {"kv_role": "decode"}
        num_hosts, given = config.parallel.nnodes, config.kv_transfer
        if num_hosts > 1:
            prefill |= {"kv_host": address if given.kv_host == LOOPBACK else given.kv_host, "kv_port": given.kv_port}
            decode |= {"kv_host": LOOPBACK, "kv_port": PORT, "kv_peers": _ANYWHERE}
        prefill_ranks = self.prefill_ranks(num_hosts)
        return {rank: prefill if rank in prefill_ranks else decode for rank in range(self.num_engines)}

    def with_secret(self, environments: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Add a common secret to the environments of the engines of a single host, so that other processes there cannot fetch blocks."""
        secret = {env.KV_TOKEN: secrets.token_hex(32)}
        return [{**given, **secret} for given in environments]

    def identity(self) -> dict[str, str]:
        """Properties that must be the same on all hosts, by names for error messages: of the token a digest, which shows as little of it as
        the signatures that engines send."""
        digest = hmac.new(token(), b"hosts", hashlib.sha256).hexdigest()
        found = {name: str(value) for name, value in zip(("prefill", "decode", "prefill_hosts"), self, strict=True)}
        return {**found, env.KV_TOKEN: f"one with the digest {digest[:8]}"}
