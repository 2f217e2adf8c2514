"""Sizes of the work."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; lengths are in tokens."""

    host_gib: float = 40.0
    num_blocks: int = 4096
    """Blocks of the device's cache, in parts whose work is to exceed it, and that share engines."""
    repeats: int = 20
    rows: int = 64
    context: int = 1024
    num_steps: int = 200
    prompts: tuple[int, ...] = (2048, 32768)
    conversations: int = 32
    first: int = 4096
    """New prompt tokens of a conversation's first turn; `turn`: of each other turn."""
    turns: int = 9
    turn: int = 512
    new_prompt: int = 2048
    """Length of prompts that never come back."""
    new_rows: int = 24
    """Requests with such prompts at a time: fewer than fit the cache, so that both engines plan the same steps."""
    num_output: int = 16
    max_model_len: int = 40960
    short: tuple[int, int] = (512, 128)
    """Prompt and answer of requests that fit the cache together, and leave free what tiers would copy ahead."""
    runs: int = 8
    """Runs on each engine of requests that fit the cache."""
    long_rows: int = 64
    """Requests that need four times the cache, and in `long_answer` the prompt and answer of each."""
    long_answer: tuple[int, int] = (512, 512)
    stretches: int = 10
    """Times that each engine in turn makes `stretch_steps` decode steps."""
    stretch_steps: int = 15
    launch_context: int = 256
    far_prompt: int = 8192
    """Length of a prompt whose blocks come from files or another engine."""
    far_host_gib: float = 5.0
    """Host memory for four such prompts and some more."""
    far_repeats: int = 3
    locking_seconds: float = 10.0
    """In which a decode engine locks the host memory of a prefill engine, from its first fetch on; see docs/PREFILL_DECODE.md."""

    @property
    def quarter_blocks(self) -> int:
        """A quarter of the blocks that the requests with long answers need."""
        return self.long_rows * sum(self.long_answer) // 16 // 4


TINY = Sizes(
    host_gib=0.05,
    num_blocks=24,
    repeats=3,
    rows=2,
    context=32,
    num_steps=10,
    prompts=(100, 200),
    conversations=6,
    first=60,
    turns=2,
    turn=60,
    new_prompt=60,
    new_rows=2,
    num_output=8,
    max_model_len=320,
    short=(20, 12),
    runs=2,
    long_rows=6,
    long_answer=(40, 120),
    stretches=2,
    stretch_steps=5,
    launch_context=32,
    far_prompt=200,
    far_host_gib=0.0006,
    locking_seconds=0.0,
)
TINY_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": [64],
    "decode_buckets": [4],
    "warmup": "lazy",
}
