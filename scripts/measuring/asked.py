"""Which rows a benchmark was asked for, by their names: 64, decode64, decode16@16K, prefill1@128k, mixed, 128."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxllm.flag_arguments import whole_number

LONG = "decode16@4K,decode16@16K,decode4@64K,decode1@128k,prefill16@16K,prefill1@32K,prefill1@128k"
"""The rows that the name `long` stands for. Here 128k, 128000, leaves room for an output in models of 131072 tokens."""
_STEP_TOKENS = 2048
"""Least tokens of prompts that a step computes in addition to decodes."""


@dataclass(frozen=True)
class Asked:
    """One name. batch: time per token and prefill; decode or prefill: that alone; requests: many at once, by `name`."""

    name: str
    kind: Literal["batch", "decode", "prefill", "requests"]
    num_requests: int = 0
    num_tokens: int | None = None
    """Tokens of each prompt; None: as other options say."""

    @classmethod
    def of(cls, name: str) -> "Asked":
        """Read a name. Raises ValueError for an unknown one."""
        if name in ("mixed", "128"):
            return cls(name, "requests")
        found = re.fullmatch(r"(decode|prefill|)([1-9]\d*)(?:@(\w+))?", name)
        kind, count, tokens = found.groups() if found else ("", "", None)
        num_tokens = None if tokens is None else whole_number(tokens)
        needs_tokens = {"": False, "prefill": True}.get(kind, tokens is not None)
        if not found or needs_tokens != (tokens is not None):
            raise ValueError(f"no row {name!r}; there are 64, decode64, decode16@16K, prefill1@128k, mixed, 128 and long")
        return cls(name, kind or "batch", int(count), num_tokens)  # type: ignore[arg-type]

    def longest(self, output: int) -> int:
        """Tokens of the longest request: while others' prompts are computed, the first of a decode have tokens already."""
        if self.num_tokens is None:
            return 0
        steps = -(-self.num_requests * self.num_tokens // _STEP_TOKENS) + output + 64 if self.kind == "decode" else 1
        return self.num_tokens + steps


def read_rows(names: str) -> list[Asked]:
    """The rows of names with commas between, `long` replaced. Raises ValueError for an unknown one."""
    listed = [part for name in names.split(",") for part in (LONG if name == "long" else name).split(",")]
    return [Asked.of(name) for name in listed]


def max_model_len(rows: Iterable[Asked], output: int, usual: int = 4096) -> int:
    """The length that the rows need, in whole pages of any size; at least the usual."""
    return max(usual, *(-(-row.longest(output) // 128) * 128 for row in rows))
