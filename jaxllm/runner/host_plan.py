"""How much host memory an engine takes for blocks of its cache, and what fits there."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ConfigError


@dataclass(frozen=True)
class HostPlan:
    """Blocks in the host memory of an engine, of each replica if there are several."""

    num_bytes: int
    num_blocks: int
    num_tokens: int
    """Tokens of which these blocks keep all, also what has left a window."""
    block_bytes: int
    """Without what rounds a block up to whole pages."""
    staging_bytes: int
    """Bytes that copies take of each device."""
    fault: ConfigError | None = None
    """Why this machine has not so much memory."""

    def described(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "fault"}

    def describe(self) -> str:
        """Format the numbers as a line for the log."""
        return (
            f"host memory for blocks: {self.num_bytes / 2**30:.2f} GiB: {self.num_blocks} blocks of {self.block_bytes / 2**10:.1f} KiB, "
            f"{self.num_tokens} tokens; copies take {self.staging_bytes / 2**20:.1f} MiB of each device"
        )
