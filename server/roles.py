"""The roles of a server's engine processes with --prefill and --decode: what each is started with."""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.options.kv_transfer import without_policies
from jaxllm.vllm_compat.kv_connectors import without_connector_size
from server.options import ProcessOptions

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

    @classmethod
    def of(cls, options: ProcessOptions) -> "Roles | None":
        """None: every engine does both."""
        if options.prefill is None or options.decode is None:
            return None
        return cls(options.prefill, options.decode)

    def __str__(self) -> str:
        return f"prefill {self.num_prefill} and decode {self.num_decode}"

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """The options that the engines have in common: they are replicas. Raises ConfigError for options that contradict roles."""
        flat = config.flat()
        faults = [
            f"the server has {self}, and {name} is {flat[name]}: {why}"
            for name, (allowed, why) in _ALLOWED.items()
            if flat[name] not in allowed
        ]
        if not config.cache.kv_offloading_size:
            faults.append(
                f"the server has {self}, but there is no host memory through which engines pass blocks; set kv_offloading_size, in GiB for "
                "all engines together (docs/PREFILL_DECODE.md says how much)"
            )
        if faults:
            raise ConfigError("; ".join(faults))
        options = {**without_connector_size(flat), "data_parallel_size": self.num_prefill + self.num_decode}
        return EngineConfig.from_options(**options)

    def decode_engine(self, config: EngineConfig) -> EngineConfig:
        """The options of a decode engine, for checks before any engine starts. Raises ConfigError as `applied_to`."""
        return self.applied_to(config).replace(kv_role="decode")

    def options_of_each(self) -> dict[int, dict[str, Any]]:
        """The engine options of each rank alone. Prefill engines listen at free ports of loopback, which their answers name."""
        prefill, decode = {"kv_role": "prefill", "kv_port": 0, **without_policies()}, {"kv_role": "decode"}
        return {rank: prefill if rank < self.num_prefill else decode for rank in range(self.num_prefill + self.num_decode)}

    def with_secret(self, environments: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Add a common secret to the environments of the engines, so that other processes of this machine cannot fetch blocks."""
        secret = {env.KV_TOKEN: secrets.token_hex(32)}
        return [{**given, **secret} for given in environments]
