"""Choices that depend on the number of tokens or rows of a step: the sizes that are compiled, and how each size is computed.

All of it is asked of one `KernelPolicy`, because such a choice changes the order of sums, and so the last bits of results, with what
else is in the batch. A policy whose thresholds are 0 or `MORE_THAN_ANY` and whose sizes are empty chooses alike for all steps. Kernels
choose their tiles and splits themselves (`pallas_kernels/`).
"""

import sys
from dataclasses import dataclass, replace

MORE_THAN_ANY = sys.maxsize
"""As a threshold: more tokens or rows than any step has."""

GATED_ROWS = 256
"""Rows that the CTAs of a cluster of `pallas_kernels/gated_matmul` compute at a time."""
CONCURRENT: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""XLA's option for programs on one GPU whose kernels do not all depend on each other: nodes of a CUDA graph that do not depend on each
other run concurrently, and do not share memory."""


@dataclass(frozen=True)
class KernelPolicy:
    """The choices of an engine. Figures are from docs/MEASUREMENTS.md; a number without one is an estimate."""

    decode_rows: tuple[int, ...]
    """Padded rows of a step in which every request computes one token. Of this and the next three fields, sizes below the engine's limit
    are compiled, and the limit itself."""
    tokens: tuple[int, ...]
    """Padded tokens of every other step."""
    rows_apart: tuple[int, ...] = ()
    """Padded rows of a decode that another program samples, with logprobs, state or masks; empty: it runs as any other step."""
    sample_rows: tuple[int, ...] = (8, 64, 256)
    """Padded rows that a step other than decode samples."""
    max_draft_rows: int = 64
    """Most rows of a step with drafts: with more, drafts cost more than the few steps that they save. At 64 rows a step with four drafts
    takes 11.5 ms in place of 6.8 (8B, 3.0 tokens of a request in it)."""
    max_triton_rows: int = 16
    """Up to this size XLA may multiply with its own Triton kernels, which for 8 rows are the fastest. Beyond, products go to cuBLAS alone:
    it adds the residual in passing, and a Triton product, which is chosen by timing concurrently with other work, is now and then far
    slower (13 ms instead of 0.4 for the head at 256 rows)."""
    max_concurrent_rows: int = 0
    """Up to so many rows the branches of a layer (`ModelConfig.has_branches`) are computed concurrently: their kernels are so short that
    the device is not busy."""
    max_joined_rows: int = 0
    """Up to so many rows one kernel computes all between the products of linear attention (`pallas_kernels/delta_decode`)."""
    min_gated_tokens: int = MORE_THAN_ANY
    """From so many tokens on one kernel computes gate, up and the activation of dense layers (`pallas_kernels/gated_matmul`), where hardly
    any of its rows are padding."""
    min_scaled_gated_tokens: int = MORE_THAN_ANY
    """From so many tokens on that kernel computes layers in fp8, of weights and of tokens."""
    max_weight_only_rows: int = 0
    """Up to so many rows products with fp8 weights take activations as they are, in place of fp8: to find scales takes longer than fp8
    products save. Not more than `max_triton_rows`: cuBLAS needs the whole weight in the type of the activations."""
    min_tokens_of_two_runs: int = 2048
    """Steps of so many tokens are computed in two runs, where the devices share every layer. With fewer, a half is too small for its
    products to be fast, and sums go through the peers' memory."""
    min_tokens_to_send: int = 256
    """With so many tokens in each data-parallel rank, tokens are sent to the devices of their experts. A step with fewer is bound by the
    number of exchanges, of which sending needs more than gathering."""
    max_tokens_at_once: int = 8192
    """Most tokens of all ranks that a device computes with its experts at a time: what it has of them in memory grows with the number of
    ranks, and with every choice of a token, also of other devices' experts. More tokens take more rounds."""
    min_shared_tokens: int = 256
    """Steps of so many tokens are shared out between the devices that split prompts. Up to about here a GPU reads the weights of a product
    for longer than it multiplies."""

    @property
    def least_rows(self) -> int:
        """Rows of the smallest program of a decode. An engine that never runs so many pads them: fewer would take longer."""
        return min(self.decode_rows, default=1)

    def has_drafts(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have drafts."""
        return num_rows <= self.max_draft_rows

    def is_weight_only(self, num_rows: int) -> bool:
        """Whether products of so many rows take them as they are, where weights are of 8-bit floats."""
        return num_rows <= self.max_weight_only_rows

    def is_joined(self, num_rows: int) -> bool:
        """Whether one kernel computes all between the products of linear attention, in a decode of so many rows."""
        return num_rows <= self.max_joined_rows

    def gates_in_one(self, num_tokens: int, *, is_scaled: bool = False) -> bool:
        """Whether one kernel computes gate, up and the activation of dense layers, of so many tokens: if that pads them by an eighth at
        most. is_scaled: in fp8."""
        padded = -(-num_tokens // GATED_ROWS) * GATED_ROWS
        least = self.min_scaled_gated_tokens if is_scaled else self.min_gated_tokens
        return num_tokens >= least and 8 * padded <= 9 * num_tokens

    def in_program(self, size: int) -> "KernelPolicy":
        """This policy for all that a program of this size computes, also of fewer rows: without Triton products none are weight-only."""
        return replace(self, max_weight_only_rows=0) if size > self.max_triton_rows else self

    def num_runs(self, num_tokens: int) -> int:
        """Number of equal runs that a step's tokens are computed in, so that products of one overlap with sums of another."""
        return 2 if num_tokens >= self.min_tokens_of_two_runs and num_tokens % 2 == 0 else 1

    def sends_tokens(self, num_tokens: int) -> bool:
        """Whether ranks of so many tokens send them to the devices of their experts, if that is less to exchange than to gather all."""
        return num_tokens >= self.min_tokens_to_send

    def shares_tokens(self, num_tokens: int) -> bool:
        """Whether each device that splits prompts computes a share of a step's tokens, rather than all."""
        return num_tokens >= self.min_shared_tokens

    def has_concurrent_branches(self, num_rows: int) -> bool:
        """Whether the branches of a layer are computed concurrently, in a decode of so many rows on one GPU."""
        return num_rows <= self.max_concurrent_rows

    def branch_options(self, num_rows: int) -> dict[str, str | bool]:
        """XLA's options for a decode of so many rows, on one GPU, of a model whose layers have branches."""
        return CONCURRENT if self.has_concurrent_branches(num_rows) else {}

    def compiler_options(self, size: int) -> dict[str, str | bool]:
        """XLA's options for a GPU that depend on the size of a program: its tokens, or its rows where each computes one."""
        return {"xla_gpu_enable_triton_gemm": False} if size > self.max_triton_rows else {}


def _tokens_of_gpu() -> tuple[int, ...]:
    """Powers of two from 16; from 256, where time follows the padded size, also quarters between them, and above 2048 halves.

    Quarters in place of halves took the time per token at 32 requests a second from 8.1–8.4 to 7.4 ms.
    """
    parts_of = ((2**power, 1 if power < 8 else 4 if power < 11 else 2) for power in range(4, 31))
    return tuple(size + size * part // parts for size, parts in parts_of for part in range(parts))


GPU = KernelPolicy(
    # From eight on: XLA turns products of fewer rows into reductions, which read small weights at a third of the speed.
    decode_rows=(8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    tokens=_tokens_of_gpu(),
    rows_apart=(8, 16, 32, 64, 128, 256, 512, 1024),
    # A layer of an 8B model without attention takes 95 us at 8 rows and 102 at 16 on an H100, with activations in fp8 119 and 112; at
    # 32 rows both take about as long.
    max_weight_only_rows=16,
    max_concurrent_rows=16,
    max_joined_rows=16,
    # Gate and up of Llama-3.1-8B with the activation take 107 us for 256 tokens on an H200 in place of 112, 360 for 1024 in place of 410.
    min_gated_tokens=256,
    # In fp8 62 us for 256 tokens in place of 57; prompts in steps of 8192 are computed 2.6 % faster.
    min_scaled_gated_tokens=2048,
)
CPU = KernelPolicy(
    # XLA computes products of two rows on a CPU about as fast as of four.
    decode_rows=(1, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    # Few, because a CPU compiles slowly. It samples no decode apart for the same reason.
    tokens=tuple(4**power for power in range(1, 16)),
)


ALIKE = KernelPolicy(
    decode_rows=(),
    tokens=(),
    sample_rows=(),
    max_draft_rows=MORE_THAN_ANY,
    max_triton_rows=0,
    min_tokens_of_two_runs=MORE_THAN_ANY,
    min_tokens_to_send=MORE_THAN_ANY,
    max_tokens_at_once=MORE_THAN_ANY,
    min_shared_tokens=MORE_THAN_ANY,
)
"""Chooses alike for steps of all sizes: of steps that are computed outside of an engine."""


def platform_policy(*, on_gpu: bool, has_weight_only: bool = True) -> KernelPolicy:
    """The policy of an engine on a GPU or a CPU. has_weight_only: False turns `max_weight_only_rows` off."""
    policy = GPU if on_gpu else CPU
    return policy if has_weight_only else replace(policy, max_weight_only_rows=0)
