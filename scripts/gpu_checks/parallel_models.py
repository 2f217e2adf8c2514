"""Models with weights in 4 and 8 bits, with experts and with linear attention over 2 and 4 devices.

Float32: the tokens of one device. Bfloat16, by the kernels that engines choose: prompts' logprobs no further from float32 than those of
plain XLA on one device are (a stated factor).
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome, shapes, skip
from scripts.gpu_checks.tensor_parallel_traffic import full_precision, guarded

SIZES = (2, 4)
FACTOR = 1.5
LINE_SECONDS = 240.0
"""Engines that compile side by side take their time."""
LINEAR: shapes.Shapes = shapes.QWEN3_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 768,
    "num_hidden_layers": 4,
}
"""Qwen3-Next's heads. All experts are chosen, as rounding must not change the choice."""
MXFP4 = "experts in MXFP4"
"""Called so, gpt-oss's: in tiles where kernels are named, and widened in float32 unless that is turned off."""
Scores = list[float]


def models(*, tiny: bool) -> dict[str, shapes.Shapes]:
    """By what they are called: a layer of Llama-3.1-8B in each kind of numbers, one of experts in int4, gpt-oss's and linear attention."""
    dense, mixture, linear, oss = (shapes.LLAMA_8B | {"vocab_size": 8192}, shapes.QWEN3_MOE, LINEAR, shapes.GPT_OSS)
    if tiny:
        narrow = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        dense, mixture, linear = shapes.tiny(dense), shapes.tiny(mixture), shapes.tiny(linear) | narrow
        linear["num_hidden_layers"] = 4
        oss = shapes.tiny(oss) | {"intermediate_size": 384}
    one, all_chosen = {"num_hidden_layers": 1}, {"num_experts": 4, "num_experts_per_tok": 4}
    found = {f"weights in {number}": shapes.quantized(dense | one, number) for number in shapes.NUMBERS}
    found["experts in int4"] = shapes.quantized(mixture | one | all_chosen, "int4")
    return {**found, MXFP4: oss, "linear attention": linear | all_chosen}


def check(*, tiny: bool, deadline: float, share: tuple[int, int] = (0, 1), sizes: Sequence[int] = SIZES) -> Iterator[Outcome]:
    """Every size that the visible devices allow, of every so many-th model; nothing begins after the deadline."""
    num_devices = len(jax.devices())
    allowed = [size for size in sizes if size <= num_devices]
    for size in sizes if share[0] == 0 else ():
        if size not in allowed:
            yield skip(f"{size} devices", f"{num_devices} visible")
    for name, config in list(models(tiny=tiny).items())[share[0] :: share[1]] if allowed else ():
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            yield from _Run(name, directory, tiny, deadline).outcomes(allowed)


class _Run:
    """Engines of one model; those over one device say what is right."""

    def __init__(self, name: str, directory: str, tiny: bool, deadline: float):
        self._name, self._directory, self._tiny, self._deadline = name, directory, tiny, deadline
        count, self._num_tokens = (3, 4) if tiny else (16, 24)
        self._prompts = [[1 + (7 * i + j * j) % 60 for j in range(3 + 17 * i)] for i in range(count)]
        self._tokens: list[list[int]] = []
        self._exact: Scores = []
        self._plain: Scores = []

    def outcomes(self, sizes: Sequence[int]) -> Iterator[Outcome]:
        found = guarded(f"1 device, {self._name}", self._deadline, self._one_device, most_seconds=LINE_SECONDS)
        if found.failed:
            yield found
            return
        for size in sizes:
            title = f"{size} devices, {self._name}"
            yield guarded(f"{title}: float32 tokens", self._deadline, self._equal, size, most_seconds=LINE_SECONDS)
            yield guarded(f"{title}: bfloat16 logprobs", self._deadline, self._near, size, most_seconds=LINE_SECONDS)

    def _one_device(self) -> tuple[bool, str]:
        with full_precision():
            self._tokens, self._exact, _ = self._answers(1, dtype="float32", attention_implementation="xla")
        _, self._plain, _ = self._answers(1, dtype="bfloat16", attention_implementation="xla")
        return True, "what is right"

    def _equal(self, size: int) -> tuple[bool, str]:
        with full_precision():
            found, _, _ = self._answers(size, dtype="float32")
        num_equal = sum(a == b for a, b in zip(found, self._tokens, strict=True))
        return num_equal == len(found), f"{num_equal} of {len(found)} requests equal one device's"

    def _near(self, size: int) -> tuple[bool, str]:
        kernels = {"attention_implementation": "triton"} if jax.default_backend() == "cpu" else {}
        _, found, used = self._answers(size, dtype="bfloat16", **kernels)
        off, allowed = _off(found, self._exact), FACTOR * _off(self._plain, self._exact) + 1e-6
        ops = ("quantized_matmul", "grouped_matmul", "gated_delta")
        told = ", ".join(f"{op} {used[op].implementation}" for op in ops if op in used)
        return off <= allowed, f"off by {off:.1e}, at most {allowed:.1e}; {told}"

    def _answers(self, size: int, **options: Any) -> tuple[list[list[int]], Scores, Mapping[str, Any]]:
        """Greedy tokens, the logprobs of all prompts' tokens behind the first, and the kernels of an engine."""
        rows, tokens = (4, 32) if self._tiny else (16, 512)
        sizes = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "decode_buckets": [rows], "token_buckets": [tokens]}
        stored = {"dequantize": False} if self._name == MXFP4 else {}
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "use_progress_bar": False, "warmup": "lazy"}
        length = {"max_model_len": 64 if self._tiny else 512, "num_gpu_blocks_override": 65 if self._tiny else 1025}
        llm = LLM(self._directory, tensor_parallel_size=size, **dummy, **stored, **sizes, **length, **options)
        try:
            params = SamplingParams(
                temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True, detokenize=False, prompt_logprobs=0
            )
            outputs = llm.generate(self._prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            scores = [
                next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs or () if entry
            ]
            core: Any = llm.llm_engine.core
            return [list(output.outputs[0].token_ids) for output in outputs], scores, dict(core.kernels)
        finally:
            llm.shutdown()


def _off(found: Scores, exact: Scores) -> float:
    """The root of the mean squared difference."""
    return float(np.sqrt(np.mean(np.square(np.subtract(found, exact)))))
