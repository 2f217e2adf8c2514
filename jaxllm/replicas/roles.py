"""The roles of a server's engine processes with --prefill and --decode: which engine has which, and what each is started with."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.kv_connectors import with_connector_options
from jaxllm.kv_transfer_options import without_policies

_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((1,), "prefill and decode say how many engines there are; leave data_parallel_size out"),
    "nnodes": (
        (1,),
        "such a server lies on one host; for several, start engines with kv_role behind a router (docs/PREFILL_DECODE.md)",
    ),
    "distributed_executor_backend": ((None, "mp", "uni"), "the server starts the engines itself; leave it out"),
    "enable_expert_parallel": (
        (False,),
        "it would make one engine of them, which shares the experts; leave enable_expert_parallel out",
    ),
    "kv_role": ((None,), "the server gives each engine its role; leave kv_role out"),
    "enable_prefix_caching": ((None, True), "blocks of prompts are found by prefix caching; leave one of both out"),
}
"""Options with the values that such a server takes, and why no others."""


class Roles(NamedTuple):
    """So many prefill engines, which have the first ranks, and then decode engines."""

    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"prefill {self.num_prefill} and decode {self.num_decode}"

    @property
    def prefill_ranks(self) -> Sequence[int]:
        """The ranks of the prefill engines."""
        return range(self.num_prefill)

    def applied_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The flat options that the engines have in common: they are replicas. Raises ConfigError for options that contradict roles."""
        num_engines = self.num_prefill + self.num_decode
        flat = {**EngineConfig().flat(), **with_connector_options({**options, "data_parallel_size": num_engines})}
        flat["data_parallel_size"] = options.get("data_parallel_size", 1)
        faults = [
            f"the server has {self}, and {name} is {flat[name]}: {why}"
            for name, (allowed, why) in _ALLOWED.items()
            if flat[name] not in allowed
        ]
        if not flat["kv_offloading_size"]:
            faults.append(
                f"the server has {self}, but there is no host memory through which engines pass blocks; set kv_offloading_size, in GiB for "
                "all engines together (docs/PREFILL_DECODE.md says how much)"
            )
        if faults:
            raise ConfigError("; ".join(faults))
        return {**options, "data_parallel_size": num_engines}

    def decode_engine(self, config: EngineConfig) -> EngineConfig:
        """The options of a decode engine, for checks before any engine starts. config: what they have in common."""
        return config.replace(kv_role="decode")

    def options_of_each(self) -> dict[int, dict[str, Any]]:
        """The engine options of each rank alone. Prefill engines listen at free ports of loopback, which their answers name."""
        prefill, decode = {"kv_role": "prefill", "kv_port": 0, **without_policies()}, {"kv_role": "decode"}
        ranks = range(self.num_prefill + self.num_decode)
        return {rank: prefill if rank in self.prefill_ranks else decode for rank in ranks}

    def with_secret(self, environments: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Add a common secret to the environments of the engines, so that other processes of this machine cannot fetch blocks."""
        secret = {env.KV_TOKEN: secrets.token_hex(32)}
        return [{**given, **secret} for given in environments]
